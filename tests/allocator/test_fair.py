"""Max-min fair sharing, against trying everything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, combinations_with_replacement

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuaff.allocator.cutting import fair_shares, group_cores, in_blocks, in_turn
from gpuaff.allocator.plan import plan
from gpuaff.topology.model import Gpu, Source, Topology
from tests.allocator.described import bare, codes, cpus, shown


def best_sizes(claimants: int, owners: Iterable[Sequence[int]]) -> list[int]:
    """Try every way of giving each core to one of those who may have it."""
    reached = {(0,) * claimants}
    for may in owners:
        reached = {
            (*sizes[:owner], sizes[owner] + 1, *sizes[owner + 1 :])
            for sizes in reached
            for owner in may
        }
    return max(sorted(sizes) for sizes in reached)


def check(claimants: int, owners: Sequence[Sequence[int]]) -> None:
    """The shares of these cores (for each: who may have it) are as good as any."""
    wanted = [
        frozenset(core for core, may in enumerate(owners) if claimant in may)
        for claimant in range(claimants)
    ]
    for fill in (in_blocks, in_turn):
        shares = fair_shares(wanted, fill)
        given_out = sorted(core for share in shares for core in share)
        assert given_out == list(range(len(owners)))
        assert all(set(share) <= may for share, may in zip(shares, wanted, strict=True))
        assert sorted(map(len, shares)) == best_sizes(claimants, owners)


def graphs(claimants: int, cores: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every way in which so many cores can each be open to some of the claimants."""
    some = [may for size in range(1, claimants + 1) for may in combinations(range(claimants), size)]
    return combinations_with_replacement(some, cores)


@pytest.mark.parametrize(
    ("claimants", "cores"),
    [(1, 6), (2, 6), (3, 6), (4, 3), (4, 4)],
)
def test_all_small_graphs(claimants: int, cores: int) -> None:
    for owners in graphs(claimants, cores):
        check(claimants, owners)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cores", [5, 6])
def test_all_graphs_of_four_ranks(cores: int) -> None:
    for owners in graphs(4, cores):
        check(4, owners)


@given(
    st.integers(2, 5).flatmap(
        lambda claimants: st.tuples(
            st.just(claimants),
            st.lists(st.sets(st.integers(0, claimants - 1), min_size=1).map(sorted), max_size=12),
        )
    )
)
def test_larger_graphs(graph: tuple[int, list[list[int]]]) -> None:
    check(*graph)


def test_cores_are_grouped_by_who_may_have_them() -> None:
    groups = group_cores([frozenset({0, 1, 2, 5}), frozenset({2, 3, 5}), frozenset({2, 7})])
    assert groups == [((0,), (0, 1)), ((1,), (3,)), ((2,), (7,)), ((0, 1), (5,)), ((0, 1, 2), (2,))]


def test_many_cores_are_shared_in_few_steps() -> None:
    """Five claimants, each near 1000 cores that it shares by halves with its neighbours."""
    wanted = [frozenset(range(500 * at, 500 * at + 1000)) for at in range(5)]
    assert [len(share) for share in fair_shares(wanted, in_blocks)] == [600] * 5


def test_who_has_little_is_filled_first() -> None:
    """Claimant 0 may have only two cores, which 1 may have too; 1 has eight others."""
    shares = fair_shares([frozenset({0, 1}), frozenset(range(10))], in_blocks)
    assert shares == [(0, 1), tuple(range(2, 10))]


def overlapping(*near: str, online: str = "0-11") -> Topology:
    gpus = [
        Gpu(index=index, node_cpus=cpus(text), source=Source.NVML)
        for index, text in enumerate(near)
    ]
    return bare(online, *gpus)


def test_overlapping_near_sets_are_no_error() -> None:
    """Sizes 4 + 4 + 4; the groups are 0-3 (A), 8-11 (C) and 4-7 (A, B and C)."""
    machine = overlapping("0-7", "4-7", "4-11")
    assert shown(plan(machine, 3)) == ["0-3", "4-7", "8-11"]


def test_contiguous_gives_blocks_in_rank_order() -> None:
    """Only A: 0; both: 1-6; only B: 7-8. Of 9 cores the earlier rank gets the odd one."""
    machine = overlapping("0-6", "1-8", online="0-8")
    assert shown(plan(machine, 2, balanced=False)) == ["0-4", "5-8"]
    assert shown(plan(machine, 2)) == ["0-3", "5-8"]


def test_interleaved_deals() -> None:
    machine = overlapping("0-6", "1-8", online="0-8")
    found = plan(machine, 2, mode="unique_interleaved", balanced=False)
    assert shown(found) == ["0-1,3,5-6", "2,4,7-8"]


def test_disjoint_and_overlapping_near_sets_side_by_side() -> None:
    """0 and 1 cut 0-6 by the plain rule; 2 and 3 overlap on 7-12. Balanced, 6 is left out."""
    machine = overlapping("0-6", "0-6", "7-10", "9-12", online="0-12")
    assert shown(plan(machine, 4)) == ["0-2", "3-5", "7-9", "10-12"]
    assert shown(plan(machine, 4, balanced=False)) == ["0-3", "4-6", "7-9", "10-12"]


def test_balanced_is_the_smallest_of_all() -> None:
    """The overlapping pair can have 1 core each, so the others' blocks are of 1 core too."""
    machine = overlapping("0-5", "0-5", "6", "6-7")
    assert shown(plan(machine, 4)) == ["0", "1", "6", "7"]


def test_a_gpu_whose_only_core_others_need_shares() -> None:
    """Core 0 is all that three GPUs have; the fourth has 1-3 besides."""
    machine = overlapping("0", "0", "0", "0-3", online="0-3")
    found = plan(machine, 4, balanced=False)
    assert shown(found) == ["0", "0", "0", "1-3"]
    assert codes(found) == ["too-few-cores"]
    assert found.warnings[0].rank is None
    assert "ranks 1-2 must share cores" in found.warnings[0].message


def test_chains_of_overlaps_are_one_island() -> None:
    """0-3, 2-5, 4-7, 6-9: ten cores for four, the earlier ones take the odd two."""
    machine = overlapping("0-3", "2-5", "4-7", "6-9", online="0-9")
    found = plan(machine, 4, balanced=False)
    sizes = [share.cores for share in found.shares]
    assert sorted(sizes) == [2, 2, 3, 3]
    assert frozenset().union(*(share.cpus for share in found.shares)) == cpus("0-9")


def test_earlier_ranks_take_the_odd_cores() -> None:
    """Ranks 0 and 2 are near 0-6, rank 1 near 5-7; of eight cores two are left over."""
    machine = overlapping("0-6", "5-7", "0-6", online="0-7")
    found = plan(machine, 3, balanced=False)
    assert [share.cores for share in found.shares] == [3, 3, 2]
