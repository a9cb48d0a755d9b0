"""Whatever is pasted gives a sound topology or one clear error, in bounded time and memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpuaff.errors import TopologyError
from gpuaff.topology.model import Topology
from gpuaff.topology.pasted import parse
from gpuaff.topology.pasted.text import MAX_CHARS, MAX_LINES
from tests.pasted_machines import DATA, MACHINES
from tests.sound import sound

PASTES = {machine.name: machine.text for machine in MACHINES}
PASTES |= {path.name: path.read_text("utf-8") for path in sorted((DATA / "lscpu").iterdir())}
UUID = "GPU-00000000-1111-2222-3333-444444444444"
NUMACTL = (
    "node 0 cpus: 0 1 2 3\nnode 0 size: 1 MB\nnode 1 cpus: 4 5 6 7\nnode 1 size: 0 MB\n"
    "node distances:\nnode 0 1\n  0: 10 21\n  1: 21 10\n"
)
LIST = f"GPU 0: NVIDIA A30 (UUID: {UUID})\n  MIG 1g.6gb Device 0: (UUID: MIG-{UUID}/1/0)\n"
TEXTS = [*PASTES.values(), NUMACTL, LIST]

WORDS = (
    "GPU0 GPU1 GPU2 GPU GPU999 NIC0 mlx5_0 X SYS NV12 PIX N/A 0 1 2 0-3 4-7 0,2,4,6,8,10 0-65535 "
    "3-0 0,2-17 -1 CPU Affinity NUMA ID node0 node CPU(s): On-line list: Thread(s) per core: "
    "Socket(s): cpus: size: MB distances: GPU0: 0: 10 21 # | ``` \x1b[4m CPU,Core,Socket,Node,,L3 "
    "CPU CORE L1d:L3 ONLINE yes no 0,0,0,0,,0 1,0,0,0,,0 GPU[0] : MIG \0 ² ٣ \ud800"
)


def survives(text: str) -> None:
    topology = read(text)
    if topology is not None:
        sound(topology)
        assert read(text) == topology


def read(text: str) -> Topology | None:
    """The topology, or None after an error that is one line about the text."""
    problem = ""
    try:
        return parse(text, name="it")
    except TopologyError as error:
        problem = str(error)
    assert problem.startswith("it: ")
    assert "\n" not in problem
    return None


@given(st.text())
@example("")
@example("\0")
@example("\n")
@example("\ud800")
def test_any_text(text: str) -> None:
    survives(text)


@given(st.binary())
def test_binary(data: bytes) -> None:
    survives(data.decode("latin-1"))
    survives(data.decode("utf-8", "replace"))
    survives(data.decode("utf-8", "surrogateescape"))


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.sampled_from(WORDS.split(" ")), st.sampled_from([" ", "\t", "\n", "", "  "])),
        max_size=60,
    )
)
def test_the_words_of_those_commands_in_any_order(words: list[tuple[str, str]]) -> None:
    survives("".join(word + space for word, space in words))


def _drop(lines: list[str], at: int) -> list[str]:
    return lines[:at] + lines[at + 1 :]


def _repeat(lines: list[str], at: int) -> list[str]:
    return [*lines, lines[at]]


def _swap(lines: list[str], at: int) -> list[str]:
    return [*lines[at:], *lines[:at]]


def _delete_cell(lines: list[str], at: int) -> list[str]:
    words = lines[at].split("\t") if "\t" in lines[at] else lines[at].split()
    gone = words[: at % (len(words) + 1)] + words[at % (len(words) + 1) + 1 :]
    return [*lines[:at], "\t".join(gone), *lines[at + 1 :]]


def _empty_cell(lines: list[str], at: int) -> list[str]:
    words = lines[at].split("\t")
    words[at % len(words)] = ""
    return [*lines[:at], "\t".join(words), *lines[at + 1 :]]


def _blanks(lines: list[str], at: int) -> list[str]:
    return [*lines[:at], lines[at].replace("\t", " "), *lines[at + 1 :]]


def _tabs(lines: list[str], at: int) -> list[str]:
    return [*lines[:at], "\t".join(lines[at].split()), *lines[at + 1 :]]


def _glue(lines: list[str], at: int) -> list[str]:
    return [*lines[:at], lines[at].replace("\t", ""), *lines[at + 1 :]]


def _wrap(lines: list[str], at: int) -> list[str]:
    middle = len(lines[at]) // 2
    return [*lines[:at], lines[at][:middle], lines[at][middle:], *lines[at + 1 :]]


Mutation = Callable[[list[str], int], list[str]]
MUTATIONS: list[Mutation] = [
    _drop,
    _repeat,
    _swap,
    _delete_cell,
    _empty_cell,
    _blanks,
    _tabs,
    _glue,
    _wrap,
]


@settings(max_examples=100)
@given(
    st.lists(st.sampled_from(TEXTS), min_size=1, max_size=3),
    st.lists(st.tuples(st.sampled_from(MUTATIONS), st.integers(0, 10_000)), max_size=8),
    st.none() | st.integers(0, 4_000),
)
def test_real_pastes_mutilated(
    texts: list[str], mutations: list[tuple[Mutation, int]], end: int | None
) -> None:
    lines = "".join(texts).splitlines()
    for mutate, at in mutations:
        lines = mutate(lines, at % len(lines)) or [""]
    survives("\n".join(lines)[:end])


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
    with pytest.raises(TopologyError, match="nvidia-smi topo -m") as caught:
        parse(text, name="report.txt")
    assert str(caught.value).startswith("report.txt: ")


def test_the_default_name() -> None:
    with pytest.raises(TopologyError, match=r"^pasted text: "):
        parse("")


def _fill(piece: str, size: int = MAX_CHARS // 4) -> str:
    return piece * (size // len(piece))


@pytest.mark.parametrize(
    "text",
    [
        "x" * (MAX_CHARS + 1),
        "\n" * (MAX_LINES + 1),
        "GPU0\tX\t" + _fill("0-65535,", MAX_CHARS - 10),
        "".join(f"NUMA node{node} CPU(s): {node}-65535\n" for node in range(9999)),
        "\t" + "\t".join(f"GPU{index}" for index in range(300)) + "\tCPU Affinity\n",
        "GPU0\tX\n" * 10_001,
        "GPU0 GPU1 CPU Affinity\n" * 10_001,
    ],
    ids=["characters", "lines", "one long list", "many lists", "gpus", "rows", "headers"],
)
def test_more_than_any_machine_has_is_refused(text: str) -> None:
    with pytest.raises(TopologyError) as caught:
        parse(text[: MAX_CHARS + 1])
    assert len(str(caught.value)) < 300


_MEGABYTES = [
    _fill("#"),
    _fill("\x1b[1;"),
    _fill("<div "),
    _fill("<p"),
    _fill("&#9"),
    _fill("GPU0"),
    "GPU0" + _fill("X"),
    "GPU0 X" + _fill("\t"),
    "GPU 0: NVIDIA (UUID:" + _fill(" "),
    "NUMA" + _fill(" 1"),
    "On-line CPU(s) list: 0" + _fill(",\n1"),
    "node 0 cpus: " + _fill("1 "),
    "# CPU,Core\n" + "".join(f"{cpu},{cpu}\n" for cpu in range(16_000)),
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


def test_as_many_rows_as_may_be() -> None:
    """The same row again and again says nothing new; lines without a table don't count."""
    text = "\n" * 10_000 + "GPU0\tX\t0-3\n" * 9_999 + "GPU0\tX\t0-3"
    assert parse(text).gpu_by_index[0].node_cpus == frozenset(range(4))


def test_a_letter_that_is_named_by_thousands_of_digits() -> None:
    """Python's html.unescape would raise ValueError for a number that long."""
    topology = parse("GPU0\tX\t0-3\n&#1" + "0" * 5000 + ";\n")
    assert topology.gpu_by_index[0].node_cpus == frozenset(range(4))


@pytest.mark.parametrize(
    ("text", "count"), [("a", "1 line"), ("a\n", "1 line"), ("a\nb", "2 lines")]
)
def test_the_lines_of_a_text_without_a_machine_are_counted(text: str, count: str) -> None:
    with pytest.raises(TopologyError, match=rf"no CPU and no NVIDIA GPU in it \({count}\)"):
        parse(text)
