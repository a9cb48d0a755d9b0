"""``lscpu``, ``lscpu -p``, ``lscpu -e`` and ``numactl -H``: the CPU side of a machine."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gpuaff.cpuset import format_cpulist, parse_cpulist
from gpuaff.errors import TopologyError
from gpuaff.topology.model import Topology
from gpuaff.topology.pasted import parse
from tests.pasted_machines import DATA


def real(name: str) -> str:
    return (DATA / "lscpu" / f"{name}.txt").read_text("utf-8")


def cores(topology: Topology) -> list[str] | None:
    return None if topology.cores is None else [format_cpulist(core) for core in topology.cores]


def nodes(topology: Topology) -> dict[int, str]:
    return {node.id: format_cpulist(node.cpus) for node in topology.numa_nodes or ()}


def packages(topology: Topology) -> dict[int, str] | None:
    if topology.packages is None:
        return None
    return {package.id: format_cpulist(package.cpus) for package in topology.packages}


def l3(topology: Topology) -> list[str] | None:
    return None if topology.l3 is None else [format_cpulist(domain) for domain in topology.l3]


def codes(topology: Topology) -> set[str]:
    return {note.code for note in topology.notes}


def message(topology: Topology, code: str) -> str:
    return next(note.message for note in topology.notes if note.code == code)


def runs(first: int, last: int, length: int) -> list[str]:
    """Blocks of ids, e.g. 0-1, 2-3 …"""
    return [format_cpulist(range(at, at + length)) for at in range(first, last, length)]


# --- machines whose siblings sysfs tells; lscpu read them there -------------------------------

POWER9_NODES = {0: "0-15", 8: "88-103"}


@pytest.mark.parametrize("kind", ["p", "e"])
def test_real_rows_of_power9(kind: str) -> None:
    topology = parse(real(f"nvidiagpunumanodes.{kind}"))
    assert topology.cpus == parse_cpulist("0-15,88-103")
    assert cores(topology) == runs(0, 16, 4) + runs(88, 104, 4)
    assert packages(topology) == {0: "0-15", 1: "88-103"}
    assert l3(topology) == ["0-7", "8-15", "88-95", "96-103"]
    assert nodes(topology) == POWER9_NODES
    assert {"cores-unknown", "packages-unknown", "l3-unknown"}.isdisjoint(codes(topology))


@pytest.mark.case("A9", "A10")
def test_real_summary_of_power9() -> None:
    """Siblings are neighbours on POWER; nodes 250 … 255 are GPU memory, without CPUs."""
    topology = parse(real("nvidiagpunumanodes.sum"))
    assert cores(topology) == runs(0, 16, 4) + runs(88, 104, 4)
    assert packages(topology) == {0: "0-15", 1: "88-103"}
    assert nodes(topology) == POWER9_NODES | dict.fromkeys(range(250, 256), "")
    assert {"cores-inferred", "packages-inferred", "l3-unknown"} <= codes(topology)


@pytest.mark.parametrize("kind", ["sum", "p", "e"])
def test_real_opteron_whose_siblings_are_neighbours(kind: str) -> None:
    """Eight nodes of eight CPUs: CPU i and i + 32 are in two nodes, so they are no core."""
    topology = parse(real(f"64amd64-4s2n4ca2co.{kind}"))
    assert cores(topology) == runs(0, 64, 2)
    assert packages(topology) == dict(enumerate(runs(0, 64, 16)))
    assert nodes(topology) == dict(enumerate(runs(0, 64, 8)))
    assert l3(topology) == (None if kind == "sum" else runs(0, 64, 8))


@pytest.mark.parametrize("kind", ["p", "e"])
def test_real_rows_of_a_hybrid_processor(kind: str) -> None:
    topology = parse(real(f"20em64t-hybrid.{kind}"))
    assert cores(topology) == runs(0, 12, 2) + runs(12, 20, 1)
    assert packages(topology) == {0: "0-19"}
    assert l3(topology) == ["0-19"]


def test_real_summary_of_a_hybrid_processor_does_not_tell_its_cores() -> None:
    """Two threads x 14 cores are not the 20 CPUs there are."""
    topology = parse(real("20em64t-hybrid.sum"))
    assert topology.cores is None
    assert packages(topology) == {0: "0-19"}
    assert "2 threads per core" in message(topology, "cores-unknown")


@pytest.mark.parametrize("kind", ["p", "e"])
def test_real_rows_with_offline_cpus(kind: str) -> None:
    """CPUs 0-3 and 21-23 are offline, and the even ones are in no node."""
    even, odd = "4,6,8,10,12,14,16,18,20", "5,7,9,11,13,15,17,19"
    topology = parse(real(f"offline-cpu0-node0.{kind}"))
    assert topology.cpus == topology.allowed == parse_cpulist("4-20")
    assert cores(topology) == runs(4, 21, 1)
    assert packages(topology) == {0: even, 1: odd}
    assert l3(topology) == [even, odd]
    assert nodes(topology) == {1: odd}


def test_real_summary_with_offline_cpus() -> None:
    topology = parse(real("offline-cpu0-node0.sum"))
    assert topology.cpus == parse_cpulist("4-20")
    assert cores(topology) == runs(4, 21, 1)
    assert packages(topology) is None
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

DELL = (
    "Architecture: x86_64\nCPU(s): 96\nOn-line CPU(s) list: 0-95\nThread(s) per core: 2\n"
    "Core(s) per socket: 24\nSocket(s): 2\nNUMA node(s): 2\n"
    f"NUMA node0 CPU(s): {','.join(map(str, range(0, 96, 2)))}\n"
    f"NUMA node1 CPU(s): {','.join(map(str, range(1, 96, 2)))}\n"
)


def test_cores_of_a_machine_numbered_by_turns() -> None:
    topology = parse(DELL)
    assert cores(topology) == [f"{cpu},{cpu + 48}" for cpu in range(48)]
    assert packages(topology) == {
        0: ",".join(map(str, range(0, 96, 2))),
        1: ",".join(map(str, range(1, 96, 2))),
    }
    assert "0, 48" in message(topology, "cores-inferred")


def test_indentation_does_not_matter() -> None:
    indented = "".join(f"#   {line}\n" for line in DELL.replace(": ", ":        ").splitlines())
    assert parse(indented) == parse(DELL)


GERMAN = (
    "Architektur: x86_64\nCPU(s): 16\nListe der Online-CPU(s): 0-15\nThread(s) pro Kern: 2\n"
    "Kern(e) pro Sockel: 4\nSockel: 2\nHypervisor-Anbieter: KVM\nNUMA-Knoten: 2\n"
    "NUMA-Knoten0 CPU(s): 0-3,8-11\nNUMA-Knoten1 CPU(s): 4-7,12-15\n"
)
FRENCH = (
    "Architecture\N{NO-BREAK SPACE}: x86_64\nProcesseur(s)\N{NO-BREAK SPACE}: 16\n"
    "Socket(s)\N{NO-BREAK SPACE}: 2\nNœud(s) NUMA\N{NO-BREAK SPACE}: 2\n"
    "Nœud NUMA 0 de processeur(s)\N{NO-BREAK SPACE}: 0-3,8-11\n"
)
SPANISH = "CPU(s): 16\nLista de la(s) CPU(s) en línea: 0-15\nCPU(s) del nodo NUMA 0: 0-15\n"
CHINESE = "CPU:     16\n在线 CPU 列表：  0-15\n座：  2\nNUMA 节点：  1\nNUMA 节点0 CPU： 0-15\n"
TRANSLATED = {"de": GERMAN, "fr": FRENCH, "es": SPANISH, "zh_CN": CHINESE}


@pytest.mark.parametrize("language", TRANSLATED)
def test_lscpu_in_another_language_is_refused_with_its_remedy(language: str) -> None:
    with pytest.raises(TopologyError, match=r"not in English .* `LC_ALL=C lscpu`$"):
        parse(TRANSLATED[language])


@pytest.mark.parametrize("language", TRANSLATED)
def test_lscpu_in_another_language_beside_a_table_is_a_note(language: str) -> None:
    table = "\tGPU0\tCPU Affinity\nGPU0\tX\t0-3\n"
    topology = parse(TRANSLATED[language] + table)
    assert topology.cpus == frozenset(range(4))
    assert topology.packages is None
    assert "`LC_ALL=C lscpu`" in message(topology, "lscpu-translated")


def test_lscpu_in_english_is_not_taken_for_another_language() -> None:
    for text in (DELL, "CPU(s): 8\nNUMA node(s): 1\nCPU(s) scaling MHz: 45%\n# CPU,Core\n0,0\n"):
        assert "lscpu-translated" not in codes(parse(text))


def test_a_list_wrapped_at_its_commas() -> None:
    text = "NUMA node0 CPU(s):  0,2,4,\n                    6,8\nNUMA node1 CPU(s): 1,3\n  ,5,7\n"
    assert nodes(parse(text)) == {0: "0,2,4,6,8", 1: "1,3,5,7"}


def test_one_thread_per_core_is_exact() -> None:
    topology = parse("On-line CPU(s) list: 0,2,4\nThread(s) per core: 1\nSocket(s): 1\n")
    assert cores(topology) == ["0", "2", "4"]
    assert packages(topology) == {0: "0,2,4"}
    assert {"cores-inferred", "cores-unknown", "packages-inferred"}.isdisjoint(codes(topology))


HYBRID = "On-line CPU(s) list: 0-7\nThread(s) per core: 2\nCore(s) per socket: 8\nSocket(s): 1\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # One node: the first threads come first.
        ("On-line CPU(s) list: 0-7\nThread(s) per core: 2\n", ["0,4", "1,5", "2,6", "3,7"]),
        # Contiguous nodes: i and i + 4 would lie in two.
        (
            "Thread(s) per core: 2\nNUMA node0 CPU(s): 0-3\nNUMA node1 CPU(s): 4-7\n",
            ["0-1", "2-3", "4-5", "6-7"],
        ),
        (
            "Thread(s) per core: 2\nNUMA node0 CPU(s): 0,1,4,5\nNUMA node1 CPU(s): 2,3,6,7\n",
            ["0,4", "1,5", "2,6", "3,7"],
        ),
        (
            "Architecture: ppc64le\nOn-line CPU(s) list: 0-7\nThread(s) per core: 4\n",
            ["0-3", "4-7"],
        ),
        # Neither way keeps a core within a node.
        ("Thread(s) per core: 2\nNUMA node0 CPU(s): 0,3\nNUMA node1 CPU(s): 1,2\n", None),
        # On a virtual machine with one node both ways are usual.
        (
            "On-line CPU(s) list: 0-7\nThread(s) per core: 2\nHypervisor vendor: KVM\n",
            None,
        ),
        # An odd one out; a gap (offline CPUs); more threads than CPUs.
        ("On-line CPU(s) list: 0-6\nThread(s) per core: 2\n", None),
        ("On-line CPU(s) list: 0-2,4-6\nThread(s) per core: 2\n", None),
        ("On-line CPU(s) list: 0-3\nThread(s) per core: 8\n", None),
        (
            HYBRID,
            None,
        ),
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
    table = "\tGPU0\tCPU Affinity\nGPU0\tX\t0-3\n"
    topology = parse("CPU(s): 8\n" + table)
    assert topology.cpus == frozenset(range(4))
    assert "lscpu counts 8" in message(topology, "cpus-partial")


def test_nodes_that_are_counted_and_not_listed() -> None:
    topology = parse("NUMA node(s): 36\nNUMA node0 CPU(s): 0-71\n")
    assert "36" in message(topology, "nodes-missing")


@pytest.mark.case("A22")
def test_cpus_of_a_node_that_are_not_online_are_left_out() -> None:
    topology = parse("On-line CPU(s) list: 0-5\nNUMA node0 CPU(s): 0-7\n")
    assert nodes(topology) == {0: "0-5"}
    assert "6-7" in message(topology, "ids-dropped")


def test_a_cpu_in_two_nodes() -> None:
    topology = parse("NUMA node1 CPU(s): 4-8\nNUMA node0 CPU(s): 0-4\n")
    assert nodes(topology) == {0: "0-4", 1: "5-8"}
    assert "CPUs 4 " in message(topology, "contradiction")


@pytest.mark.parametrize(
    "text",
    [
        "On-line CPU(s) list: 0-3\nOn-line CPU(s) list: 0-7\n",
        "NUMA node0 CPU(s): 0-3\nNUMA node0 CPU(s): 0-7\n",
        "node 0 cpus: 0 1 2 3\nnode 0 size: 1 MB\nnode 0 cpus: 0 1\nnode 0 size: 1 MB\n",
        "On-line CPU(s) list: 0-3\nThread(s) per core: 1\nThread(s) per core: 2\n",
        "NUMA node0 CPU(s): 0-3\nnode 0 cpus: 0 1\nnode 0 size: 1 MB\n",
        "CPU(s): 2\nOn-line CPU(s) list: 0-3\n",
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
        # Broken off at the end, where a part of a list is a list as well.
        ("CPU(s): 96\nNUMA node0 CPU(s): 0-7\nOn-line CPU(s) list: 0-9", "0-7"),
        ("CPU(s): 16\nNUMA node0 CPU(s): 0-7\nNUMA node1 CPU(s): 8-1", "0-7"),
        ("CPU(s): 16\nNUMA node0 CPU(s): 0-7\nNUMA node1 CPU(s): 8-11", "0-7"),
        ("node 0 cpus: 0 1\nnode 0 size: 1 MB\nnode 1 cpus: 2 3", "0-1"),
        ("node 0 cpus: 0 1 x\nnode 0 size: 1 MB\nnode 1 cpus: 2 3\nnode 1 size: 1 MB", "2-3"),
    ],
)
def test_lists_that_are_cut(text: str, expected: str) -> None:
    assert format_cpulist(parse(text).cpus) == expected


def test_a_node_list_cut_short_of_the_online_cpus_is_not_used() -> None:
    text = "On-line CPU(s) list: 0-15\nNUMA node0 CPU(s): 0-7\nNUMA node1 CPU(s): 8-1"
    assert nodes(parse(text)) == {0: "0-7"}
    assert nodes(parse(text + "0")) == {0: "0-7"}
    assert nodes(parse(text + "5")) == {0: "0-7", 1: "8-15"}


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


@pytest.mark.parametrize(
    "text",
    [
        ROWS.split("\n", 1)[1],
        "".join(f"> {line}\n" for line in ROWS.splitlines()),
        ROWS.replace("\n", "\r\n"),
        ROWS.replace("# CPU", "CPU").replace("\n", "\n\n"),
    ],
    ids=["no header", "quoted", "crlf", "double-spaced"],
)
def test_rows_in_other_clothes(text: str) -> None:
    assert parse(text) == parse(ROWS)


def test_columns_are_found_by_their_names() -> None:
    topology = parse("# Node,CPU\n0,1\n\n# CPU,Node,Core\n0,1,0\n1,1,0\n2,0,1\n3,0,1\n")
    assert cores(topology) == ["0-1", "2-3"]
    assert nodes(topology) == {0: "2-3", 1: "0-1"}
    assert packages(topology) is None
    assert l3(topology) is None


def test_rows_without_cores_tell_the_nodes() -> None:
    topology = parse("# CPU,Node\n0,0\n1,0\n2,1\n3,1\n")
    assert topology.cores is None
    assert nodes(topology) == {0: "0-1", 1: "2-3"}


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


def test_core_ids_that_repeat_in_each_socket_and_node() -> None:
    text = "# CPU,Core,Socket,Node\n0,0,0,0\n1,0,0,1\n2,0,1,2\n3,0,1,3\n"
    assert cores(parse(text)) == ["0", "1", "2", "3"]


def test_rows_that_do_not_cover_the_cpus_are_not_used() -> None:
    text = (
        "On-line CPU(s) list: 0-7\nThread(s) per core: 2\n" + ROWS[: ROWS.index("\n6,")] + "\n6,2"
    )
    topology = parse(text)
    assert cores(topology) == ["0,4", "1,5", "2,6", "3,7"]
    assert "CPUs 6-7" in message(topology, "lscpu-cut")
    assert topology.l3 is None


def test_a_message_is_short_whatever_it_lists() -> None:
    rows = "# CPU,Core\n" + "".join(f"{cpu},{cpu}\n" for cpu in range(0, 4096, 2))
    topology = parse("On-line CPU(s) list: 0-4095\n" + rows)
    assert len(message(topology, "lscpu-cut")) < 500


def test_rows_beyond_the_online_cpus_are_left_out() -> None:
    topology = parse("On-line CPU(s) list: 0-3\n" + ROWS)
    assert cores(topology) == ["0", "1", "2", "3"]
    assert packages(topology) == {0: "0-1", 1: "2-3"}
    assert "4-7" in message(topology, "contradiction")


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
    assert topology.numa_nodes is not None
    assert [node.has_memory for node in topology.numa_nodes] == [True, False, True]
    assert [node.distances for node in topology.numa_nodes] == [
        (10, 21, 40),
        (21, 10, 80),
        (40, 80, 10),
    ]
    assert "distances-unknown" not in codes(topology)


def test_numactl_adds_to_lscpu() -> None:
    lscpu = "On-line CPU(s) list: 0-7\nNUMA node0 CPU(s): 0-3\nNUMA node1 CPU(s): 4-7\n"
    for text in (lscpu + NUMACTL, NUMACTL + lscpu):
        assert parse(text).numa_nodes == parse(NUMACTL).numa_nodes


def test_distances_to_nodes_that_are_not_in_the_matrix_are_unknown() -> None:
    topology = parse(NUMACTL + "NUMA node9 CPU(s): 8\n")
    assert topology.numa_nodes is not None
    assert [node.distances for node in topology.numa_nodes] == [None] * 4
    assert "distances-unknown" in codes(topology)


@pytest.mark.parametrize("row", ["  8:  40  80", "  8:  40  80  1", "  8:  40", "  8:", ""])
def test_a_matrix_that_is_cut(row: str) -> None:
    topology = parse(NUMACTL.replace("  8:  40  80  10\n", row))
    assert topology.numa_nodes is not None
    assert [node.distances for node in topology.numa_nodes] == [(10, 21, 40), (21, 10, 80), None]


def test_a_size_that_is_cut_is_unknown() -> None:
    topology = parse("node 0 cpus: 0 1\nnode 0 size: 6544\n")
    assert topology.numa_nodes is not None
    assert topology.numa_nodes[0].has_memory is None


def test_a_long_list_wrapped_by_the_window() -> None:
    text = "node 0 cpus: 0 1 2 3\n 4 5 6 7\nnode 0 size: 1 MB\n"
    assert nodes(parse(text)) == {0: "0-7"}
