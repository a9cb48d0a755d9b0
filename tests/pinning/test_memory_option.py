"""``memory=``: words and nodes, and which of them may be used; worked out by hand."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuaff import GPUAffinityError, InvalidOptionError, Topology, plan
from gpuaff.pinning.memory import parse_memory, usable_nodes
from gpuaff.topology.model import Gpu, NumaNode


def test_words_and_nodes() -> None:
    def read(text: str) -> tuple[str, set[int], bool]:
        found = parse_memory("memory", text)
        assert found.named is (":" in text)
        return found.word, set(found.nodes), found.own

    assert read("preferred") == ("preferred", set(), False)
    assert read("bind:8") == ("bind", {8}, False)
    assert read(" interleave : 0-2 , 1023 ") == ("interleave", {0, 1, 2, 1023}, False)
    assert read("interleave:gpu") == ("interleave", set(), True)
    assert read("bind:0,gpu") == ("bind", {0}, True)
    with pytest.raises(InvalidOptionError, match="did you mean interleave"):
        read("interleaved")


INVALID = [
    "", "local", "default", "Bind", "membind:0", "bind:", "bind:,", "bind:0,", "bind:,gpu",
    "bind:gpu,", "bind:x", "bind:3-1", "bind:-1", "bind:0:1", "bind:GPU",
    ":0", "gpu", "0", 0, True, 1.5, b"bind", ["bind"], ("bind", 0),
]  # fmt: skip


@pytest.mark.parametrize("value", INVALID)
def test_an_invalid_value_raises(value: object) -> None:
    with pytest.raises(InvalidOptionError, match="preferred, bind, interleave") as caught:
        parse_memory("GPUAFF_MEMORY", value)
    assert caught.value.option == "GPUAFF_MEMORY"


@given(st.text(max_size=20) | st.from_regex(r"(bind|preferred):[0-9gpu,:-]{0,9}", fullmatch=True))
def test_any_text_is_read_or_refused(text: str) -> None:
    with suppress(InvalidOptionError):
        assert parse_memory("memory", text).named is (":" in text)


# Which nodes memory may come from, worked out by hand.


def machine(cpus: int, nodes: dict[int, range], memory_nodes: tuple[int | None, ...]) -> Topology:
    """GPU 0 and 1 are near node 0 and 1; a node of no CPUs below 3 has no memory either."""
    return Topology(
        cpus=frozenset(range(cpus)),
        allowed=frozenset(range(cpus)),
        numa_nodes=tuple(
            NumaNode(id=number, cpus=frozenset(own), has_memory=bool(own) or number > 2)
            for number, own in nodes.items()
        ),
        gpus=tuple(
            Gpu(index=i, node_cpus=frozenset(nodes[i]), numa_node=i, memory_node=memory_node)
            for i, memory_node in enumerate(memory_nodes)
        ),
        visible=(0, 1),
    )


SOCKETS = machine(16, {0: range(8), 1: range(8, 16), 2: range(0)}, (None, 3))
GRACE = machine(8, {0: range(4), 1: range(4, 8), 4: range(0), 12: range(0)}, (4, 12))
"""The memory of its GPUs are nodes 4 and 12."""
BLIND = Topology(
    cpus=frozenset(range(4)),
    allowed=frozenset(range(4)),
    gpus=(Gpu(index=0), Gpu(index=1)),
    visible=(0, 1),
)
"""Its nodes are unknown."""

ALL, NORMAL = frozenset(range(64)), frozenset({0, 1})
"""Memory of a GPU is there to be moved away again: it is no normal memory."""


def usable(
    text: str,
    topology: Topology,
    rank: int,
    allowed: frozenset[int] = ALL,
    normal: frozenset[int] | None = NORMAL,
) -> tuple[list[int], list[str]]:
    """The nodes, and the codes of the warnings."""
    option, share = parse_memory("memory", text), plan(topology, 2).share_of(rank)
    found, notices = usable_nodes(option, share, topology, allowed=allowed, normal=normal)
    return sorted(found), [notice.code for notice in notices]


@pytest.mark.case("A10", "A11")
def test_the_nodes_of_the_share_or_those_that_are_named() -> None:
    for rank in (0, 1):
        assert usable("bind", SOCKETS, rank) == usable("interleave", GRACE, rank) == ([rank], [])
    assert usable("bind", GRACE, 0, normal=None) == ([0], [])
    assert usable("bind:4", GRACE, 0) == ([4], []), "memory of another kind by name"
    assert usable("interleave:0,4", GRACE, 0) == ([0, 4], [])
    assert usable("preferred:gpu", GRACE, 0) == ([4], []), "of the rank's own GPU"
    assert usable("interleave:0,gpu", GRACE, 1) == ([0, 12], [])
    assert usable("bind:3", BLIND, 0) == ([3], []), "the kernel will say"
    both = plan(SOCKETS, 2).share_of(0)._replace(numa_nodes=(0, 1))
    found = usable_nodes(parse_memory("memory", "bind"), both, SOCKETS, allowed=ALL, normal=NORMAL)
    assert found == (frozenset({0, 1}), [])


@pytest.mark.case("A16", "G10")
def test_nodes_that_are_denied_or_have_no_memory() -> None:
    only_1 = frozenset({1})
    assert usable("bind", SOCKETS, 1, only_1) == ([1], [])
    assert usable("bind", SOCKETS, 0, only_1) == ([], ["memory-none"])
    assert usable("bind:0-1", SOCKETS, 0, only_1) == ([1], ["memory-cut"])
    assert usable("bind:0", SOCKETS, 0, only_1) == ([], ["memory-none"])
    assert usable("bind", GRACE, 0, normal=only_1) == ([], ["memory-none"])
    assert usable("bind:2", SOCKETS, 0) == ([], ["memory-none"])
    assert usable("bind:0,2", SOCKETS, 0) == ([0], ["memory-cut"])
    assert usable("bind", BLIND, 0) == ([], ["memory-none"])
    option, share = parse_memory("memory", "bind:0-1"), plan(SOCKETS, 2).share_of(0)
    _, (notice,) = usable_nodes(option, share, SOCKETS, allowed=frozenset({1, 5}), normal=None)
    for part in ("memory='bind:0-1'", "NUMA node 0", "1,5", "--cpuset-mems", "node 1 only"):
        assert part in notice.message


@pytest.mark.parametrize(
    ("text", "rank", "says"),
    [
        ("bind:7", 0, "no NUMA node 7; it has 0-2"),
        ("interleave:0-9", 0, "no NUMA node 3-9"),
        ("bind:gpu", 0, "GPU 0 is not a NUMA node"),
        ("bind:gpu", 1, "no NUMA node 3"),
    ],
)
def test_a_named_node_that_is_not_there_raises(text: str, rank: int, says: str) -> None:
    with pytest.raises(GPUAffinityError, match=says):
        usable(text, SOCKETS, rank)
