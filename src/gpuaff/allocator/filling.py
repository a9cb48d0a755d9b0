"""Cutting one list of cores into parts: gpu-affinity rule 2, and L3 domain by L3 domain."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from gpuaff.allocator.cores import Cores
from gpuaff.topology.model import Topology

Fill = Callable[[Sequence[int], Sequence[int]], list[tuple[int, ...]]]
"""Takes places and the size of each part; returns the parts. Places beyond the sum stay free."""


def in_blocks(places: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Parts are consecutive blocks."""
    ends = accumulate(sizes)
    return [tuple(places[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


def in_turn(places: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Parts take one place after another in turn, each until it is full."""
    rounds = range(max(sizes, default=0))
    takers = [part for turn in rounds for part, size in enumerate(sizes) if turn < size]
    parts: list[list[int]] = [[] for _ in sizes]
    for part, place in zip(takers, places, strict=False):
        parts[part].append(place)
    return list(map(tuple, parts))


def in_l3_domains(
    places: Iterable[int], sizes: Sequence[int], *, l3_of: Sequence[int]
) -> list[tuple[int, ...]]:
    """First each part in turn takes the lowest L3 domains that are wholly free and fit into it.

    Then each in turn is filled up from as few domains as possible: the lowest with enough free
    places, or else the one with most. A domain counts as far as its places are in the list.

    Args:
        places: what to cut.
        sizes: the size of each part.
        l3_of: the number of the L3 domain of each place.
    """
    domains: dict[int, list[int]] = {}
    for place in sorted(places):
        domains.setdefault(l3_of[place], []).append(place)
    free = list(domains.values())
    parts: list[list[int]] = [[] for _ in sizes]
    for part, size in zip(parts, sizes, strict=True):
        for domain in free:
            if len(domain) <= size - len(part):
                part += domain
                domain.clear()
    for part, size in zip(parts, sizes, strict=True):
        _fill_up(part, size, free)
    return list(map(tuple, parts))


def _fill_up(part: list[int], size: int, free: Iterable[list[int]]) -> None:
    while lacking := size - len(part):
        enough = (domain for domain in free if len(domain) >= lacking)
        domain = next(enough, None) or max(free, key=len)
        part += domain[:lacking]
        del domain[:lacking]


def by_l3(topology: Topology, cores: Cores) -> Fill:
    """:func:`in_l3_domains` of a machine; :func:`in_blocks` where its domains are unknown.

    A core in no domain is one of its own.
    """
    if not topology.l3:
        return in_blocks
    domain_of = {cpu: number for number, cpus in enumerate(topology.l3) for cpu in cpus}
    found = map(domain_of.get, map(min, cores.cpus))
    alone = len(topology.l3)
    l3_of = [
        alone + cores.core(place) if domain is None else domain
        for place, domain in enumerate(found)
    ]
    return partial(in_l3_domains, l3_of=l3_of)


class Cutter(NamedTuple):
    """How lists of places are cut in one plan.

    Attributes:
        slow_from: the place of the first slow core.
        fill: how parts are filled.
    """

    slow_from: int
    fill: Fill

    @property
    def contiguous(self) -> bool:
        """Whether parts are made of neighbouring cores."""
        return self.fill is not in_turn

    @property
    def in_blocks(self) -> Cutter:
        """The same without L3 domains: parts have the same sizes."""
        return self._replace(fill=in_blocks) if self.contiguous else self

    def kinds(self, places: Sequence[int], parts: int) -> list[tuple[int, ...]]:
        """The lists that are cut on their own: fast and slow cores (case G5).

        With fewer fast cores than parts there is one list: otherwise some parts would be empty
        while cores are left.
        """
        fast = bisect_left(places, self.slow_from)
        if parts <= fast < len(places):
            return [tuple(places[:fast]), tuple(places[fast:])]
        return [tuple(places)]

    def even(self, places: Sequence[int], parts: int) -> int:
        """The largest size that all parts can have."""
        return sum(len(kind) // parts for kind in self.kinds(places, parts))

    def cut(
        self, places: Sequence[int], parts: int, size: int | None = None
    ) -> list[tuple[int, ...]]:
        """Cut places, ascending, into parts, each with its fast cores first.

        Args:
            places: what to cut.
            parts: the number of parts.
            size: the size of every part, or less where there is not enough. None: every place is
                in a part, and the first parts get the odd ones.
        """
        found: list[tuple[int, ...]] = [()] * parts
        for kind in self.kinds(places, parts):
            each, odd = divmod(len(kind), parts)
            if size is None:
                sizes = [each + 1] * odd + [each] * (parts - odd)
            else:
                sizes = [min(each, size - len(found[0]))] * parts
            more = self.fill(kind, sizes)
            found = [part + rest for part, rest in zip(found, more, strict=True)]
        return found

    def in_trimming_order(self, places: Sequence[int], size: int | None) -> tuple[int, ...]:
        """Places, ascending, with the ``size`` first (None: all) that a share keeps when trimmed:
        fast cores, and whole L3 domains.
        """  # noqa: D205 - one sentence
        left = len(places) if size is None else size
        kept: list[int] = []
        for kind in self.kinds(places, 1):
            kept += self.fill(kind, [min(len(kind), left - len(kept))])[0]
        return (*kept, *sorted(set(places).difference(kept)))
