"""Which GPUs a claim takes: machines worked out by hand.

In the comments a *pair* is of the nearest kind that matters there, and "loses" counts the pairs
that the next claim no longer finds (rule 2).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import gpuaff
from gpuaff.claims.devices.selection import choose
from gpuaff.topology.model import Gpu, Topology
from tests.claims.linked import islands, linked, pasted


def taken(machine: Topology, count: int, *, busy: Iterable[int] = ()) -> list[int]:
    free = machine.gpu_by_index.keys() - set(busy)
    return list(choose(count, free, topology=machine))


# NV2 within a quad: 0-3 1-2 2-3, 4-7 5-6 6-7; across: 0-4 1-5.
# NV1 within a quad: 0-1 0-2 1-3, 4-5 4-6 5-7; across: 2-6 3-7. The rest is SYS.
@pytest.mark.parametrize(
    ("count", "busy", "expected"),
    [
        # 0, 1, 4 and 5 lose one NV2 pair of their quad, 2, 3, 6 and 7 two.
        (1, [], [0]),
        # 4 has lost its only NV2 partner in the quad, so nobody loses one.
        (1, [7], [4]),
        (1, [4, 5, 6], [7]),
        # 1 and 3 lose one NV2 pair of the broken quad, 4 and 5 one of the whole one. 1 and 5 lose
        # 1-5 as well. Of the NV1 pairs within, 3 loses 1-3, and 4 loses two.
        (1, [0], [3]),
        # {0, 3} and {1, 2} lose two NV2 pairs of the quad, {2, 3} three.
        (2, [], [0, 3]),
        # 5-6 is the last NV2 pair of the broken quad.
        (2, [7], [5, 6]),
        # {1, 2}, {2, 3}, {4, 7} and {5, 6} lose two; then {1, 2} and {5, 6} lose 1-5; of the NV1
        # pairs within, {2, 3} loses one and {4, 7} three.
        (2, [0], [2, 3]),
        # Two NV2 and an NV1: {0, 2, 3}, {1, 2, 3} and their likes. {0, 1, 2} has only one NV2.
        (3, [], [0, 2, 3]),
        (4, [], [0, 1, 2, 3]),
        (4, [0], [4, 5, 6, 7]),
        (4, [5], [0, 1, 2, 3]),
        # Nobody has more than one link to the other quad, so three pairs are SYS at least. 5 would
        # do as well as 4; 6 and 7 have only NV1.
        (5, [], [0, 1, 2, 3, 4]),
        (8, [], [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_a_dgx_1(count: int, busy: list[int], expected: list[int]) -> None:
    assert taken(Topology.named("dgx-1"), count, busy=busy) == expected


def test_a_group_of_four_is_kept_that_pairs_do_not_tell_of() -> None:
    # A DGX-1 whose NUMA nodes are not told: its NV2 links are one ring of eight, so all NV2 pairs
    # lose three of them and four NV1. But 0-4 would break both quads, and 0-3 only one. Here 3 and
    # 4 have changed places, so that 0-4 is called 0-3 and comes first.
    dgx_1 = Topology.named("dgx-1")
    assert dgx_1.links is not None
    order = [0, 1, 2, 4, 3, 5, 6, 7]
    links = tuple(tuple(dgx_1.links[i][j] for j in order) for i in order)
    bare = Topology(gpus=tuple(Gpu(index=i) for i in range(8)), links=links)
    assert taken(bare, 2) == [0, 4]


def test_a_group_of_eight_is_kept_that_pairs_and_fours_do_not_tell_of() -> None:
    # Ten GPUs, all joined but 0-4, 4-1, 1-2 and 2-7. 1, 2 and 4 lack two links each, so without one
    # of them two pairs are far. Without 1 these are 0-4 and 2-7, and no eight are all joined;
    # without 2 they are 0-4 and 1-4, and eight are without 4.
    far = {(0, 4), (1, 4), (1, 2), (2, 7)}
    assert taken(linked(10, lambda i, j: "SYS" if (i, j) in far else "NV1"), 1) == [2]


@pytest.mark.parametrize(
    ("count", "busy", "expected"),
    [
        (1, [], [0]),
        (1, [3], [0]),
        (1, [9], [8]),  # node 1 is the broken one
        (2, [9, 10], [8, 11]),
        (4, [12, 13, 14, 15], [8, 9, 10, 11]),
        (8, [], list(range(8))),
        (8, [3], list(range(8, 16))),
        (10, [], list(range(10))),  # 8 and 2 have 16 pairs across, 7 and 3 would have 21
    ],
)
def test_a_dgx_2_is_sixteen_alike_but_for_their_nodes(
    count: int, busy: list[int], expected: list[int]
) -> None:
    assert taken(Topology.named("dgx-2"), count, busy=busy) == expected


@pytest.mark.parametrize(
    ("count", "busy", "expected"),
    [
        (2, [], [0, 1]),
        (1, [0], [1]),  # the other one of its node
        (1, [6], [7]),
        (2, [0], [2, 3]),
        (3, [0], [1, 2, 3]),  # 1 has lost its neighbour already
        (4, [0], [2, 3, 4, 5]),  # 1 is near none of them
    ],
)
def test_a_dgx_a100_has_two_gpus_on_a_node(
    count: int, busy: list[int], expected: list[int]
) -> None:
    assert taken(Topology.named("dgx-a100"), count, busy=busy) == expected


def test_four_and_four_of_a_dgx_h100() -> None:
    machine = Topology.named("dgx-h100")
    assert taken(machine, 2) == [0, 1]
    assert taken(machine, 1, busy=[5]) == [4]
    assert taken(machine, 2, busy=[5]) == [4, 6]
    assert taken(machine, 4, busy=[0]) == [4, 5, 6, 7]
    assert taken(machine, 5, busy=[0]) == [1, 4, 5, 6, 7]


def test_four_h100_that_nothing_tells_apart() -> None:
    machine = islands(4, near="NV18")
    assert taken(machine, 1) == [0]
    assert taken(machine, 2, busy=[1]) == [0, 2]
    assert taken(machine, 4) == [0, 1, 2, 3]


# Two pairs with one switch each on node 0, one pair on node 1.
@pytest.mark.parametrize(
    ("count", "busy", "expected"),
    [
        # Whoever is taken breaks a pair; 4 and 5 have nobody else near them.
        (1, [], [4]),
        (1, [0], [1]),
        (2, [], [4, 5]),
        (2, [4], [0, 1]),
        (3, [], [0, 1, 2]),
        (4, [], [0, 1, 2, 3]),
        # Two pairs are SYS, in whatever set; the third is PIX only with 4 and 5.
        (3, [0, 2], [1, 4, 5]),
    ],
)
def test_switches_on_two_nodes(count: int, busy: list[int], expected: list[int]) -> None:
    machine = pasted("26-6gpu-4plus2-unbalanced")
    assert taken(machine, count, busy=busy) == expected


def test_pairs_of_a_bridge_or_a_node() -> None:
    for machine in (pasted("04-a30x4-2socket-xeon6342"), Topology.named("l40x4")):
        assert taken(machine, 2) == [0, 1]
        assert taken(machine, 1, busy=[2]) == [3]
        assert taken(machine, 2, busy=[1]) == [2, 3]
        assert taken(machine, 3) == [0, 1, 2]


def test_a_quarter_of_a_dgx_1_in_the_cloud() -> None:
    """NV2: 0-3, 1-2, 2-3. Without 0 and 3, or 1 and 2, one is left; without 2 and 3 none."""
    machine = pasted("21-aws-p3-8xlarge-v100x4-numa-na-shifted")
    assert taken(machine, 2) == [0, 3]
    assert taken(machine, 2, busy=[3]) == [1, 2]


def test_nodes_count_where_all_links_are_the_same() -> None:
    machine = pasted("12-rtx4090x8-all-sys")
    assert taken(machine, 2, busy=[0]) == [1, 2]
    assert taken(machine, 3, busy=[0]) == [1, 2, 3]
    assert taken(machine, 4, busy=[0]) == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("count", "busy", "expected"),
    [
        (1, [], [0]),
        (1, [6], [4]),  # from the island that is broken
        (2, [6], [4, 5]),  # no second island is broken
        (3, [6], [4, 5, 7]),
        (4, [6], [0, 1, 2, 3]),
        (1, [0, 4, 5], [6]),  # from the one that is broken more
        (5, [0], [1, 4, 5, 6, 7]),
        (6, [0], [1, 2, 4, 5, 6, 7]),  # eight pairs across; 3 and 3 would have nine
    ],
)
def test_two_islands_of_four(count: int, busy: list[int], expected: list[int]) -> None:
    assert taken(islands(4, 4), count, busy=busy) == expected


def test_a_single_gpu_is_taken_before_a_bridge_is_broken() -> None:
    """A bridge joins two each, four sit at one node; the partner of 6 is busy."""

    def word(i: int, j: int) -> str:
        return "NV12" if i // 2 == j // 2 else "NODE" if i // 4 == j // 4 else "SYS"

    assert taken(linked(8, word), 1, busy=[2, 3, 7]) == [6]


def test_one_slow_pair_is_worse_than_many_that_are_middling() -> None:
    """0-1 and 1-2 are NV18, but 0-2 is SYS; all pairs of 3, 4 and 5 are PHB."""
    fast = {(0, 1), (1, 2)}

    def word(i: int, j: int) -> str:
        return "NV18" if (i, j) in fast else "PHB" if i > 2 else "SYS"

    assert taken(linked(6, word), 3) == [3, 4, 5]


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
    assert taken(replace(machine, links=told), 2) == [0, 1]


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


def test_what_is_busy_now_counts_last() -> None:
    """Both islands are one short; where the left one is two short, it is broken already."""
    machine = islands(4, 4)
    assert taken(machine, 1, busy=[3, 7]) == [0]
    # That the left one could be whole again is no reason to break it more.
    assert taken(machine, 1, busy=[2, 3, 7]) == [0]


def joined(size: int, pairs: str) -> Topology:
    """NVLinks between these pairs, such as ``01 12``."""
    return linked(size, lambda i, j: "NV1" if f"{i}{j}" in pairs.split() else "SYS")


def test_groups_count_that_will_be_whole_when_others_have_ended() -> None:
    # 1 and 2 have four links each. Without 1 the best four have four links (0, 2, 3, 4 or 2 to 5),
    # without 2 they are 1, 3, 4 and 5, which lack only 3-5.
    machine = joined(6, "02 03 12 13 14 15 23 25 34 45")
    assert taken(machine, 1, busy=[0, 3, 4, 5]) == [2]
    # 4 and 5 have two links each. Only 2 to 5 have four; without 4, or 5, no four have more than 3.
    machine = joined(6, "01 12 23 24 35 45")
    assert taken(machine, 1, busy=[0, 1, 2, 3]) == [4]


@pytest.mark.parametrize("count", [-1, 0, 3])
def test_more_than_there_are_cannot_be_chosen(count: int) -> None:
    with pytest.raises(ValueError, match=rf"^cannot choose {count} of 2 free GPUs \[1, 4\]$"):
        choose(count, {4, 1}, topology=islands(4, 4))


def test_importing_it_is_cheap() -> None:
    """A claim is to cost little more than the start of the driver."""
    code = """if True:
        import sys
        import gpuaff.claims.devices.selection
        slow = {"json", "logging", "pathlib", "psutil", "pynvml", "subprocess"}
        print(sorted(slow & set(sys.modules)))
    """
    command = [sys.executable, "-S", "-c", code]  # without site, which may load anything
    package = Path(gpuaff.__file__).parents[1]  # site would have found it
    env = {**os.environ, "PYTHONPATH": str(package)}
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
