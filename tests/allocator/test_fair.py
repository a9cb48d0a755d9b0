"""Max-min fair sharing, against trying everything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, combinations_with_replacement

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuaff.allocator.cores import fair_shares, group_cores, in_blocks, in_turn


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
