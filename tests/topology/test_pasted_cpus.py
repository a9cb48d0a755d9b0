"""``lscpu``, ``lscpu -p``, ``lscpu -e`` and ``numactl -H``: the CPU side of a machine."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from gpuaff import Topology
from gpuaff.cpuset import format_cpulist
from gpuaff.errors import TopologyError
from gpuaff.topology.pasted import parse
from tests.pasted_machines import DATA
from tests.topology.reading import codes, cores, lists, message, nodes, packages, pairs


def real(name: str) -> str:
    return (DATA / "lscpu" / f"{name}.txt").read_text("utf-8")


def l3(topology: Topology) -> list[str] | None:
    return lists(topology.l3)


def runs(first: int, last: int, length: int) -> list[str]:
    """Blocks of ids, e.g. 0-1, 2-3 …"""
    return [format_cpulist(range(at, at + length)) for at in range(first, last, length)]


# --- machines whose siblings sysfs tells; lscpu read them there -------------------------------

POWER9 = runs(0, 16, 4) + runs(88, 104, 4)
NEIGHBOURS = dict(enumerate(runs(0, 64, 8)))
EVEN, ODD = "4,6,8,10,12,14,16,18,20", "5,7,9,11,13,15,17,19"


@pytest.mark.case("A9", "A10")
@pytest.mark.parametrize("kind", ["p", "e", "sum"])
@pytest.mark.parametrize(
    ("name", "expected_cores", "expected_packages", "expected_l3", "expected_nodes"),
    [
        # Siblings are neighbours on POWER; nodes 250 … 255 are GPU memory, without CPUs.
        (
            "nvidiagpunumanodes",
            POWER9,
            {0: "0-15", 1: "88-103"},
            ["0-7", "8-15", "88-95", "96-103"],
            {0: "0-15", 8: "88-103"},
        ),
        # Eight nodes of eight CPUs: CPU i and i + 32 are in two nodes, so they are no core.
        (
            "64amd64-4s2n4ca2co",
            runs(0, 64, 2),
            dict(enumerate(runs(0, 64, 16))),
            runs(0, 64, 8),
            NEIGHBOURS,
        ),
        # Two threads x 14 cores are not the 20 CPUs there are: only the rows show the cores.
        (
            "20em64t-hybrid",
            runs(0, 12, 2) + runs(12, 20, 1),
            {0: "0-19"},
            ["0-19"],
            {0: "0-19"},
        ),
        # CPUs 0-3 and 21-23 are offline, and the even ones are in no node.
        ("offline-cpu0-node0", runs(4, 21, 1), {0: EVEN, 1: ODD}, [EVEN, ODD], {1: ODD}),
    ],
)
def test_real_machines(
    name: str,
    kind: str,
    expected_cores: list[str],
    expected_packages: dict[int, str],
    expected_l3: list[str],
    expected_nodes: dict[int, str],
) -> None:
    topology = parse(real(f"{name}.{kind}"))
    is_hybrid = (name, kind) == ("20em64t-hybrid", "sum")
    assert cores(topology) == (None if is_hybrid else expected_cores)
    assert ("cores-unknown" in codes(topology)) is is_hybrid
    assert l3(topology) == (None if kind == "sum" else expected_l3)
    assert {node: cpus for node, cpus in nodes(topology).items() if cpus} == expected_nodes
    if (name, kind) != ("offline-cpu0-node0", "sum"):
        assert packages(topology) == expected_packages
    assert "contradiction" not in codes(topology)


@pytest.mark.parametrize(
    "name", ["nvidiagpunumanodes", "64amd64-4s2n4ca2co", "20em64t-hybrid", "offline-cpu0-node0"]
)
def test_real_summary_and_rows_together_are_the_rows(name: str) -> None:
    rows, summary = parse(real(f"{name}.p")), parse(real(f"{name}.sum"))
    for text in (real(f"{name}.p") + real(f"{name}.sum"), real(f"{name}.sum") + real(f"{name}.e")):
        both = parse(text)
        assert both.cores == rows.cores
        assert both.packages == rows.packages
        assert both.l3 == rows.l3
        assert both.numa_nodes == summary.numa_nodes
        assert "contradiction" not in codes(both)


# --- lscpu ------------------------------------------------------------------------------------

TABLE = "\tGPU0\tCPU Affinity\nGPU0\tX\t0-3\n"
BY_TURNS = [",".join(map(str, range(start, 96, 2))) for start in (0, 1)]
DELL = (
    "Architecture: x86_64\nCPU(s): 96\nOn-line CPU(s) list: 0-95\nThread(s) per core: 2\n"
    "Core(s) per socket: 24\nSocket(s): 2\nNUMA node(s): 2\n"
    f"NUMA node0 CPU(s): {BY_TURNS[0]}\nNUMA node1 CPU(s): {BY_TURNS[1]}\n"
)


def test_cores_of_a_machine_numbered_by_turns() -> None:
    topology = parse(DELL)
    assert cores(topology) == [f"{cpu},{cpu + 48}" for cpu in range(48)]
    assert packages(topology) == dict(enumerate(BY_TURNS))
    assert "0, 48" in message(topology, "cores-inferred")


TRANSLATED = json.loads((DATA / "lscpu_translated.json").read_text("utf-8"))


@pytest.mark.parametrize("language", TRANSLATED)
def test_lscpu_in_another_language_is_not_used(language: str) -> None:
    lscpu = "\n".join(TRANSLATED[language])
    with pytest.raises(TopologyError, match=r"not in English .* `LC_ALL=C lscpu`; "):
        parse(lscpu)
    topology = parse(f"{lscpu}\n{TABLE}")
    assert topology.cpus == frozenset(range(4))
    assert topology.packages is None
    assert "`LC_ALL=C lscpu`" in message(topology, "lscpu-translated")


def test_lscpu_in_english_is_not_taken_for_another_language() -> None:
    for text in (DELL, "CPU(s): 8\nNUMA node(s): 1\nCPU(s) scaling MHz: 45%\n# CPU,Core\n0,0\n"):
        assert "lscpu-translated" not in codes(parse(text))


def test_a_list_wrapped_by_the_window() -> None:
    text = "NUMA node0 CPU(s):  0,2,4,\n                    6,8\nNUMA node1 CPU(s): 1,3\n  ,5,7\n"
    assert nodes(parse(text)) == {0: "0,2,4,6,8", 1: "1,3,5,7"}
    assert nodes(parse("node 0 cpus: 0 1\n 2 3\nnode 0 size: 1 MB\n")) == {0: "0-3"}


def test_one_thread_per_core_is_exact() -> None:
    topology = parse("On-line CPU(s) list: 0,2,4\nThread(s) per core: 1\nSocket(s): 1\n")
    assert cores(topology) == ["0", "2", "4"]
    assert packages(topology) == {0: "0,2,4"}
    assert {"cores-inferred", "cores-unknown", "packages-inferred"}.isdisjoint(codes(topology))


TWO = "Thread(s) per core: 2\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # One node: the first threads come first.
        ("On-line CPU(s) list: 0-7\n" + TWO, pairs(0, 3, 4)),
        # Contiguous nodes: i and i + 4 would lie in two.
        (TWO + "NUMA node0 CPU(s): 0-3\nNUMA node1 CPU(s): 4-7\n", runs(0, 8, 2)),
        (TWO + "NUMA node0 CPU(s): 0,1,4,5\nNUMA node1 CPU(s): 2,3,6,7\n", pairs(0, 3, 4)),
        ("Architecture: ppc64le\nOn-line CPU(s) list: 0-7\nThread(s) per core: 4\n", runs(0, 8, 4)),
        # Neither way keeps a core within a node.
        (TWO + "NUMA node0 CPU(s): 0,3\nNUMA node1 CPU(s): 1,2\n", None),
        # On a virtual machine with one node both ways are usual.
        ("On-line CPU(s) list: 0-7\nHypervisor vendor: KVM\n" + TWO, None),
        # An odd one out; a gap (offline CPUs); more threads than CPUs; a hybrid processor.
        ("On-line CPU(s) list: 0-6\n" + TWO, None),
        ("On-line CPU(s) list: 0-2,4-6\n" + TWO, None),
        ("On-line CPU(s) list: 0-3\nThread(s) per core: 8\n", None),
        ("On-line CPU(s) list: 0-7\nCore(s) per socket: 8\nSocket(s): 1\n" + TWO, None),
        # Nothing tells threads per core.
        ("On-line CPU(s) list: 0-3\n", None),
        ("On-line CPU(s) list: 0-3\nThread(s) per core: 0\n", None),
    ],
)
def test_cores_from_the_summary(text: str, expected: Sequence[str] | None) -> None:
    topology = parse(text)
    assert cores(topology) == expected
    assert ("cores-inferred" in codes(topology)) == (expected is not None)
    assert ("cores-unknown" in codes(topology)) == (expected is None)


NOT_ALL_IN_NODES = "On-line CPU(s) list: 0-8\nNUMA node0 CPU(s): 0-3\nNUMA node1 CPU(s): 4-7\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Socket(s): 2\nNUMA node0 CPU(s): 0-3\nNUMA node1 CPU(s): 4-7\n", {0: "0-3", 1: "4-7"}),
        (
            "Socket(s): 2\n"
            + "".join(f"NUMA node{node} CPU(s): {2 * node}-{2 * node + 1}\n" for node in range(4)),
            {0: "0-3", 1: "4-7"},
        ),
        ("Socket(s): 2\nNUMA node0 CPU(s): 0-3\n", None),
        ("Socket(s): 2\nNUMA node0 CPU(s): 0-3\nNUMA node1 CPU(s): 4-5\n", None),
        ("Socket(s): 0\nNUMA node0 CPU(s): 0-3\n", None),
        ("Socket(s): -\nNUMA node0 CPU(s): 0-3\n", None),
        ("Socket(s): 2\n" + NOT_ALL_IN_NODES, None),
    ],
)
def test_packages_from_the_summary(text: str, expected: dict[int, str] | None) -> None:
    topology = parse(text)
    assert packages(topology) == expected
    assert ("packages-inferred" in codes(topology)) == (expected is not None)
    assert ("packages-unknown" in codes(topology)) == (expected is None)


def test_a_count_of_cpus_is_no_list() -> None:
    with pytest.raises(TopologyError):
        parse("CPU(s): 8\nNUMA node(s): 2\n")
    topology = parse("CPU(s): 8\nNUMA node(s): 36\n" + TABLE)
    assert topology.cpus == frozenset(range(4))
    assert "lscpu counts 8" in message(topology, "cpus-partial")
    few = parse("NUMA node(s): 36\nNUMA node0 CPU(s): 0-71\n")
    assert "1 of 36 NUMA nodes" in message(few, "nodes-missing")


@pytest.mark.case("A22")
def test_cpus_of_a_node_that_are_not_online_are_left_out() -> None:
    topology = parse("On-line CPU(s) list: 0-5\nNUMA node0 CPU(s): 0-7\n")
    assert nodes(topology) == {0: "0-5"}
    assert "6-7" in message(topology, "ids-dropped")


def test_a_cpu_in_two_nodes_is_an_error() -> None:
    with pytest.raises(TopologyError, match="a CPU is in two NUMA nodes: paste the output of one"):
        parse("NUMA node1 CPU(s): 4-8\nNUMA node0 CPU(s): 0-4\n")


@pytest.mark.parametrize(
    "text",
    [
        "On-line CPU(s) list: 0-3\nOn-line CPU(s) list: 0-7\n",
        "NUMA node0 CPU(s): 0-3\nNUMA node0 CPU(s): 0-7\n",
        "node 0 cpus: 0 1 2 3\nnode 0 size: 1 MB\nnode 0 cpus: 0 1\nnode 0 size: 1 MB\n",
        "On-line CPU(s) list: 0-3\nThread(s) per core: 1\nThread(s) per core: 2\n",
        "NUMA node0 CPU(s): 0-3\nnode 0 cpus: 0 1\nnode 0 size: 1 MB\n",
        "# CPU,Core,Socket,Node\n0,0,0,0\n1,1,0,0\n2,2,0,0\n3,3,0,0\n0,1,0,0\n",
    ],
)
def test_what_contradicts_is_noted_and_the_first_counts(text: str) -> None:
    topology = parse(text)
    assert topology.cpus == frozenset(range(4))
    assert "contradiction" in codes(topology)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("On-line CPU(s) list: 0-95,x\nNUMA node0 CPU(s): 0-7\n", "0-7"),
        ("On-line CPU(s) list: \nNUMA node0 CPU(s): 0-7\n", "0-7"),
        ("NUMA node0 CPU(s): 0-7\nNUMA node1 CPU(s): 8-\n", "0-7"),
        ("NUMA node0 CPU(s): 0-7\nNUMA node1 CPU(s): 15-8\n", "0-7"),
        ("node 0 cpus: 0 1\nnode 0 size: 1 MB\nnode 1 cpus: 2 3", "0-1"),
        ("node 0 cpus: 0 1 x\nnode 0 size: 1 MB\nnode 1 cpus: 2 3\nnode 1 size: 1 MB", "2-3"),
    ],
)
def test_lists_that_are_cut(text: str, expected: str) -> None:
    assert format_cpulist(parse(text).cpus) == expected


# --- lscpu -p and -e --------------------------------------------------------------------------

ROWS = "# CPU,Core,Socket,Node,,L1d,L1i,L2,L3\n" + "".join(
    f"{cpu},{cpu % 4},{cpu // 2 % 2},{cpu // 2 % 2},,{cpu % 4},{cpu % 4},{cpu % 4},{cpu // 2 % 2}\n"
    for cpu in range(8)
)


def test_rows() -> None:
    topology = parse(ROWS)
    assert cores(topology) == ["0,4", "1,5", "2,6", "3,7"]
    assert packages(topology) == {0: "0-1,4-5", 1: "2-3,6-7"}
    assert l3(topology) == ["0-1,4-5", "2-3,6-7"]
    assert nodes(topology) == {0: "0-1,4-5", 1: "2-3,6-7"}


def test_columns_are_found_by_their_names() -> None:
    topology = parse("# CPU,Node,Core\n0,1,0\n1,1,0\n2,0,1\n3,0,1\n")
    assert cores(topology) == ["0-1", "2-3"]
    assert nodes(topology) == {0: "2-3", 1: "0-1"}
    assert (packages(topology), l3(topology)) == (None, None)
    assert parse("# CPU,Node\n0,0\n1,0\n2,1\n3,1\n").cores is None


def test_offline_rows_are_left_out() -> None:
    commas = "# CPU,Core,Socket,Node,Online\n0,0,0,0,Y\n1,,,,N\n2,1,0,0,Y\n"
    blanks = (
        "CPU NODE SOCKET CORE L1d:L1i:L2:L3 ONLINE MAXMHZ\n"
        "  0    0      0    0 0:0:0:0   yes 3700\n"
        "  1    -      -    - :::       no    -\n  2    0      0    1 1:1:1:0   yes 3700\n"
    )
    for text in (commas, blanks):
        topology = parse(text)
        assert format_cpulist(topology.cpus) == "0,2"
        assert cores(topology) == ["0", "2"]


def test_a_message_is_short_whatever_it_lists() -> None:
    rows = "# CPU,Core\n" + "".join(f"{cpu},{cpu}\n" for cpu in range(0, 4096, 2))
    topology = parse("On-line CPU(s) list: 0-4095\n" + rows)
    assert len(message(topology, "lscpu-cut")) < 500


@pytest.mark.parametrize(("online", "differing"), [("0-7", "CPUs 6-7"), ("0-3", "CPUs 4-5")])
def test_rows_that_are_not_those_of_the_online_cpus_are_not_used(
    online: str, differing: str
) -> None:
    cut = ROWS[: ROWS.index("\n6,")] + "\n6,2"
    topology = parse(f"On-line CPU(s) list: {online}\nThread(s) per core: 2\n{cut}")
    assert topology.l3 is None
    assert "cores-inferred" in codes(topology)
    assert differing in message(topology, "lscpu-cut")


@pytest.mark.parametrize(
    "text",
    [
        "# CPU,Foo\n0,0\n",
        "CPU usage is high\n0 0 0\n",
        "CPU,MHz\n0,3000\n",
        "0,0,0,0\n",
        "# CPU,Core\nx,y\n",
        "# CPU,Core\n0,x\n",
        "# CPU,Core\n99999,0\n",
    ],
)
def test_what_looks_like_rows_and_is_not(text: str) -> None:
    with pytest.raises(TopologyError):
        parse(text)


# --- numactl ----------------------------------------------------------------------------------

NUMACTL = (
    "available: 3 nodes (0-1,8)\n"
    "node 0 cpus: 0 1 2 3\nnode 0 size: 65442 MB\nnode 0 free: 1000 MB\n"
    "node 1 cpus: 4 5 6 7\nnode 1 size: 0 MB\nnode 1 free: 0 MB\n"
    "node 8 cpus:\nnode 8 size: 16128 MB\nnode 8 free: 1 MB\n"
    "node distances:\nnode   0   1   8\n  0:  10  21  40\n  1:  21  10  80\n  8:  40  80  10\n"
)


@pytest.mark.parametrize("text", [NUMACTL, NUMACTL.rstrip(), NUMACTL.replace("\n", "\r\n")])
def test_numactl(text: str) -> None:
    topology = parse(text)
    assert nodes(topology) == {0: "0-3", 1: "4-7", 8: ""}
    found = topology.numa_nodes or ()
    assert [node.has_memory for node in found] == [True, False, True]
    assert [node.distances for node in found] == [(10, 21, 40), (21, 10, 80), (40, 80, 10)]
    assert "distances-unknown" not in codes(topology)
    lscpu = "On-line CPU(s) list: 0-7\nNUMA node0 CPU(s): 0-3\nNUMA node1 CPU(s): 4-7\n"
    assert parse(lscpu + text).numa_nodes == parse(f"{text}\n{lscpu}").numa_nodes == found


def test_distances_to_nodes_that_are_not_in_the_matrix_are_unknown() -> None:
    topology = parse(NUMACTL + "NUMA node9 CPU(s): 8\n")
    assert [node.distances for node in topology.numa_nodes or ()] == [None] * 4
    assert "distances-unknown" in codes(topology)


@pytest.mark.parametrize("row", ["  8:  40  80", "  8:  40  80  1", "  8:  40", "  8:", ""])
def test_a_matrix_that_is_cut(row: str) -> None:
    topology = parse(NUMACTL.replace("  8:  40  80  10\n", row))
    assert [node.distances for node in topology.numa_nodes or ()] == [
        (10, 21, 40),
        (21, 10, 80),
        None,
    ]


def test_a_node_whose_list_is_missing_has_the_cpus_of_the_table() -> None:
    """Only node 1 was pasted, while the distances name node 0, too."""
    one = NUMACTL[NUMACTL.index("node 1 cpus") :].replace(
        "node 8 cpus:\nnode 8 size: 16128 MB\n", ""
    )
    topology = parse("\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\tX\t0-3\t0\n" + one)
    (gpu,) = topology.gpus
    assert (format_cpulist(gpu.node_cpus or ()), gpu.numa_node) == ("0-3", 0)
    assert format_cpulist(topology.cpus) == "0-7"
    assert "1 of 3 NUMA nodes" in message(topology, "nodes-missing")
    assert {"node-dropped", "ids-dropped"}.isdisjoint(codes(topology))
