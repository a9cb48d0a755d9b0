"""Which nodes memory may come from, worked out by hand on machines that nobody has here."""

from __future__ import annotations

import pytest

from gpuaff import GPUAffinityError, Share, Topology, plan
from gpuaff.pinning.memory import parse_memory, usable_nodes
from gpuaff.topology.model import Gpu, NumaNode

ALL = frozenset(range(64))


def node(number: int, cpus: range, *, memory: bool | None = True) -> NumaNode:
    return NumaNode(id=number, cpus=frozenset(cpus), has_memory=memory)


TWO_SOCKETS = Topology(
    cpus=frozenset(range(16)),
    allowed=frozenset(range(16)),
    numa_nodes=(node(0, range(8)), node(1, range(8, 16)), node(2, range(0), memory=False)),
    gpus=(
        Gpu(index=0, node_cpus=frozenset(range(8)), numa_node=0),
        Gpu(index=1, node_cpus=frozenset(range(8, 16)), numa_node=1, memory_node=3),
    ),
    visible=(0, 1),
)

GRACE = Topology(
    cpus=frozenset(range(8)),
    allowed=frozenset(range(8)),
    numa_nodes=(node(0, range(4)), node(1, range(4, 8)), node(4, range(0)), node(12, range(0))),
    gpus=(
        Gpu(index=0, node_cpus=frozenset(range(4)), numa_node=0, memory_node=4),
        Gpu(index=1, node_cpus=frozenset(range(4, 8)), numa_node=1, memory_node=12),
    ),
    visible=(0, 1),
)
NORMAL = frozenset({0, 1})
"""Memory of a GPU is there to be moved away again: it is no normal memory."""


def share_of(topology: Topology, rank: int) -> Share:
    return plan(topology, 2).share_of(rank)


def usable(
    text: str,
    topology: Topology,
    rank: int,
    *,
    allowed: frozenset[int] = ALL,
    normal: frozenset[int] | None = NORMAL,
) -> tuple[list[int], list[str]]:
    """The nodes, and the codes of what is said."""
    option = parse_memory("memory", text)
    share = share_of(topology, rank)
    found, notices = usable_nodes(option, share, topology, allowed=allowed, normal=normal)
    return sorted(found), [notice.code for notice in notices]


@pytest.mark.parametrize("word", ["bind", "preferred", "interleave"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.case("A11")
def test_without_names_it_is_the_shares_nodes(word: str, rank: int) -> None:
    assert usable(word, TWO_SOCKETS, rank) == ([rank], [])
    assert usable(word, GRACE, rank) == ([rank], [])


def test_a_share_on_two_nodes_has_both() -> None:
    one = plan(TWO_SOCKETS, 1, mode="all", scope="socket").share_of(0)
    both = Share(
        rank=0, gpu=0, cpus=TWO_SOCKETS.cpus, cores=16, numa_nodes=(0, 1), source=one.source
    )
    option = parse_memory("memory", "bind")
    found = usable_nodes(option, both, TWO_SOCKETS, allowed=ALL, normal=NORMAL)
    assert found == (frozenset({0, 1}), [])


@pytest.mark.case("A16", "G10")
def test_only_nodes_that_the_cpuset_grants() -> None:
    only_1 = frozenset({1})
    assert usable("bind", TWO_SOCKETS, 1, allowed=only_1) == ([1], [])
    assert usable("bind", TWO_SOCKETS, 0, allowed=only_1) == ([], ["memory-none"])
    assert usable("bind:0-1", TWO_SOCKETS, 0, allowed=only_1) == ([1], ["memory-cut"])
    assert usable("bind:0", TWO_SOCKETS, 0, allowed=only_1) == ([], ["memory-none"])


@pytest.mark.case("A16", "G10")
def test_the_message_says_what_is_allowed() -> None:
    option = parse_memory("memory", "bind:0-1")
    _, (notice,) = usable_nodes(
        option, share_of(TWO_SOCKETS, 0), TWO_SOCKETS, allowed=frozenset({1, 5}), normal=None
    )
    for part in ("memory='bind:0-1'", "NUMA node 0", "1,5", "--cpuset-mems", "node 1 only"):
        assert part in notice.message


def test_memory_of_another_kind_only_by_name() -> None:
    assert usable("bind", GRACE, 0, normal=frozenset({1})) == ([], ["memory-none"])
    assert usable("bind", GRACE, 0, normal=None) == ([0], [])
    assert usable("bind:4", GRACE, 0) == ([4], [])
    assert usable("interleave:0,4", GRACE, 0) == ([0, 4], [])


@pytest.mark.case("A10")
@pytest.mark.parametrize(("rank", "own"), [(0, 4), (1, 12)])
def test_the_memory_of_the_ranks_own_gpu(rank: int, own: int) -> None:
    assert usable("preferred:gpu", GRACE, rank) == ([own], [])
    assert usable("interleave:0,gpu", GRACE, rank) == ([0, own], [])


def test_a_node_without_memory_is_no_place_for_it() -> None:
    assert usable("bind:2", TWO_SOCKETS, 0) == ([], ["memory-none"])
    assert usable("bind:0,2", TWO_SOCKETS, 0) == ([0], ["memory-cut"])


@pytest.mark.parametrize(
    ("text", "rank", "says"),
    [
        ("bind:7", 0, "no NUMA node 7; it has 0-2"),
        ("interleave:0-9", 0, "no NUMA node 3-9"),
        ("bind:1024", 0, "no NUMA node 1024; it has 0-2"),
        ("bind:gpu", 0, "GPU 0 is not a NUMA node"),
        ("bind:gpu", 1, "no NUMA node 3"),
    ],
)
def test_a_named_node_that_is_not_there_raises(text: str, rank: int, says: str) -> None:
    with pytest.raises(GPUAffinityError, match=says):
        usable(text, TWO_SOCKETS, rank)


def test_where_nodes_are_not_known() -> None:
    blind = Topology(
        cpus=frozenset(range(4)),
        allowed=frozenset(range(4)),
        gpus=(Gpu(index=0), Gpu(index=1)),
        visible=(0, 1),
    )
    assert usable("bind", blind, 0) == ([], ["memory-none"])
    assert usable("bind:3", blind, 0) == ([3], []), "the kernel will say"
