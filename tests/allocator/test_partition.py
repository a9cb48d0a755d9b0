"""How lists are cut into parts, and in which order a part is kept."""

from __future__ import annotations

from gpuaff.allocator.blocks import Cutter
from gpuaff.allocator.cores import Cores


def cutter(count: int, slow_from: int, domains: tuple[int, ...] = ()) -> Cutter:
    """For cores of one CPU each."""
    cpus = tuple(frozenset((cpu,)) for cpu in range(count))
    return Cutter(Cores(cpus, slow_from), contiguous=True, domains=domains)


class TestKinds:
    def test_fast_and_slow(self) -> None:
        assert cutter(6, slow_from=2).kinds(range(6), 2) == [(0, 1), (2, 3, 4, 5)]

    def test_too_few_fast_ones(self) -> None:
        assert cutter(6, slow_from=2).kinds(range(6), 3) == [(0, 1, 2, 3, 4, 5)]

    def test_one_kind_is_one_list(self) -> None:
        assert cutter(6, slow_from=4).kinds((1, 2), 2) == [(1, 2)]
        assert cutter(6, slow_from=2).kinds((3, 4), 2) == [(3, 4)]


class TestDearestFirst:
    """One fast core, 0, and six slow ones in three L3 domains: 1-3, 4-5, and 6 beside core 0."""

    CUTTER = cutter(7, slow_from=1, domains=(0, 1, 1, 1, 2, 2, 0))

    def test_fast_ones_then_whole_domains_of_the_right_size_then_the_rest(self) -> None:
        assert self.CUTTER.dearest_first(range(7), 3) == (0, 4, 5, 1, 2, 3, 6)

    def test_all(self) -> None:
        assert self.CUTTER.dearest_first(range(7), None) == (0, 1, 2, 3, 4, 5, 6)

    def test_without_domains_as_they_come(self) -> None:
        assert cutter(7, slow_from=1).dearest_first(range(7), 3) == (0, 1, 2, 3, 4, 5, 6)
