"""Cores whose siblings not every rank may use.

With masks of their own, one rank may have CPU 0 and another its sibling 64. What is dealt then is
the *piece* of a core: those of its CPUs that the same ranks may and want to use. So nobody gets a
CPU outside its mask, and none is lost because a sibling is somebody else's. Masks of whole cores,
which is what schedulers give, split nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from gpuaff.allocator.cores import Cores
from gpuaff.cpuset import CpuSet


def split(cores: Cores, reaches: Sequence[tuple[CpuSet, CpuSet]]) -> Cores:
    """Give a place to every piece of a core.

    Args:
        cores: whole cores, of all CPUs that any rank may use.
        reaches: for each rank, the CPUs that it may use and those of them that it wants; the
            siblings of a wanted CPU are wanted too.
    """
    torn = _torn(cores, {allowed for allowed, _ in reaches})
    if not torn:
        return cores
    claims = [(allowed, torn.intersection(cores.places(near))) for allowed, near in set(reaches)]
    pieces: list[tuple[int, CpuSet]] = []
    for place, core in enumerate(cores.cpus):
        masks = [allowed for allowed, wanted in claims if place in wanted]
        pieces += [(place, piece) for piece in _pieces(core, masks)]
    fast = sum(1 for place, _ in pieces if place < cores.slow_from)
    return Cores(tuple(cpus for _, cpus in pieces), fast, tuple(place for place, _ in pieces))


def _torn(cores: Cores, masks: Iterable[CpuSet]) -> frozenset[int]:
    """The places of the cores of which a mask has some CPUs and not the others."""
    widths = list(map(len, cores.cpus))
    torn: set[int] = set()
    for mask in masks:
        places = cores.places(mask)
        if sum(map(widths.__getitem__, places)) > len(mask):
            torn.update(place for place in places if not cores.cpus[place] <= mask)
    return frozenset(torn)


def _pieces(core: CpuSet, masks: Iterable[CpuSet]) -> list[CpuSet]:
    pieces = [core]
    for mask in masks:
        halves = ((piece & mask, piece - mask) for piece in pieces)
        pieces = [half for both in halves for half in both if half]
    return sorted(pieces, key=min)


def undivided(wanted: Sequence[frozenset[int]], cores: Cores) -> list[frozenset[int]]:
    """Keep ranks that could each have a whole core from having a piece of it each.

    Of such a core they compete for one piece, the one that the fewest others may have, and leave
    its other pieces to those others, who may not have all of it.

    Args:
        wanted: the places that each rank may have.
        cores: what is at these places.
    """
    lost: list[set[int]] = [set() for _ in wanted]
    for pieces in _in_pieces(frozenset().union(*wanted), cores):
        whole = [rank for rank, places in enumerate(wanted) if places.issuperset(pieces)]
        if len(whole) > 1:
            kept = min(pieces, key=lambda piece: (sum(piece in may for may in wanted), piece))
            for rank in whole:
                lost[rank] |= pieces - {kept}
    return [places - gone for places, gone in zip(wanted, lost, strict=True)]


def _in_pieces(places: Iterable[int], cores: Cores) -> Iterator[set[int]]:
    """The places of each core that has several."""
    found: dict[int, set[int]] = {}
    for place in places:
        found.setdefault(cores.core(place), set()).add(place)
    return (pieces for pieces in found.values() if len(pieces) > 1)
