"""Whatever is pasted gives a sound topology or one clear error, in bounded time and memory.

Real pastes that are mutilated, and the commands' words in any order, are inputs of ``fuzz``.
"""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpuaff.errors import TopologyError
from gpuaff.topology.model import Topology
from gpuaff.topology.pasted import MAX_CHARS, parse
from tests.pasted_machines import MACHINES
from tests.sound import sound

PASTES = {machine.name: machine.text for machine in MACHINES}


def survives(text: str) -> None:
    topology = read(text)
    if topology is not None:
        sound(topology)
        assert read(text) == topology


def read(text: str) -> Topology | None:
    """The topology, or None after an error that is one line about the text."""
    problem = ""
    try:
        return parse(text)
    except TopologyError as error:
        problem = str(error)
    assert problem.startswith("pasted text: ")
    assert "\n" not in problem
    return None


@given(st.text())
@example("")
@example("\0")
@example("\n")
@example("\ud800")
def test_any_text(text: str) -> None:
    survives(text)


@pytest.mark.parametrize(
    "name", ["02-kvm-vm-1gpu-8cpu", "28-a100x2-128core-no-smt", "04-a30x4-2socket-xeon6342"]
)
def test_cut_at_every_character_no_gpu_gets_cpus_that_are_not_near(name: str) -> None:
    text = PASTES[name].split("Legend")[0]
    whole = parse(text)
    for end in range(len(text)):
        try:
            topology = parse(text[:end])
        except TopologyError:
            continue
        sound(topology)
        assert topology.cpus <= whole.cpus
        for gpu in topology.gpus:
            assert gpu.node_cpus in (None, whole.gpu_by_index[gpu.index].node_cpus)
            assert gpu.numa_node in (None, whole.gpu_by_index[gpu.index].numa_node)


@pytest.mark.parametrize(
    "text",
    ["", " \n\t\n", "hello\n", "\0\1\2\xff" * 100, "<html>\n<body>nothing</body>\n", "X = Self\n"],
)
def test_a_text_without_a_table(text: str) -> None:
    with pytest.raises(TopologyError, match=r"^pasted text: .*nvidia-smi topo -m"):
        parse(text)


def _fill(piece: str, size: int = MAX_CHARS // 4) -> str:
    return piece * (size // len(piece))


@pytest.mark.parametrize(
    "text",
    [
        "x" * (MAX_CHARS + 1),
        "GPU0\tX\t" + _fill("0-65535,", MAX_CHARS - 10),
    ],
    ids=["characters", "one long list"],
)
def test_more_than_any_machine_has_is_refused(text: str) -> None:
    with pytest.raises(TopologyError) as caught:
        parse(text[: MAX_CHARS + 1])
    assert len(str(caught.value)) < 300


_MEGABYTES = [
    _fill("#"),
    _fill("\n"),
    _fill("GPU0\tX\n"),
    _fill("GPU0 GPU1 CPU Affinity\n"),
    "GPU0" + _fill("X"),
    "GPU 0: NVIDIA (UUID:" + _fill(" "),
    "On-line CPU(s) list: 0" + _fill(",\n1"),
    "node 0 cpus: " + _fill("1 "),
    "".join(f"node {node} cpus: 0 1\n" for node in range(5000)),
]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(text, id=str(number), marks=() if number in (0, 4) else pytest.mark.slow)
        for number, text in enumerate(_MEGABYTES)
    ],
)
def test_megabytes(text: str) -> None:
    """The test's time limit would end it if the time grew faster than the text."""
    tracemalloc.start()
    try:
        read(text)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 60 * MAX_CHARS
