"""The modes that cut nothing: ALL, SINGLE and SINGLE_UNIQUE (gpu-affinity rule 3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from operator import itemgetter

from gpuaff.allocator.cores import Cores
from gpuaff.allocator.sites import Draft, Site


def pick_all(sites: Sequence[Site]) -> dict[int, Draft]:
    """Every rank gets all near cores; those near to some GPU by node first."""
    preferred = node_cores_of(sites)
    drafts: dict[tuple[int, ...], Draft] = {}
    for site in sites:
        if site.cores not in drafts:
            drafts[site.cores] = Draft(nodes_first(site.cores, preferred))
    return {rank: drafts[site.cores] for site in sites for rank in site.ranks}


def pick_single(sites: Sequence[Site], cores: Cores) -> dict[int, Draft]:
    """Every rank gets the first core near its GPU."""
    node_cores = node_cores_of(sites)
    drafts: dict[int, Draft] = {}
    for site in sites:
        first = next(_nearest_first(site, node_cores))
        drafts.update(dict.fromkeys(site.ranks, Draft(_whole(first, site.cores, cores))))
    return drafts


def pick_single_unique(sites: Sequence[Site], cores: Cores) -> dict[int, Draft]:
    """Ranks in order take their first core not yet taken; who finds none shares one.

    Those who share begin at another core each, as in the other unique modes.
    """
    node_cores = node_cores_of(sites)
    taken: set[int] = set()
    turns: Counter[tuple[int, ...]] = Counter()
    drafts: dict[int, Draft] = {}
    for rank, site in sorted(_seats(sites), key=itemgetter(0)):
        order = partial(_nearest_first, site, node_cores)
        free = _first_free(order, taken, cores)
        if free is None:
            turn = turns[site.cores] % len(site.cores)
            turns[site.cores] += 1
            shared = next(islice(order(), turn, None))
            drafts[rank] = Draft(_whole(shared, site.cores, cores), own=False)
        else:
            drafts[rank] = Draft(_whole(free, set(site.cores) - taken, cores))
            taken.update(drafts[rank].cores)
    return drafts


def _first_free(order: Callable[[], Iterator[int]], taken: set[int], cores: Cores) -> int | None:
    """The first core of which nothing is taken; else the first piece of one that is not."""
    hit = set(map(cores.core, taken))
    whole = next((place for place in order() if cores.core(place) not in hit), None)
    return whole if whole is not None else next((p for p in order() if p not in taken), None)


def _whole(first: int, places: Iterable[int], cores: Cores) -> tuple[int, ...]:
    """Those of the places that are of the same core as the first."""
    if cores.core_of is None:
        return (first,)
    return tuple(sorted(place for place in places if cores.core(place) == cores.core(first)))


def _seats(sites: Sequence[Site]) -> Iterator[tuple[int, Site]]:
    return ((rank, site) for site in sites for rank in site.ranks)


def _nearest_first(site: Site, node_cores: frozenset[int]) -> Iterator[int]:
    """A GPU's cores: of its own node, then of no GPU's node, then of the others'."""
    inside, own = frozenset(site.cores), frozenset(site.node_cores)
    yield from (core for core in site.node_cores if core in inside)
    yield from (core for core in site.cores if core not in node_cores)
    yield from (core for core in site.cores if core in node_cores and core not in own)


def nodes_first(cores: tuple[int, ...], preferred: frozenset[int]) -> tuple[int, ...]:
    """The same cores, the preferred ones first."""
    if preferred.issuperset(cores):
        return cores
    chosen = tuple(core for core in cores if core in preferred)
    return chosen + tuple(core for core in cores if core not in preferred)


def node_cores_of(sites: Sequence[Site]) -> frozenset[int]:
    """The cores that are near to some GPU by NUMA node."""
    return frozenset().union(*{site.node_cores for site in sites})
