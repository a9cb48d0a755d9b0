"""The modes that cut nothing: ALL, SINGLE and SINGLE_UNIQUE (gpu-affinity rule 3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter

from gpuaff.allocator.sites import Draft, Site


def pick_all(sites: Sequence[Site]) -> dict[int, Draft]:
    """Every rank gets all near cores; those near to some GPU by node first."""
    preferred = _node_cores(sites)
    drafts: dict[tuple[int, ...], Draft] = {}
    for site in sites:
        if site.cores not in drafts:
            drafts[site.cores] = Draft(_first(site.cores, preferred))
    return {rank: drafts[site.cores] for site in sites for rank in site.ranks}


def pick_single(sites: Sequence[Site]) -> dict[int, Draft]:
    """Every rank gets the first core near its GPU."""
    node_cores = _node_cores(sites)
    firsts = {site.gpu: next(_nearest_first(site, node_cores)) for site in sites}
    return {rank: Draft((firsts[site.gpu],)) for site in sites for rank in site.ranks}


def pick_single_unique(sites: Sequence[Site]) -> dict[int, Draft]:
    """Ranks in order take their first core not yet taken; who finds none shares its first."""
    node_cores = _node_cores(sites)
    taken: set[int] = set()
    drafts: dict[int, Draft] = {}
    for rank, site in sorted(_seats(sites), key=itemgetter(0)):
        cores = _nearest_first(site, node_cores)
        free = next((core for core in cores if core not in taken), None)
        if free is None:
            drafts[rank] = Draft((next(_nearest_first(site, node_cores)),), own=False)
        else:
            drafts[rank] = Draft((free,))
            taken.add(free)
    return drafts


def _seats(sites: Sequence[Site]) -> Iterator[tuple[int, Site]]:
    return ((rank, site) for site in sites for rank in site.ranks)


def _nearest_first(site: Site, node_cores: frozenset[int]) -> Iterator[int]:
    """A GPU's cores: of its own node, then of no GPU's node, then of the others'."""
    inside, own = frozenset(site.cores), frozenset(site.node_cores)
    yield from (core for core in site.node_cores if core in inside)
    yield from (core for core in site.cores if core not in node_cores)
    yield from (core for core in site.cores if core in node_cores and core not in own)


def _first(cores: tuple[int, ...], preferred: frozenset[int]) -> tuple[int, ...]:
    """The same cores, the preferred ones first."""
    if preferred.issuperset(cores):
        return cores
    chosen = tuple(core for core in cores if core in preferred)
    return chosen + tuple(core for core in cores if core not in preferred)


def _node_cores(sites: Sequence[Site]) -> frozenset[int]:
    """The cores that are near to some GPU by NUMA node."""
    return frozenset().union(*{site.node_cores for site in sites})
