"""The unique modes: every core in at most one share.

GPUs whose near cores touch, directly or through others, form an *island*; islands do not
compete. An island is cut by one of three rules:

* all its GPUs have the same cores: gpu-affinity rule 2 (:class:`_Same`);
* by socket, and its nodes are clean parts of the socket: rule 4, which is rule 2 over each
  node's cores, and the socket's other cores dealt to them (:class:`_Dealt`);
* anything else: max-min fair (:class:`_Mixed`).

Balanced shares are of the largest size that all ranks of all islands can have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, islice
from operator import itemgetter

from gpuaff.allocator.blocks import Cutter
from gpuaff.allocator.cores import Cores
from gpuaff.allocator.fair import fair_shares
from gpuaff.allocator.model import Scope
from gpuaff.allocator.placement import Draft, Site, by_cores

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    _Cut: TypeAlias = Callable[["_Same", int | None], Iterator[tuple[int, Draft]]]

# Socket scope: the cores that belong to no GPU's node are dealt to those that do.
#
# This is gpu-affinity rule 4. The partition is made over node cores, and each node core brings
# along the cores that were dealt to it.


Dealt: TypeAlias = Mapping[int, tuple[int, ...]]
"""The cores dealt to each node core, to each as many."""


def deal(socket: Sequence[int], node_cores: Sequence[int]) -> tuple[Dealt, tuple[int, ...]]:
    """Deal a socket's other cores, ascending and round-robin, to its node cores, ascending.

    Returns:
        What full rounds bring, and the cores that make no full round: these belong to no node
        core, or the lowest would have them all.
    """
    takers = sorted(node_cores)
    others = sorted(set(socket).difference(takers))
    dealt = len(others) - len(others) % len(takers)
    rounds = {taker: tuple(others[turn : dealt : len(takers)]) for turn, taker in enumerate(takers)}
    return rounds, tuple(others[dealt:])


def with_dealt(cores: Sequence[int], dealt: Dealt) -> tuple[int, ...]:
    """Node cores, then all first-dealt, then all second-dealt …: trimming keeps node cores."""
    rounds = zip(*(dealt[core] for core in cores), strict=True)
    return (*cores, *chain.from_iterable(rounds))


def cut_unique(
    sites: Sequence[Site], scope: Scope, cutter: Cutter, *, balanced: bool
) -> dict[int, Draft]:
    """Give every rank cores of its own.

    A rank for which none is left shares all cores near its GPU; it does not count when shares
    are balanced.
    """
    parts = _parts(sites, scope, cutter)
    if not balanced:
        return {rank: draft for part in parts for rank, draft in part.cut(None)}
    size = min((size for part in parts for size in part.sizes() if size), default=0)
    return {
        rank: replace(draft, cores=cutter.cores.divide(draft.cores, size)[0])
        if draft.own
        else draft
        for part in parts
        for rank, draft in part.cut(size)
    }


def islands(sites: Iterable[Site]) -> list[list[Site]]:
    """Group the sites whose near cores overlap, directly or through others; in order."""
    found: list[tuple[set[int], list[Site]]] = []
    for cores, members in by_cores(sites).items():
        touching = [island for island in found if not island[0].isdisjoint(cores)]
        found = [island for island in found if island[0].isdisjoint(cores)]
        reach = set(cores).union(*(island[0] for island in touching))
        inside = [site for island in touching for site in island[1]]
        found.append((reach, inside + members))
    grouped = [sorted(members, key=_first_rank) for _, members in found]
    return sorted(grouped, key=lambda island: _first_rank(island[0]))


def _parts(sites: Iterable[Site], scope: Scope, cutter: Cutter) -> list[_Part]:
    found = islands(sites)
    nodes = [_clean_nodes(island, cutter) if scope is Scope.SOCKET else () for island in found]
    least = min((node.even for by_node in nodes for node in by_node), default=0)
    return [
        _Dealt(island[0].cores, by_node, least)
        if by_node
        else _Mixed(island, cutter)
        if len({site.cores for site in island}) > 1
        else _Same(island, island[0].cores, cutter)
        for island, by_node in zip(found, nodes, strict=True)
    ]


def _clean_nodes(island: Sequence[Site], cutter: Cutter) -> Sequence[_Same]:
    """The nodes of a socket, if rule 4 can deal to these; else nothing.

    It can where all GPUs have the whole socket, nodes lie inside it and apart from each other,
    and each has a core for every rank.
    """
    nodes = by_cores(replace(site, cores=site.node_cores) for site in island)
    lying_in = [core for cores in nodes for core in cores]
    same = len({site.cores for site in island}) == 1
    apart = len(set(lying_in)) == len(lying_in)
    inside = set(island[0].cores).issuperset(lying_in)
    found = [_Same(members, cores, cutter) for cores, members in nodes.items()]
    return found if same and apart and inside and all(node.suffices for node in found) else ()


def _first_rank(site: Site) -> int:
    return site.ranks[0]


def _shared(ranks: Iterable[int], cores: Sequence[int]) -> Iterator[tuple[int, Draft]]:
    """All the cores for each, beginning at another one, for the case that they are trimmed."""
    for turn, rank in enumerate(ranks):
        start = turn % len(cores)
        yield rank, Draft((*cores[start:], *cores[:start]), own=False)


@dataclass(frozen=True)
class _Same:
    """GPUs that have the same cores."""

    sites: Sequence[Site]
    cores: tuple[int, ...]
    cutter: Cutter

    @cached_property
    def order(self) -> Sequence[int]:
        """The ranks, in the order in which they take their parts of the cores."""
        by_gpu = [rank for site in self.sites for rank in site.ranks]
        return by_gpu if self.cutter.contiguous and self._gpus_suffice else sorted(by_gpu)

    @property
    def suffices(self) -> bool:
        """Whether every rank can have a core."""
        return len(self.order) <= len(self.cores)

    @property
    def even(self) -> int:
        """The largest size that every rank can have."""
        return self.cutter.even(self.cores, len(self.order))

    @cached_property
    def _gpu_parts(self) -> Sequence[tuple[int, ...]]:
        """The largest equal part of each GPU."""
        return self.cutter.in_blocks.cut(self.cores, len(self.sites), len(self.cores))

    @cached_property
    def _gpus_suffice(self) -> bool:
        """Whether every rank can have a core of its GPU's equal part.

        Five cores for the five ranks on four GPUs: the fifth core lies in no such part.
        """
        pairs = zip(self._gpu_parts, self.sites, strict=True)
        return all(len(part) >= len(site.ranks) for part, site in pairs)

    def sizes(self) -> list[int]:
        """The largest equal size of the shares; where cores are too few, for each GPU's ranks."""
        if self.suffices:
            return [self.even]
        pairs = zip(self._gpu_parts, self.sites, strict=True)
        return [self.cutter.even(part, len(site.ranks)) for part, site in pairs]

    def cut(self, size: int | None) -> Iterator[tuple[int, Draft]]:
        """Each rank's share, of this size; None: as large as it gets.

        Equal shares are cut rank by rank. Others are cut GPU by GPU, and then again for the
        ranks on each; unless only rank by rank there is enough.
        """
        if self.suffices and not (size is None and self._gpus_suffice):
            yield from self.cut_by_rank(size)
            return
        whole = None if size is None else len(self.cores)
        left_out: list[int] = []
        parts = self.cutter.cut(self.cores, len(self.sites), whole)
        for site, part in zip(self.sites, parts, strict=True):
            if part:
                yield from self._cut(part, site.ranks, size)
            else:
                left_out += site.ranks
        yield from _shared(left_out, self.cores)

    def cut_by_rank(self, size: int | None) -> Iterator[tuple[int, Draft]]:
        """The same, whoever is on one GPU."""
        return self._cut(self.cores, self.order, size)

    def _cut(
        self, cores: tuple[int, ...], ranks: Sequence[int], size: int | None
    ) -> Iterator[tuple[int, Draft]]:
        left_out: list[int] = []
        parts = self.cutter.cut(cores, len(ranks), size)
        for rank, part in zip(ranks, parts, strict=True):
            if part:
                yield rank, Draft(part)
            else:
                left_out.append(rank)
        yield from _shared(left_out, cores)


