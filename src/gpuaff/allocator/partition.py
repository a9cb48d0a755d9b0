"""Cutting one list of cores into equal parts: gpu-affinity rule 2.

Where parts may be unequal, no core is left out: gpu_affinity leaves out the remainder of blocks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from gpuaff.allocator.cores import Cores
from gpuaff.allocator.pack import Domains, pack
from gpuaff.records import dataclass, replace


@dataclass(frozen=True)
class Cutter:
    """How lists are cut in one plan.

    Attributes:
        cores: what is cut.
        contiguous: parts are consecutive blocks; otherwise every k-th core.
        domains: the L3 domains that parts are made of instead of blocks, if any.
    """

    cores: Cores
    contiguous: bool
    domains: Domains = ()

    @property
    def in_blocks(self) -> Cutter:
        """The same without L3 domains; sizes are the same, and sooner known."""
        return replace(self, domains=()) if self.domains else self

    def even(self, cores: Sequence[int], ways: int) -> int:
        """How many cores each part can have when all parts are equal."""
        return sum(len(kind) // ways for kind in self.kinds(cores, ways))

    def cut(
        self, cores: Sequence[int], ways: int, size: int | None = None
    ) -> list[tuple[int, ...]]:
        """Cut places, fast cores first, into parts, each with its fast cores first.

        Args:
            cores: what to cut; ascending, or a part of an earlier cut.
            ways: the number of parts.
            size: the size of every part (less where there is not enough). None: every core is in
                a part, and the first parts get the odd ones.
        """
        parts: list[tuple[int, ...]] = [()] * ways
        for kind in self.kinds(cores, ways):
            block, odd = divmod(len(kind), ways)
            if size is None:
                sizes = [block + 1] * odd + [block] * (ways - odd)
            else:
                sizes = [min(block, size - len(parts[0]))] * ways
            more = self._parts(kind, sizes)
            parts = [part + rest for part, rest in zip(parts, more, strict=True)]
        return parts

    def kinds(self, cores: Sequence[int], ways: int) -> list[tuple[int, ...]]:
        """The lists that are cut on their own: fast and slow cores (case G5).

        With fewer fast cores than parts there is one list, or some parts would be empty while
        cores are left.
        """
        fast = bisect_left(cores, self.cores.slow_from)
        if ways <= fast < len(cores):
            return [tuple(cores[:fast]), tuple(cores[fast:])]
        return [tuple(cores)]

    def dearest_first(self, cores: Sequence[int], size: int | None) -> tuple[int, ...]:
        """A share's places in the order in which it would rather keep them, fast ones first.

        Args:
            cores: ascending.
            size: how many it may keep; None: all.
        """
        if not self.domains:
            return tuple(cores)
        left = len(cores) if size is None else size
        kept: list[int] = []
        for kind in self.kinds(cores, 1):
            kept += pack(kind, [min(len(kind), left - len(kept))], self.domains)[0]
        return (*kept, *sorted(set(cores).difference(kept)))

    def _parts(self, cores: tuple[int, ...], sizes: Sequence[int]) -> list[tuple[int, ...]]:
        if self.contiguous:
            return pack(cores, sizes, self.domains)
        return [cores[way :: len(sizes)][:size] for way, size in enumerate(sizes)]
