"""Every machine that somebody pasted: what is read of it, field by field, and its plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuaff import Topology, plan
from gpuaff.cpuset import format_cpulist
from gpuaff.topology.pasted import parse
from tests.pasted_machines import DATA, MACHINES, Pasted

pytestmark = pytest.mark.case("pasted-machines")

each_machine = pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)


def test_every_paste_is_in_the_table() -> None:
    names = {machine.name for machine in MACHINES}
    assert names == {path.stem for path in (DATA / "pastes").iterdir()}
    assert names == {path.stem for path in (DATA / "topologies").iterdir()}


@each_machine
def test_is_read_as_saved(machine: Pasted, tmp_path: Path) -> None:
    saved, topology = machine.saved, parse(machine.text)
    codes = {note["code"] for note in saved.pop("notes")}
    written = topology.to_dict()
    assert {member: written[member] for member in saved} == saved
    assert {note.code for note in topology.notes} == codes
    assert Topology.load(machine.saved_path)._replace(notes=topology.notes) == topology
    topology.save(tmp_path / "machine.json")
    assert Topology.load(tmp_path / "machine.json") == topology


@each_machine
def test_plans(machine: Pasted) -> None:
    topology = parse(machine.text)
    for plans, balanced in ((machine.plans, True), (machine.unbalanced, False)):
        for ranks in plans:
            made = plan(topology, len(ranks), balanced=balanced)
            assert [format_cpulist(share.cpus) for share in made.shares] == ranks


@each_machine
def test_white_space_does_not_matter(machine: Pasted) -> None:
    """CRLF; every line in a comment and quoted; a code fence; no newline at the end."""
    topology = parse(machine.text)
    assert parse(machine.text.replace("\n", "\r\n")) == topology
    assert parse("".join(f"# > {line}\n" for line in machine.text.splitlines())) == topology
    assert parse(f"```\n{machine.text}```\n") == topology
    assert parse(machine.text.rstrip()) == topology
    if "Affinity" in machine.text:
        blanks = parse(machine.text.expandtabs(4))
        places = [[(gpu.node_cpus, gpu.numa_node) for gpu in t.gpus] for t in (blanks, topology)]
        assert places[0] == places[1]
        assert blanks.links == topology.links
