"""How lists of cores are cut: by L3 domain also against a second statement of the rule."""

from __future__ import annotations

from functools import partial
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from gpuaff.allocator.cores import Cutter, in_blocks, in_l3_domains, in_turn


def domains(*sizes: int) -> list[int]:
    """Consecutive domains of these sizes."""
    return [number for number, size in enumerate(sizes) for _ in range(size)]


def packed(sizes: list[int], *domain_sizes: int) -> list[tuple[int, ...]]:
    return in_l3_domains(range(sum(domain_sizes)), sizes, l3_of=domains(*domain_sizes))


def test_blocks_and_turns_leave_what_is_beyond_the_sum() -> None:
    assert in_blocks((3, 4, 6, 7, 9, 12), [2, 0, 3]) == [(3, 4), (), (6, 7, 9)]
    assert in_turn((3, 4, 6, 7, 9, 12), [2, 0, 3]) == [(3, 6), (), (4, 7, 9)]
    assert in_turn((3, 4), []) == []


def test_whole_domains_come_first_for_all_then_the_rest() -> None:
    """Both take a whole domain of four before the first is filled up with one core."""
    assert packed([5, 5], 4, 4, 4) == [(0, 1, 2, 3, 8), (4, 5, 6, 7, 9)]
    assert packed([3, 6], 4, 3, 2) == [(4, 5, 6), (0, 1, 2, 3, 7, 8)]


def test_where_none_has_enough_the_domain_with_most_comes_first() -> None:
    """Of four and five cores three shares of three leave one and two: the last begins with two."""
    assert packed([3, 3, 3], 4, 5) == [(0, 1, 2), (4, 5, 6), (7, 8, 3)]


def cutter(slow_from: int, domains: tuple[int, ...] = ()) -> Cutter:
    return Cutter(slow_from, partial(in_l3_domains, l3_of=domains) if domains else in_blocks)


def test_fast_and_slow_cores_are_cut_apart_if_there_are_fast_ones_for_all() -> None:
    assert cutter(slow_from=2).kinds(range(6), 2) == [(0, 1), (2, 3, 4, 5)]
    assert cutter(slow_from=2).kinds(range(6), 3) == [(0, 1, 2, 3, 4, 5)], "too few fast ones"
    assert cutter(slow_from=4).kinds((1, 2), 2) == [(1, 2)], "one kind is one list"
    assert cutter(slow_from=2).kinds((3, 4), 2) == [(3, 4)]


def test_trimming_keeps_fast_cores_then_whole_domains() -> None:
    """One fast core, 0, and six slow ones in three L3 domains: 1-3, 4-5, and 6 beside core 0."""
    by_domain = cutter(slow_from=1, domains=(0, 1, 1, 1, 2, 2, 0))
    assert by_domain.in_trimming_order(range(7), 3) == (0, 4, 5, 1, 2, 3, 6)
    assert by_domain.in_trimming_order(range(7), None) == (0, 1, 2, 3, 4, 5, 6)
    assert cutter(slow_from=1).in_trimming_order(range(7), 3) == (0, 1, 2, 3, 4, 5, 6)


LISTS = st.lists(st.integers(0, 5), min_size=1, max_size=14)
"""The domain of each of some cores."""


@given(data=st.data(), domain_of=LISTS)
def test_the_rule(data: st.DataObject, domain_of: list[int]) -> None:
    """Each share in turn: whole domains while any fits, lowest first; then the fewest domains
    that can fill it, found by trying all sets of domains."""
    cores = data.draw(st.sets(st.sampled_from(range(len(domain_of))), min_size=1).map(sorted))
    sizes: list[int] = []
    while sum(sizes) < len(cores) and len(sizes) < 5:
        sizes.append(data.draw(st.integers(0, len(cores) - sum(sizes))))
    shares = in_l3_domains(cores, sizes, l3_of=domain_of)
    assert [len(share) for share in shares] == sizes

    def whole(domain: int) -> set[int]:
        return {core for core in cores if domain_of[core] == domain}

    free = set(cores)
    lowest_first = sorted(set(domain_of), key=lambda domain: min(whole(domain), default=99))
    got: list[set[int]] = []
    for size in sizes:
        taken: set[int] = set()
        while fits := [
            domain
            for domain in lowest_first
            if whole(domain) and whole(domain) <= free and len(whole(domain)) <= size - len(taken)
        ]:
            taken |= whole(fits[0])
            free -= taken
        got.append(taken)
    for share, taken in zip(shares, got, strict=True):
        assert taken == set(share[: len(taken)])
        filled = set(share) - taken
        assert filled <= free
        touched = {domain_of[core] for core in filled}
        assert len(touched) == fewest(
            len(filled),
            [whole(domain) & free for domain in touched]
            + [whole(d) & free for d in lowest_first if d not in touched],
        )
        for domain in touched:
            rest = (whole(domain) & free) - filled
            assert max(filled & whole(domain)) < min(rest, default=99)
        free -= filled


def fewest(lacking: int, free: list[set[int]]) -> int:
    """The smallest number of domains that hold so many cores."""
    return next(
        count
        for count in range(len(free) + 1)
        if any(sum(map(len, some)) >= lacking for some in combinations(free, count))
    )