class _Dealt:
    """GPUs that have the same socket: each node's cores, and what is dealt to them."""

    def __init__(self, socket: Sequence[int], nodes: Sequence[_Same], least: int) -> None:
        self._nodes = nodes
        self._least = least  # the smallest equal part of any node of any socket
        takers = [core for node in nodes for core in node.cores]
        self._rounds, self._spare = deal(socket, takers)
        self._each = 1 + len(self._rounds[takers[0]])  # cores that come with a node core, and it

    def sizes(self) -> list[int]:
        """The largest equal size in each node; the sizes of the shares where cores are spare."""
        if self._spare:
            return [len(draft.cores) for draft in self._fair.values()]
        return [self._each * node.even for node in self._nodes]

    def cut(self, size: int | None) -> Iterable[tuple[int, Draft]]:
        """Each rank's share, of this size at least; None: as large as it gets.

        Node cores are cut as by node. Where that comes to less than the size, as other sockets
        have more dealt, there are more of them.
        """
        if self._spare:
            return self._fair.items()
        if size is None:
            return self._bringing(_Same.cut, None)
        return self._bringing(_Same.cut, max(self._least, -(-size // self._each)))

    @cached_property
    def _fair(self) -> Mapping[int, Draft]:
        """Every core is in a share, and what no full round brings goes to the smallest shares.

        What a rank has already nobody else wants: it keeps that, and it counts.
        """
        cutter = self._nodes[0].cutter
        by_gpu = sorted((site for node in self._nodes for site in node.sites), key=_first_rank)
        found = dict(self._bringing(_Same.cut_by_rank, None))
        drafts = {rank: found[rank] for site in by_gpu for rank in site.ranks}
        have = [frozenset(draft.cores) for draft in drafts.values()]
        slow = frozenset(core for core in self._spare if core >= cutter.cores.slow_from)
        for kind in filter(None, (slow.symmetric_difference(self._spare), slow)):
            wanted = [cores | kind for cores in have]
            have = list(map(frozenset, fair_shares(wanted, contiguous=cutter.contiguous)))
        return {
            rank: replace(draft, cores=(*draft.cores, *sorted(cores.difference(draft.cores))))
            for (rank, draft), cores in zip(drafts.items(), have, strict=True)
        }

    def _bringing(self, cut: _Cut, size: int | None) -> Iterator[tuple[int, Draft]]:
        """Cut the nodes; each share has with it what is dealt to a block of its size.

        Its node cores are another list than that block where they are whole L3 domains.
        """
        for node in self._nodes:
            in_blocks = cut(replace(node, cutter=node.cutter.in_blocks), size)
            for (rank, own), (_, block) in zip(cut(node, size), in_blocks, strict=True):
                more = with_dealt(block.cores, self._rounds)[len(block.cores) :]
                yield rank, Draft((*own.cores, *more))


class _Mixed:
    """GPUs whose cores overlap without being the same."""

    def __init__(self, sites: Sequence[Site], cutter: Cutter) -> None:
        self._cutter = cutter
        self._wanted = {rank: site.cores for site in sites for rank in site.ranks}
        self._shares = self._share(cutter)

    def sizes(self) -> list[int]:
        """The sizes of the shares."""
        return [self._cutter.cores.count(share) for share in self._shares]

    def cut(self, size: int | None) -> Iterator[tuple[int, Draft]]:
        """Each rank's share; first the cores that it keeps when it is trimmed to this size."""
        for (rank, cores), share in zip(self._wanted.items(), self._shares, strict=True):
            if share:
                yield rank, Draft(self._cutter.dearest_first(share, size))
            else:
                yield from _shared([rank], cores)

    def _share(self, cutter: Cutter) -> list[tuple[int, ...]]:
        """Fast and slow cores apart if every rank can have a fast one (case G5)."""
        share = partial(fair_shares, contiguous=cutter.contiguous, domains=cutter.domains)
        wanted, slow_from = self._claims(cutter.cores), cutter.cores.slow_from
        if all(cores[-1] < slow_from for cores in self._wanted.values()):
            return share(wanted)
        slow = frozenset(core for cores in wanted for core in cores if core >= slow_from)
        fast_shares = share([cores - slow for cores in wanted])
        if not all(fast_shares):
            return share(wanted)
        slow_shares = share([cores & slow for cores in wanted])
        return [fast + rest for fast, rest in zip(fast_shares, slow_shares, strict=True)]

    def _claims(self, cores: Cores) -> list[frozenset[int]]:
        wanted = list(map(frozenset, self._wanted.values()))
        if cores.core_of is None:
            return wanted
        from gpuaff.allocator.cores import undivided

        return undivided(wanted, cores)


_Part = _Same | _Dealt | _Mixed


# The modes that cut nothing: ALL, SINGLE and SINGLE_UNIQUE (gpu-affinity rule 3).


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
