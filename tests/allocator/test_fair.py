"""Max-min fair sharing, against trying everything."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpuaff.allocator.cores import fair_shares, group_cores, in_blocks, in_turn
from tests.allocator.oracle import fair_sizes


@given(
    st.integers(2, 5).flatmap(
        lambda claimants: st.lists(
            st.frozensets(st.integers(0, 11)), min_size=claimants, max_size=claimants
        )
    )
)
def test_the_shares_are_as_good_as_any(wanted: list[frozenset[int]]) -> None:
    for fill in (in_blocks, in_turn):
        shares = fair_shares(wanted, fill)
        given_out = sorted(core for share in shares for core in share)
        assert given_out == sorted(frozenset().union(*wanted)), "each core is in one share"
        assert all(may.issuperset(share) for share, may in zip(shares, wanted, strict=True))
        assert sorted(map(len, shares)) == fair_sizes(wanted)


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
