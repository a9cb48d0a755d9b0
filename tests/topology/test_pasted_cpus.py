"""``lscpu``, ``lscpu -p``, ``lscpu -e`` and ``numactl -H``: the CPU side of a machine."""

from __future__ import annotations

import json

import pytest

from gpuaff import Topology
from gpuaff.cpuset import format_cpulist
from gpuaff.errors import TopologyError
from gpuaff.topology.pasted import parse
from tests.pasted_machines import DATA
from tests.topology.reading import codes, cores, lists, message, nodes, packages


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


def test_a_message_is_short_whatever_it_lists() -> None:
    rows = "# CPU,Core\n" + "".join(f"{cpu},{cpu}\n" for cpu in range(0, 4096, 2))
    topology = parse("On-line CPU(s) list: 0-4095\n" + rows)
    assert len(message(topology, "lscpu-cut")) < 500


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
