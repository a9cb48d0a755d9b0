"""Cutting one list of cores into equal parts: gpu-affinity rule 2.

Where parts may be unequal, no core is left out: gpu_affinity leaves out the remainder of blocks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from gpuaff.allocator.cores import Cores
from gpuaff.topology.model import Topology

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    from gpuaff.allocator.cores import Cores

# Filling shares of given sizes from one list of cores: in blocks, or L3 domain by domain.


Domains: TypeAlias = Sequence[int]
"""The number of the L3 domain of each place; empty where nobody asks for them."""


def pack(cores: Sequence[int], sizes: Sequence[int], domains: Domains) -> list[tuple[int, ...]]:
    """Fill shares; cores beyond the sum of the sizes stay free.

    Without domains the shares are consecutive blocks. With domains, first each share in turn
    takes the lowest domains that are wholly free and fit into what it lacks (*whole* means all
    cores of the list that are in the domain); then each in turn is filled up from as few domains
    as it can be: the lowest with enough free cores, or else the one with most.

    Args:
        cores: the places to share out.
        sizes: the number of places for each share; together no more than there are.
        domains: which place is in which domain.

    Returns:
        Each share's places, those of whole domains first.
    """
    if not domains:
        ends = accumulate(sizes)
        return [tuple(cores[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
    free = _by_domain(cores, domains)
    shares: list[list[int]] = [[] for _ in sizes]
    wanted = list(zip(shares, sizes, strict=True))
    for share, size in wanted:
        _take_whole(share, size, free)
    for share, size in wanted:
        _fill_up(share, size, free)
    return [tuple(share) for share in shares]


def _by_domain(cores: Iterable[int], domains: Domains) -> list[list[int]]:
    """The places of each domain, ascending; the domains by their lowest."""
    found: dict[int, list[int]] = {}
    for place in sorted(cores):
        found.setdefault(domains[place], []).append(place)
    return list(found.values())


def _take_whole(share: list[int], size: int, free: Iterable[list[int]]) -> None:
    for domain in free:
        if len(domain) <= size - len(share):
            share += domain
            domain.clear()


def _fill_up(share: list[int], size: int, free: Iterable[list[int]]) -> None:
    while lacking := size - len(share):
        enough = (domain for domain in free if len(domain) >= lacking)
        domain = next(enough, None) or max(free, key=len)
        share += domain[:lacking]
        del domain[:lacking]


def domains_of(topology: Topology, cores: Cores) -> Domains:
    """The L3 domain of each place; empty when the machine's are unknown.

    A core in no domain is one of its own.
    """
    if not topology.l3:
        return ()
    domain_of = {cpu: number for number, cpus in enumerate(topology.l3) for cpu in cpus}
    found = list(map(domain_of.get, map(min, cores.cpus)))
    alone = len(topology.l3)
    return [
        alone + cores.core(place) if domain is None else domain
        for place, domain in enumerate(found)
    ]


@dataclass(frozen=True, slots=True)
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
