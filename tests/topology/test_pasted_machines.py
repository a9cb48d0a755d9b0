"""Every machine that somebody pasted: what is read of it, field by field, and its plan."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest

from gpuaff.allocator.plan import plan as make_plan
from gpuaff.cpuset import format_cpulist
from gpuaff.errors import TopologyError
from gpuaff.topology.model import Topology
from gpuaff.topology.pasted import parse
from tests.pasted_machines import DATA, MACHINES, Cells, Pasted, Plan, plain

pytestmark = pytest.mark.case("pasted-machines")

each_machine = pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
each_plan = pytest.mark.parametrize(
    ("machine", "plan"),
    [(machine, plan) for machine in MACHINES for plan in machine.plans],
    ids=lambda value: value.name if isinstance(value, Pasted) else f"nproc{len(value.ranks)}",
)


def test_every_paste_is_in_the_table() -> None:
    names = {machine.name for machine in MACHINES}
    assert names == {path.stem for path in (DATA / "pastes").iterdir()}
    assert names == {path.stem for path in (DATA / "topologies").iterdir()}


@each_machine
def test_the_cells_stand_where_the_table_says(machine: Pasted) -> None:
    lines = machine.text.splitlines()
    for cells in machine.cells:
        for offset, gpu in enumerate(cells.gpus):
            label, *words = lines[cells.line - 1 + offset].split()
            assert label == f"GPU{gpu}"
            assert words[-_count(cells) :] == _told(cells)


def _told(cells: Cells) -> list[str]:
    return [cell for cell in (cells.cpu, cells.numa, cells.gpu_numa) if cell]


def _count(cells: Cells) -> int:
    return len(_told(cells))


@each_machine
def test_is_read_as_saved(machine: Pasted) -> None:
    saved = machine.saved
    codes = {note["code"] for note in saved.pop("notes")}
    topology = parse(machine.text)
    assert plain(topology) == saved
    assert {note.code for note in topology.notes} == codes


@each_machine
def test_the_saved_topology_loads(machine: Pasted) -> None:
    assert Topology.load(machine.saved_path) == parse(machine.text)


@each_machine
def test_round_trips_through_json(machine: Pasted, tmp_path: Path) -> None:
    topology = parse(machine.text)
    topology.save(tmp_path / "machine.json")
    again = Topology.load(tmp_path / "machine.json")
    assert again == topology
    assert again.notes == topology.notes


@each_plan
def test_plan(machine: Pasted, plan: Plan) -> None:
    made = make_plan(parse(machine.text), len(plan.ranks), balanced=plan.balanced)
    assert [format_cpulist(share.cpus) for share in made.shares] == plan.ranks


@each_machine
def test_white_space_does_not_matter(machine: Pasted) -> None:
    """CRLF; every line in a comment and quoted; a code fence; no newline at the end."""
    topology = parse(machine.text)
    assert parse(machine.text.replace("\n", "\r\n")) == topology
    assert parse("".join(f"# > {line}\n" for line in machine.text.splitlines())) == topology
    assert parse(f"```\n{machine.text}```\n") == topology
    assert parse(machine.text.rstrip()) == topology


@each_machine
def test_the_source_of_a_web_page_is_read_as_the_page(machine: Pasted) -> None:
    topology = parse(machine.text)
    escaped = html.escape(machine.text)
    assert parse(f'<pre class="log"><code>{escaped}</code></pre>') == topology
    assert parse(escaped.replace(" ", "&nbsp;").replace("\n", "<br />\n")) == topology
    assert parse(escaped.replace("\t", "&#9;").replace("\n", "<br>")) == topology


@each_machine
def test_a_dash_that_a_word_processor_made_is_a_dash(machine: Pasted) -> None:
    for dash in "\N{EN DASH}\N{NON-BREAKING HYPHEN}\N{MINUS SIGN}":
        assert parse(re.sub(r"(?<=\d)-(?=\d)", dash, machine.text)) == parse(machine.text)


@each_machine
@pytest.mark.parametrize(
    "head", ["[rank0]: ", "[default3]:\t", "2024-05-01T12:00:00.1234567Z ", "2024-05-01 12:00:00 "]
)
def test_what_a_log_puts_before_a_line_does_not_matter(machine: Pasted, head: str) -> None:
    logged = "".join(f"{head}{line}\n" for line in machine.text.splitlines())
    assert parse(logged) == parse(machine.text)


@pytest.mark.parametrize("machine", [m for m in MACHINES if m.cells], ids=lambda m: m.name)
def test_blanks_for_tabs_lose_no_cpu(machine: Pasted) -> None:
    blanks = parse(machine.text.expandtabs(4))
    tabs = parse(machine.text)
    assert [gpu.node_cpus for gpu in blanks.gpus] == [gpu.node_cpus for gpu in tabs.gpus]
    assert [gpu.numa_node for gpu in blanks.gpus] == [gpu.numa_node for gpu in tabs.gpus]
    assert blanks.links == tabs.links


def test_saved_topologies_are_json_of_this_version() -> None:
    for machine in MACHINES:
        assert json.loads(machine.saved_path.read_text("utf-8"))["schema_version"] == 1


def test_rocm_alone_is_refused_by_name() -> None:
    text = "GPU[0]\t\t: (Topology) Numa Node: 0\nGPU[0]\t\t: (Topology) Numa Affinity: 0\n"
    with pytest.raises(TopologyError, match="only AMD's GPUs"):
        parse(text)
