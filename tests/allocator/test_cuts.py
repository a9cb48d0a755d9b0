"""Cuts by L3 domain, against a second statement of the rule; fair ones, against all others."""

from __future__ import annotations

from functools import partial
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from gpuaff.allocator.cores import Cutter, fair_shares, in_blocks, in_l3_domains, in_turn
from tests.allocator.oracle import fair_sizes


@given(data=st.data(), domain_of=st.lists(st.integers(0, 5), min_size=1, max_size=14))
def test_a_cut_by_l3_domain_follows_the_rule(data: st.DataObject, domain_of: list[int]) -> None:
    """Each share in turn: whole domains while any fits, lowest first; then the fewest domains
    that can fill it, found by trying all sets of domains. A core's domain is at its place."""
    cores = data.draw(st.sets(st.sampled_from(range(len(domain_of))), min_size=1).map(sorted))
    sizes: list[int] = []
    while sum(sizes) < len(cores) and len(sizes) < 5:
        sizes.append(data.draw(st.integers(0, len(cores) - sum(sizes))))
    shares = in_l3_domains(cores, sizes, l3_of=domain_of)
    assert [len(share) for share in shares] == sizes
    wholes = [{core for core in cores if domain_of[core] == domain} for domain in range(6)]
    lowest_first = sorted(filter(None, wholes), key=min)
    free = set(cores)
    got: list[set[int]] = []
    for size in sizes:
        got.append(set())
        for whole in lowest_first:
            if whole <= free and len(whole) <= size - len(got[-1]):
                got[-1] |= whole
                free -= whole
    for share, taken in zip(shares, got, strict=True):
        assert taken == set(share[: len(taken)])
        filled = set(share) - taken
        assert filled <= free
        left = [whole & free for whole in lowest_first]
        touched = [domain for domain in left if domain & filled]
        assert len(touched) == fewest(len(filled), left)
        for domain in touched:
            assert max(filled & domain) < min(domain - filled, default=99), "the lowest of it"
        free -= filled


def fewest(lacking: int, free: list[set[int]]) -> int:
    """The smallest number of domains that hold so many cores."""
    return next(
        count
        for count in range(len(free) + 1)
        if any(sum(map(len, some)) >= lacking for some in combinations(free, count))
    )


@given(st.lists(st.frozensets(st.integers(0, 11)), min_size=2, max_size=5))
def test_fair_shares_are_as_good_as_any(wanted: list[frozenset[int]]) -> None:
    for fill in (in_blocks, in_turn):
        shares = fair_shares(wanted, fill)
        given_out = sorted(core for share in shares for core in share)
        assert given_out == sorted(frozenset().union(*wanted)), "each core is in one share"
        assert all(may.issuperset(share) for share, may in zip(shares, wanted, strict=True))
        assert sorted(map(len, shares)) == fair_sizes(wanted)


def test_many_cores_are_shared_in_few_steps() -> None:
    """Five claimants, each near 1000 cores that it shares by halves with its neighbours."""
    wanted = [frozenset(range(500 * at, 500 * at + 1000)) for at in range(5)]
    assert [len(share) for share in fair_shares(wanted, in_blocks)] == [600] * 5


def test_trimming_keeps_fast_cores_then_whole_domains() -> None:
    """One fast core, 0, and six slow ones in three L3 domains: 1-3, 4-5, and 6 beside core 0."""
    cutter = Cutter(1, partial(in_l3_domains, l3_of=(0, 1, 1, 1, 2, 2, 0)))
    assert cutter.in_trimming_order(range(7), 3) == (0, 4, 5, 1, 2, 3, 6)
    assert cutter.in_trimming_order(range(7), None) == (0, 1, 2, 3, 4, 5, 6)
