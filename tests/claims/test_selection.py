"""Which GPUs a claim takes: machines worked out by hand.

In the comments a *pair* is of the nearest kind that matters there, and "loses" counts the pairs
that the next claim no longer finds (rule 2).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gpuaff.claims.devices.selection import choose
from gpuaff.topology.model import Gpu, Topology
from tests import pci_devices
from tests.claims.linked import islands, linked, pasted
from tests.fakedriver.driver import FakeDriver
from tests.processes import CPUS, run


def taken(machine: Topology, count: int, *, busy: Iterable[int] = ()) -> list[int]:
    free = machine.gpu_by_index.keys() - set(busy)
    return list(choose(count, free, topology=machine))


MACHINES: dict[str, Topology] = {
    **{name: Topology.named(name) for name in ("dgx-1", "dgx-2", "dgx-a100", "dgx-h100", "l40x4")},
    "a quarter of a DGX-1": pasted("21-aws-p3-8xlarge-v100x4-numa-na-shifted"),
    "switches": pasted("26-6gpu-4plus2-unbalanced"),
    "bridges": pasted("04-a30x4-2socket-xeon6342"),
    "all SYS": pasted("12-rtx4090x8-all-sys"),
    "islands": islands(4, 4),
    "all alike": islands(4, near="NV18"),
}


@pytest.mark.parametrize(
    ("machine", "count", "busy", "expected"),
    [
        # NV2 within a quad: 0-3 1-2 2-3, 4-7 5-6 6-7; across: 0-4 1-5.
        # NV1 within a quad: 0-1 0-2 1-3, 4-5 4-6 5-7; across: 2-6 3-7. The rest is SYS.
        # 0, 1, 4 and 5 lose one NV2 pair of their quad, 2, 3, 6 and 7 two.
        ("dgx-1", 1, [], [0]),
        # 4 has lost its only NV2 partner in the quad, so it loses none.
        ("dgx-1", 1, [7], [4]),
        # 1 and 3 lose one NV2 pair of the broken quad, 4 and 5 one of the whole one. 1 and 5 lose
        # 1-5 as well. Of the NV1 pairs within, 3 loses 1-3, and 4 loses two.
        ("dgx-1", 1, [0], [3]),
        # {0, 3} and {1, 2} lose two NV2 pairs of the quad, {2, 3} three.
        ("dgx-1", 2, [], [0, 3]),
        # 5-6 is the last NV2 pair of the broken quad.
        ("dgx-1", 2, [7], [5, 6]),
        # Two NV2 and an NV1: {0, 2, 3}, {1, 2, 3} and their likes. {0, 1, 2} has only one NV2.
        ("dgx-1", 3, [], [0, 2, 3]),
        ("dgx-1", 4, [], [0, 1, 2, 3]),
        ("dgx-1", 4, [0], [4, 5, 6, 7]),
        # NV2: 0-3, 1-2, 2-3. Without 0 and 3, or 1 and 2, one is left; without 2 and 3 none.
        ("a quarter of a DGX-1", 2, [], [0, 3]),
        ("a quarter of a DGX-1", 2, [3], [1, 2]),
        # Sixteen alike but for their nodes.
        ("dgx-2", 1, [9], [8]),  # node 1 is the broken one
        ("dgx-2", 4, [12, 13, 14, 15], [8, 9, 10, 11]),
        ("dgx-2", 10, [], list(range(10))),  # 8 and 2: 16 pairs across, 7 and 3: 21
        # All alike, two on each node and four in each package.
        ("dgx-a100", 1, [0], [1]),  # the other one of its node
        # The package of 0 is broken: {2, 3} loses its own pair, as each does, and two pairs within
        # the package; {4, 5} would lose four.
        ("dgx-a100", 2, [0], [2, 3]),
        ("dgx-a100", 3, [0], [1, 2, 3]),  # it loses one pair on one node, {4, 5, 6} two
        # All alike, four on each node.
        ("dgx-h100", 2, [5], [4, 6]),
        ("dgx-h100", 5, [0], [1, 4, 5, 6, 7]),
        ("all alike", 2, [1], [0, 2]),
        # Two pairs with one switch each on node 0, one pair on node 1. Each that is taken breaks a
        # pair; 4 and 5 have no others near them.
        ("switches", 1, [], [4]),
        ("switches", 1, [0], [1]),
        ("switches", 2, [], [4, 5]),
        ("switches", 4, [], [0, 1, 2, 3]),
        # Two pairs are SYS, in whatever set; the third is PIX only with 4 and 5.
        ("switches", 3, [0, 2], [1, 4, 5]),
        ("bridges", 2, [1], [2, 3]),
        ("l40x4", 2, [1], [2, 3]),
        # Nodes count where all links are the same.
        ("all SYS", 4, [0], [4, 5, 6, 7]),
        ("islands", 1, [6], [4]),  # from the island that is broken
        ("islands", 2, [6], [4, 5]),  # no second island is broken
        ("islands", 4, [6], [0, 1, 2, 3]),
        ("islands", 1, [0, 4, 5], [6]),  # from the one that is broken more
        ("islands", 6, [0], [1, 2, 4, 5, 6, 7]),  # 8 pairs across; 3 and 3 would have 9
    ],
)
def test_what_is_taken(machine: str, count: int, busy: list[int], expected: list[int]) -> None:
    assert taken(MACHINES[machine], count, busy=busy) == expected


def test_a_group_of_four_is_kept_that_pairs_do_not_tell_of() -> None:
    # A DGX-1 whose NUMA nodes are not told: its NV2 links are one ring of eight, so all NV2 pairs
    # lose three of them and four NV1. But 0-4 would break both quads, and 0-3 only one. Here 3 and
    # 4 have changed places, so that 0-4 is called 0-3 and comes first.
    links = MACHINES["dgx-1"].links
    assert links is not None
    order = [0, 1, 2, 4, 3, 5, 6, 7]
    assert taken(linked(8, lambda i, j: links[order[i]][order[j]]), 2) == [0, 4]


def test_a_group_of_eight_is_kept_that_pairs_and_fours_do_not_tell_of() -> None:
    # Ten GPUs, all joined but 0-4, 4-1, 1-2 and 2-7. 1, 2 and 4 lack two links each, so without one
    # of them two pairs are far. Without 1 these are 0-4 and 2-7, and no eight are all joined;
    # without 2 they are 0-4 and 1-4, and eight are without 4.
    far = {(0, 4), (1, 4), (1, 2), (2, 7)}
    assert taken(linked(10, lambda i, j: "SYS" if (i, j) in far else "NV1"), 1) == [2]


def test_words_are_ordered_as_nvidia_smi_orders_them() -> None:
    words = ["NV18", "NV4", "NV1", "PIX", "PXB", "PHB", "NODE", "SYS"]
    for nearer, farther in pairwise(words):
        special = {(0, 1): farther, (2, 3): nearer}
        machine = linked(4, lambda i, j, special=special: special.get((i, j), "SYS"))  # type: ignore[misc]  # mypy: lambda with defaults
        assert taken(machine, 2) == [2, 3]


def test_of_two_cells_that_differ_the_worse_counts() -> None:
    links = (("X", "NV2", "NV1"), ("PHB", "X", "NV1"), ("NV1", "NV1", "X"))
    machine = Topology(gpus=tuple(Gpu(index=i) for i in range(3)), links=links)
    assert taken(machine, 2) == [0, 2]
    told = tuple(tuple("N/A" if w == "PHB" else w for w in row) for row in links)
    assert taken(machine._replace(links=told), 2) == [0, 1]


def test_a_pair_that_is_not_told_counts_by_its_node() -> None:
    def word(i: int, j: int) -> str:
        return "PXB" if (i, j) == (0, 3) else "N/A"

    machine = linked(4, word, nodes=[0, 1, 1, 0])
    assert taken(machine, 2) == [0, 3]
    assert taken(machine, 2, busy=[3]) == [1, 2]
    told = linked(3, lambda i, j: "SYS" if (i, j) == (0, 1) else "N/A", nodes=[0, 0, 0])
    assert taken(told, 2) == [0, 2]


def gpus(*known: dict[str, Any]) -> Topology:
    """GPUs of which these things are known, and no links."""
    return Topology(gpus=tuple(Gpu(index=i, **more) for i, more in enumerate(known)))


def test_without_links_nodes_and_buses_tell() -> None:
    node = gpus({"numa_node": 0}, {"numa_node": 1}, {"numa_node": 1})
    bus = gpus(
        {"pci_bus_id": "0000:01:00.0"},
        {"pci_bus_id": "0001:02:05.0"},
        {"pci_bus_id": "0001:02:06.0"},
    )
    for machine in (node, bus):
        assert taken(machine, 2) == [1, 2]


def test_without_anything_known_the_lowest_are_taken() -> None:
    assert choose(2, {7, 3, 5}, topology=Topology()) == (3, 5)
    assert taken(gpus({}, {"numa_node": 1}, {}, {}), 2, busy=[0]) == [1, 2]


def test_a_gpu_that_the_topology_lacks_is_far_from_all() -> None:
    assert choose(2, {0, 1, 9}, topology=islands(2)) == (0, 1)
    assert choose(1, {0, 1, 9}, topology=islands(2)) == (9,)


def test_what_does_not_fit_is_left_for_others_too() -> None:
    """All but 6 are free, and the caller may have 0 or 5: 5 is in the broken island."""
    machine = islands(4, 4)
    assert choose(1, {0, 5}, topology=machine) == (0,)
    assert choose(1, {0, 5}, topology=machine, idle={0, 1, 2, 3, 4, 5, 7}) == (5,)


OBSERVED = """
    from gpuaff._system.nvml import open_session
    from gpuaff.claims.devices.selection import observe_connections
    with open_session() as session:
        seen = observe_connections(session)
    print([(package.id, sorted(package.cpus)) for package in seen.packages])
    print([(gpu.numa_node, sorted(gpu.local_cpus)) for gpu in seen.gpus])
"""


@pytest.mark.fake_driver
@pytest.mark.needs("mount-namespaces")
def test_the_package_of_each_gpu_is_read(driver: FakeDriver, tmp_path: Path) -> None:
    cpu = CPUS[-1]
    folder = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    package = int((folder / "physical_package_id").read_text())
    shown = pci_devices.gpus(tmp_path, 2, near=[cpu])
    done = run(OBSERVED, env=driver.env(), prefix=shown)
    assert done.stdout.splitlines() == [f"[({package}, [{cpu}])]", str([(0, [cpu])] * 2)]
