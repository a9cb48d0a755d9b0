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


class TestByHand:
    def test_without_domains_they_are_blocks(self) -> None:
        assert in_blocks((3, 4, 6, 7, 9, 12), [2, 0, 3]) == [(3, 4), (), (6, 7, 9)]

    def test_in_turn_each_until_it_is_full(self) -> None:
        assert in_turn((3, 4, 6, 7, 9, 12), [2, 0, 3]) == [(3, 6), (), (4, 7, 9)]
        assert in_turn((3, 4), []) == []

    def test_one_domain_is_cut_in_blocks_too(self) -> None:
        assert packed([2, 0, 3], 6) == [(0, 1), (), (2, 3, 4)]

    def test_whole_domains(self) -> None:
        assert packed([4, 4], 2, 2, 2, 2) == [(0, 1, 2, 3), (4, 5, 6, 7)]

    def test_blocks_would_cut_across_a_domain(self) -> None:
        """Three of five: 0-4, 5-9, 10-14 of domains of four would be in two or more each."""
        assert packed([4, 4, 4], 5, 5, 5) == [(0, 1, 2, 3), (5, 6, 7, 8), (10, 11, 12, 13)]

    def test_whole_ones_first_for_all_then_the_rest(self) -> None:
        """Both take a whole domain of four before the first is filled up with one core."""
        assert packed([5, 5], 4, 4, 4) == [(0, 1, 2, 3, 8), (4, 5, 6, 7, 9)]

    def test_a_domain_that_is_too_large_is_passed_over(self) -> None:
        assert packed([3, 6], 4, 3, 2) == [(4, 5, 6), (0, 1, 2, 3, 7, 8)]

    def test_the_rest_comes_from_as_few_domains_as_possible(self) -> None:
        """What lacks three takes them where three are, though two are free further down."""
        assert packed([2, 3], 4, 4) == [(0, 1), (4, 5, 6)]

    def test_where_none_has_enough_the_one_with_most_comes_first(self) -> None:
        """The third share of 16 takes the first domain, which is whole; the others find five in
        one of the other two each. Of four and five cores three shares of three leave one and
        two, and the last begins with the two."""
        assert packed([5, 5, 6], 6, 6, 6) == [
            (6, 7, 8, 9, 10),
            (12, 13, 14, 15, 16),
            (0, 1, 2, 3, 4, 5),
        ]
        assert packed([3, 3, 3], 4, 5) == [(0, 1, 2), (4, 5, 6), (7, 8, 3)]

    def test_cores_that_are_not_in_the_list_do_not_count(self) -> None:
        """Domains of four of which 0 and 4 are not to be had: three are whole."""
        assert in_l3_domains((1, 2, 3, 5, 6, 7), [3, 3], l3_of=domains(4, 4)) == [
            (1, 2, 3),
            (5, 6, 7),
        ]

    def test_the_lowest_comes_first_in_whatever_order_they_are_given(self) -> None:
        assert in_l3_domains((5, 4, 1, 0), [2, 2], l3_of=domains(4, 4)) == [(0, 1), (4, 5)]

    def test_domains_need_not_be_consecutive(self) -> None:
        assert in_l3_domains(range(6), [3, 3], l3_of=(0, 1, 0, 1, 0, 1)) == [(0, 2, 4), (1, 3, 5)]


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
