"""How lists are cut into parts, and in which order a part is kept."""

from __future__ import annotations

from functools import partial

from gpuaff.allocator.cutting import Cutter, in_blocks, in_l3_domains


def cutter(slow_from: int, domains: tuple[int, ...] = ()) -> Cutter:
    return Cutter(slow_from, partial(in_l3_domains, l3_of=domains) if domains else in_blocks)


class TestKinds:
    def test_fast_and_slow(self) -> None:
        assert cutter(slow_from=2).kinds(range(6), 2) == [(0, 1), (2, 3, 4, 5)]

    def test_too_few_fast_ones(self) -> None:
        assert cutter(slow_from=2).kinds(range(6), 3) == [(0, 1, 2, 3, 4, 5)]

    def test_one_kind_is_one_list(self) -> None:
        assert cutter(slow_from=4).kinds((1, 2), 2) == [(1, 2)]
        assert cutter(slow_from=2).kinds((3, 4), 2) == [(3, 4)]


class TestTrimmingOrder:
    """One fast core, 0, and six slow ones in three L3 domains: 1-3, 4-5, and 6 beside core 0."""

    CUTTER = cutter(slow_from=1, domains=(0, 1, 1, 1, 2, 2, 0))

    def test_fast_ones_then_whole_domains_of_the_right_size_then_the_rest(self) -> None:
        assert self.CUTTER.in_trimming_order(range(7), 3) == (0, 4, 5, 1, 2, 3, 6)

    def test_all(self) -> None:
        assert self.CUTTER.in_trimming_order(range(7), None) == (0, 1, 2, 3, 4, 5, 6)

    def test_without_domains_as_they_come(self) -> None:
        assert cutter(slow_from=1).in_trimming_order(range(7), 3) == (0, 1, 2, 3, 4, 5, 6)
