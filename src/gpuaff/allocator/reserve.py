"""Cores that stay out of every share, for helper processes (case B10)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from gpuaff.allocator.cores import Cores
from gpuaff.allocator.placement import Draft, Site
from gpuaff.allocator.split import node_cores_of, nodes_first
from gpuaff.errors import GPUAffinityError


def cut_off(
    sites: Sequence[Site],
    drafts: Mapping[int, Draft],
    count: int,
    cores: Cores,
    names: Sequence[int],
) -> dict[int, Draft]:
    """Reserve the last cores of each rank's own part: those that it misses least.

    Raises:
        GPUAffinityError: a rank has no core of its own beside these.
    """
    for site in sites:
        for rank in site.ranks:
            found = cores.count(drafts[rank].cores) if drafts[rank].own else 0
            if found <= count:
                near = cores.count(site.cores)
                part = f"its part is {found} of the {near} cores near its GPU"
                raise _none_left(names[rank], site, count, part)
    return {rank: _without_last(draft, count, cores) for rank, draft in drafts.items()}


def set_aside(
    sites: Sequence[Site],
    pick: Callable[[Sequence[Site]], dict[int, Draft]],
    count: int,
    cores: Cores,
    names: Sequence[int],
) -> dict[int, Draft]:
    """Reserve the last cores of each distinct near list, and let ranks pick from the rest.

    Raises:
        GPUAffinityError: a rank finds no core among the rest, or none of its own where each is to
            have one.
    """
    preferred = node_cores_of(sites)
    lists = {site.cores: Draft(nodes_first(site.cores, preferred)) for site in sites}
    cut = {own: _without_last(draft, count, cores) for own, draft in lists.items()}
    taken = frozenset(place for draft in cut.values() for place in draft.reserved)
    rest = [_without(site, taken) for site in sites]
    for site, left in zip(sites, rest, strict=True):
        if not left.cores:
            raise _none_left(names[site.ranks[0]], site, count, _all_taken(site, cores))
    drafts = pick(rest)
    for site in sites:
        for rank in site.ranks:
            if not drafts[rank].own:
                raise _none_left(names[rank], site, count, _all_taken(site, cores))
            drafts[rank] = replace(drafts[rank], reserved=cut[site.cores].reserved)
    return drafts


def _without_last(draft: Draft, count: int, cores: Cores) -> Draft:
    kept, last = cores.divide(draft.cores, max(cores.count(draft.cores) - count, 0))
    return replace(draft, cores=kept, reserved=last)


def _without(site: Site, taken: frozenset[int]) -> Site:
    return replace(site, cores=tuple(place for place in site.cores if place not in taken))


def _all_taken(site: Site, cores: Cores) -> str:
    return f"of the {cores.count(site.cores)} cores near its GPU all are reserved or other ranks'"


def _none_left(rank: int, site: Site, count: int, found: str) -> GPUAffinityError:
    return GPUAffinityError(
        f"reserve={count} was asked for, but that leaves rank {rank} on GPU {site.gpu} no core of "
        f"its own: {found}; reserve fewer, start fewer processes or allow more CPUs"
    )
