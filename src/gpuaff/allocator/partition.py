"""Cutting one list of cores into equal parts: gpu-affinity rule 2."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from gpuaff.records import dataclass


@dataclass(frozen=True)
class Cutter:
    """How lists are cut in one plan.

    Attributes:
        contiguous: parts are consecutive blocks; otherwise every k-th core.
        slow_from: the place of the first slow core (see :class:`~gpuaff.allocator.cores.Cores`).
    """

    contiguous: bool
    slow_from: int

    def even(self, cores: Sequence[int], ways: int) -> int:
        """How many cores each part can have when all parts are equal."""
        return sum(len(kind) // ways for kind in self.kinds(cores, ways))

    def cut(
        self, cores: Sequence[int], ways: int, size: int | None = None
    ) -> list[tuple[int, ...]]:
        """Cut ascending places into parts, each with its fast cores first.

        Args:
            cores: what to cut.
            ways: the number of parts.
            size: the size of every part (less where there is not enough). None: as large as
                rule 2 has it for unbalanced plans, which may leave parts unequal or empty.
        """
        parts: list[tuple[int, ...]] = [()] * ways
        for kind in self.kinds(cores, ways):
            block = len(kind) // ways
            if size is not None:
                block = min(block, size - len(parts[0]))
            for way in range(ways):
                parts[way] += self._part(kind, way, ways, block, cut_even=size is not None)
        return parts

    def kinds(self, cores: Sequence[int], ways: int) -> list[tuple[int, ...]]:
        """The lists that are cut on their own: fast and slow cores (case G5).

        With fewer fast cores than parts there is one list, or some parts would be empty while
        cores are left.
        """
        fast = bisect_left(cores, self.slow_from)
        if ways <= fast < len(cores):
            return [tuple(cores[:fast]), tuple(cores[fast:])]
        return [tuple(cores)]

    def _part(
        self, cores: tuple[int, ...], way: int, ways: int, block: int, *, cut_even: bool
    ) -> tuple[int, ...]:
        if self.contiguous:
            return cores[way * block : (way + 1) * block]
        part = cores[way::ways]
        return part[:block] if cut_even else part
