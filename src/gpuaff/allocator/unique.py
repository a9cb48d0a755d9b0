"""The unique modes: every core in at most one share.

GPUs whose near cores touch, directly or through others, form an *island*; islands do not
compete. An island is cut by one of three rules:

* all its GPUs have the same cores: gpu-affinity rule 2 (:class:`_Same`);
* by socket, and its nodes are clean parts of the socket: rule 4, which is rule 2 over each
  node's cores, and the socket's other cores dealt to them (:class:`_Same` too);
* anything else: max-min fair (:class:`_Mixed`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from operator import itemgetter

from gpuaff.allocator.cores import Cores
from gpuaff.allocator.deal import Dealt, deal, with_dealt
from gpuaff.allocator.fair import fair_shares
from gpuaff.allocator.modes import Scope
from gpuaff.allocator.partition import Cutter
from gpuaff.allocator.sites import Draft, Site, by_cores
from gpuaff.records import dataclass, replace


def cut_unique(
    sites: Sequence[Site], scope: Scope, cutter: Cutter, *, balanced: bool
) -> dict[int, Draft]:
    """Give every rank cores of its own.

    A rank for which none is left shares all cores near its GPU; it does not count when shares
    are balanced.
    """
    parts = [part for island in islands(sites) for part in _parts(island, scope, cutter)]
    drafts: dict[int, Draft] = {}
    for same_kind in (
        [part for part in parts if part.dealt is None],
        [part for part in parts if part.dealt is not None],
    ):
        size = _smallest(same_kind) if balanced else None
        for part in same_kind:
            drafts.update(part.cut(size))
    return _level(drafts, cutter.cores) if balanced else drafts


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


def _parts(island: list[Site], scope: Scope, cutter: Cutter) -> list[_Part]:
    if len({site.cores for site in island}) > 1:
        return [_Mixed(island, cutter)]
    if scope is Scope.SOCKET and (by_node := _clean_nodes(island, cutter)):
        dealt = deal(island[0].cores, [core for cores in by_node for core in cores])
        return [_same(members, cores, cutter, dealt) for cores, members in by_node.items()]
    return [_same(island, island[0].cores, cutter)]


def _clean_nodes(island: list[Site], cutter: Cutter) -> dict[tuple[int, ...], list[Site]]:
    """The sites of a socket by their nodes, if rule 4 can deal to these; else nothing.

    It can where nodes lie inside the socket and apart from each other, and each has a core
    for every rank.
    """
    nodes = by_cores(replace(site, cores=site.node_cores) for site in island)
    lying_in = [core for cores in nodes for core in cores]
    apart = len(set(lying_in)) == len(lying_in)
    inside = set(island[0].cores).issuperset(lying_in)
    if apart and inside and all(_same(own, cores, cutter).suffices for cores, own in nodes.items()):
        return nodes
    return {}


def _smallest(parts: Iterable[_Part]) -> int | None:
    """The largest size that all shares can have; None when there is no share at all."""
    return min((size for part in parts for size in part.sizes() if size), default=None)


def _level(drafts: dict[int, Draft], cores: Cores) -> dict[int, Draft]:
    """Trim all shares to the smallest."""
    size = min((cores.count(draft.cores) for draft in drafts.values() if draft.own), default=0)
    return {
        rank: replace(draft, cores=cores.divide(draft.cores, size)[0])
        if draft.own and cores.count(draft.cores) > size
        else draft
        for rank, draft in drafts.items()
    }


def _first_rank(site: Site) -> int:
    return site.ranks[0]


def _shared(ranks: Iterable[int], cores: Sequence[int]) -> Iterator[tuple[int, Draft]]:
    """All the cores for each, beginning at another one, for the case that they are trimmed."""
    for turn, rank in enumerate(ranks):
        start = turn % len(cores)
        yield rank, Draft((*cores[start:], *cores[:start]), own=False)


@dataclass(frozen=True)
class _Same:
    """GPUs that have the same cores. Ranks on one GPU cut its part of them again."""

    sites: Sequence[Site]
    cores: tuple[int, ...]
    cutter: Cutter
    dealt: Dealt | None = None

    @property
    def suffices(self) -> bool:
        """Whether every rank can have a core."""
        return bool(self.cores) and all(self.sizes())

    def sizes(self) -> list[int]:
        """The largest equal size of the shares, for each GPU's ranks."""
        ways, cutter = len(self.sites), self.cutter.in_blocks
        part = cutter.cut(self.cores, ways, cutter.even(self.cores, ways))[0]
        return [cutter.even(part, len(site.ranks)) for site in self.sites]

    def cut(self, size: int | None) -> Iterator[tuple[int, Draft]]:
        """Each rank's share, of this size; None: as large as it gets."""
        return self._cut_in_domains(size) if self.dealt and self.cutter.domains else self._cut(size)

    def _cut_in_domains(self, size: int | None) -> Iterator[tuple[int, Draft]]:
        """Node cores by L3 domain, and what the deal brings to as many node cores in a block.

        So the sizes are those of ``unique_contiguous``, also where the deal does not come out even.
        """
        in_blocks = replace(self, cutter=self.cutter.in_blocks).cut(size)
        in_domains = replace(self, dealt=None).cut(size)
        for (rank, block), (_, packed) in zip(in_blocks, in_domains, strict=True):
            yield rank, replace(block, cores=packed.cores + block.cores[len(packed.cores) :])

    def _cut(self, size: int | None) -> Iterator[tuple[int, Draft]]:
        most = max(len(site.ranks) for site in self.sites)
        parts = self.cutter.cut(self.cores, len(self.sites), None if size is None else size * most)
        left_out: list[int] = []
        for site, part in zip(self.sites, parts, strict=True):
            if part:
                yield from self._cut_again(site, part, size)
            else:
                left_out += site.ranks
        yield from _shared(left_out, self.cores)

    def _cut_again(
        self, site: Site, cores: tuple[int, ...], size: int | None
    ) -> Iterator[tuple[int, Draft]]:
        left_out: list[int] = []
        parts = self.cutter.cut(cores, len(site.ranks), size)
        for rank, part in zip(site.ranks, parts, strict=True):
            if part:
                yield rank, Draft(with_dealt(part, self.dealt) if self.dealt else part)
            else:
                left_out.append(rank)
        yield from _shared(left_out, cores)


class _Mixed:
    """GPUs whose cores overlap without being the same."""

    dealt = None

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
        from gpuaff.allocator.pieces import undivided

        return undivided(wanted, cores)


def _same(
    sites: Sequence[Site], cores: tuple[int, ...], cutter: Cutter, dealt: Dealt | None = None
) -> _Same:
    """Cut GPU by GPU and then rank by rank; rank by rank at once if only so there is enough.

    Five cores for the five ranks on four GPUs: the fifth core lies in no GPU's equal part.
    """
    whole = _Same(sites, cores, cutter, dealt)
    if whole.suffices:
        return whole
    seats = ((rank, site) for site in sites for rank in site.ranks)
    alone = [replace(site, ranks=(rank,)) for rank, site in sorted(seats, key=itemgetter(0))]
    by_rank = _Same(alone, cores, cutter, dealt)
    return by_rank if by_rank.suffices else whole


_Part = _Same | _Mixed
