"""Which CPUs share a core, where only the numbering tells: two equal runs in every list."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.topology.model import Topology
from gpuaff.topology.pasted import parse

pytestmark = pytest.mark.case("pasted-machines")


def nodes(*lists: str) -> str:
    """The NUMA nodes as lscpu prints them."""
    return "".join(f"NUMA node{node} CPU(s): {cpus}\n" for node, cpus in enumerate(lists))


def table(*lists: str) -> str:
    """A table with a GPU beside each list."""
    names = [f"GPU{gpu}" for gpu in range(len(lists))]
    rows = [
        "\t".join([name, *("X" if other == name else "SYS" for other in names), cpus])
        for name, cpus in zip(names, lists, strict=True)
    ]
    return "\n".join(["\t" + "\t".join([*names, "CPU Affinity"]), *rows, ""])


def cores(topology: Topology) -> list[str] | None:
    return None if topology.cores is None else [format_cpulist(core) for core in topology.cores]


def message(topology: Topology, code: str) -> str:
    return next(note.message for note in topology.notes if note.code == code)


def is_inferred(topology: Topology) -> bool:
    """Whether the cores were worked out; the notes must say the same."""
    codes = {note.code for note in topology.notes}
    assert ("cores-inferred" in codes) == (topology.cores is not None)
    assert ("cores-unknown" in codes) == (topology.cores is None)
    return topology.cores is not None


def pairs(first: int, last: int, distance: int) -> list[str]:
    return [f"{cpu},{cpu + distance}" for cpu in range(first, last + 1)]


NUMACTL = "node 0 cpus: 0 1 4 5\nnode 0 size: 9 MB\nnode 1 cpus: 2 3 6 7\nnode 1 size: 9 MB\n"
ROWS_WITHOUT_CORES = "# CPU,Node\n" + "".join(f"{cpu},{cpu // 2 % 2}\n" for cpu in range(8))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (nodes("0-15,128-143", "16-31,144-159"), pairs(0, 31, 128)),
        (nodes("0-3,8-11", "4-7,12-15", "", ""), pairs(0, 7, 8)),
        (NUMACTL, pairs(0, 3, 4)),
        (ROWS_WITHOUT_CORES, pairs(0, 3, 4)),
        (table("48-63,176-191", "48-63,176-191"), pairs(48, 63, 128)),
        (table("0-3,8-11", "4-7,12-15", "", "N/A"), pairs(0, 7, 8)),
        (table("0,64", "0,64"), ["0,64"]),
        # What is near one GPU may be a part of what is near another one.
        (table("0-7,16-23", "0-3,16-19"), pairs(0, 7, 16)),
        # The nodes' lists count, whatever the table says.
        (nodes("0-3,8-11", "4-7,12-15") + table("0-3", "4-5,12"), pairs(0, 7, 8)),
        ("On-line CPU(s) list: 0-15\n" + table("0-3,8-11", "4-7,12-15"), pairs(0, 7, 8)),
        # A whole core offline at the end of each node.
        (nodes("0-2,8-10", "4-6,12-14"), [*pairs(0, 2, 8), *pairs(4, 6, 8)]),
        # Two threads are told, but only the CPUs near a GPU, or not all online.
        ("Thread(s) per core: 2\n" + table("48-63,176-191"), pairs(48, 63, 128)),
        (
            "Thread(s) per core: 2\n" + nodes("0-2,8-10", "4-6,12-14"),
            [*pairs(0, 2, 8), *pairs(4, 6, 8)],
        ),
        ("Core(s) per socket: 4\nSocket(s): 2\n" + nodes("0-3,8-11", "4-7,12-15"), pairs(0, 7, 8)),
    ],
)
def test_two_equal_runs_are_the_siblings(text: str, expected: Sequence[str]) -> None:
    topology = parse(text)
    assert cores(topology) == expected
    assert is_inferred(topology)


def test_the_message_names_the_first_core() -> None:
    topology = parse(nodes("16-31,144-159", "0-15,128-143"))
    assert "the first core: 0, 128" in message(topology, "cores-inferred")
    assert "`lscpu -p`" in message(topology, "cores-inferred")


HYPERVISOR = "Hypervisor vendor: KVM\n"


@pytest.mark.parametrize(
    "text",
    [
        nodes("0-71"),
        nodes("0-31", "32-63"),
        table("0-31", "0-31"),
        nodes("0-7,8-15"),
        nodes("0-3,8-10", "4-7,12-15"),
        nodes("0-3,8-11", "4-7,13-16"),
        nodes("0-3,8-11", "4-7,12-15", "16-19"),
        nodes("0-3,8-11,16-19,24-27", "4-7,12-15,20-23,28-31"),
        nodes("0-3,8-11,16-19", "4-7,12-15,20-23"),
        nodes("0-1,3-4,8-9,11-12"),
        nodes("8-11,16-19"),
        nodes("0-3,8-11", "12-15,20-23"),
        # CPU 16 is online and in no node, or beside no GPU.
        "On-line CPU(s) list: 0-16\n" + nodes("0-3,8-11", "4-7,12-15"),
        "On-line CPU(s) list: 0-16\n" + table("0-3,8-11", "4-7,12-15"),
        "On-line CPU(s) list: 0-15\n" + table("0-3,8-11"),
        # The lists of the table do not count where nodes are told.
        nodes("0-15") + table("0-3,8-11", "4-7,12-15"),
        # As many cores as CPUs, or twice as many siblings.
        "Core(s) per socket: 8\nSocket(s): 2\n" + nodes("0-3,8-11", "4-7,12-15"),
        "Thread(s) per core: 4\n" + nodes("0-2,8-10", "4-6,12-14"),
        # POWER, and a virtual machine of one node, number siblings side by side.
        "Architecture: ppc64le\n" + nodes("0-3,8-11", "4-7,12-15"),
        HYPERVISOR + nodes("0-3,8-11"),
        HYPERVISOR + table("0-1,8-9", "0-1,8-9"),
    ],
)
def test_weaker_lists_tell_nothing(text: str) -> None:
    topology = parse(text)
    assert not is_inferred(topology)
    assert "the numbering does not show it" in message(topology, "cores-unknown")


def test_a_virtual_machine_with_several_such_nodes_is_believed() -> None:
    assert is_inferred(parse(HYPERVISOR + nodes("0-3,8-11", "4-7,12-15")))


@pytest.mark.case("A25")
def test_a_cut_list_beside_whole_ones_tells_nothing() -> None:
    """Six runs may be the beginning of many; the whole list of another GPU does not help."""
    assert not is_inferred(parse(table("0-3,32-35", "4-5,8-9,12-13,16-17,20-21,24-25")))
    online = "On-line CPU(s) list: 0-3,32-35\n"
    assert not is_inferred(parse(online + table("0-3,32-35", "0,2,4,6,8,10")))


def test_what_is_told_counts_before_the_numbering() -> None:
    lists = nodes("0-3,8-11", "4-7,12-15")
    one_thread = parse("Thread(s) per core: 1\n" + lists)
    assert cores(one_thread) == [str(cpu) for cpu in range(16)]
    rows = "# CPU,Core,Socket,Node\n" + "".join(
        f"{cpu},{cpu // 2},0,{cpu // 4 % 2}\n" for cpu in range(16)
    )
    assert cores(parse(lists + rows)) == [f"{cpu}-{cpu + 1}" for cpu in range(0, 16, 2)]
    for topology in (one_thread, parse(lists + rows)):
        assert not {"cores-inferred", "cores-unknown"} & {note.code for note in topology.notes}


# --- any machine ------------------------------------------------------------------------------


@st.composite
def machines(draw: st.DrawFn) -> tuple[int, list[range]]:
    """Its number of cores, and the first threads of each node; some nodes may be left out."""
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=9))
    starts = [sum(sizes[:node]) for node in range(len(sizes))]
    whole = [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    kept = draw(st.lists(st.sampled_from(whole), min_size=1, unique=True))
    assume(all(len(node) < sum(sizes) for node in kept))  # else 0-7 and 8-15 are one run
    return sum(sizes), sorted(kept, key=lambda node: node[0])


def _both_threads(node: range, distance: int) -> CpuSet:
    return frozenset(node) | {cpu + distance for cpu in node}


@given(machines())
def test_hyperthreads_of_any_machine(machine: tuple[int, list[range]]) -> None:
    count, firsts = machine
    lists = [format_cpulist(_both_threads(node, count)) for node in firsts]
    expected = [f"{cpu},{cpu + count}" for node in firsts for cpu in node]
    assert cores(parse(nodes(*lists))) == cores(parse(table(*lists))) == expected


@given(machines(), st.data())
def test_one_cpu_less_and_the_form_is_lost(
    machine: tuple[int, list[range]], data: st.DataObject
) -> None:
    count, firsts = machine
    sets = [_both_threads(node, count) for node in firsts]
    hit = data.draw(st.integers(0, len(sets) - 1))
    sets[hit] -= {data.draw(st.sampled_from(sorted(sets[hit])))}
    assert not is_inferred(parse(nodes(*map(format_cpulist, sets))))


_RUNS = st.lists(
    st.tuples(st.integers(0, 11), st.integers(1, 3)), min_size=1, max_size=3, unique=True
)
"""Up to three runs of up to three CPUs: whole lists of that form and all that comes close."""


def _expected(lists: Sequence[CpuSet]) -> list[str] | None:
    """The rule, word for word, over the printed lists."""
    printed = [[run.split("-") for run in format_cpulist(cpus).split(",")] for cpus in lists]
    runs = [[(int(run[0]), int(run[-1])) for run in entries] for entries in printed]
    if any(len(entries) != 2 for entries in runs):
        return None
    (start, _), (second, _) = runs[0]
    distance = second - start
    for (low, low_end), (high, high_end) in runs:
        if (high - low, high_end - low_end) != (distance, distance) or high_end >= 2 * distance:
            return None
    lower = {cpu for (low, low_end), _ in runs for cpu in range(low, low_end + 1)}
    return [f"{cpu},{cpu + distance}" for cpu in sorted(lower)]


@given(st.lists(_RUNS, min_size=1, max_size=3))
@example([[(0, 2), (6, 2)], [(3, 2), (9, 2)]])
@example([[(0, 2), (6, 2)], [(3, 2), (8, 2)]])
def test_any_lists_of_a_table(lists: list[list[tuple[int, int]]]) -> None:
    sets = [
        frozenset(cpu for first, length in runs for cpu in range(first, first + length))
        for runs in lists
    ]
    topology = parse(table(*map(format_cpulist, sets)))
    assert cores(topology) == _expected(sets)
    assert is_inferred(topology) == (_expected(sets) is not None)
