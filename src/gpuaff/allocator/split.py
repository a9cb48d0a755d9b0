"""From groups of GPUs to the cores of each rank, in each mode.

Unique modes put every core in at most one share. GPUs whose near cores touch, directly or
through others, form an *island*; islands do not compete. An island is cut evenly (gpu-affinity
rules 2 and 4, :class:`_Even`) or, where its GPUs' cores overlap without being the same, max-min
fair (:class:`_Fair`). Balanced shares are of the largest size that all ranks of all islands can
have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from operator import attrgetter

from gpuaff.allocator.cores import Cores, keep_whole
from gpuaff.allocator.cutting import Cutter, fair_shares, grow
from gpuaff.allocator.model import Scope
from gpuaff.allocator.placement import Assignment, GpuGroup, Placement, group_gpus
from gpuaff.errors import GPUAffinityError

Assignments = dict[int, Assignment]
"""The cores of each rank."""


def distribute(
    socket: Iterable[int], node_cores: Iterable[int]
) -> tuple[Mapping[int, tuple[int, ...]], tuple[int, ...]]:
    """Distribute a socket's other cores, ascending and round-robin, to its node cores, ascending.

    This is gpu-affinity rule 4: the partition is made over node cores, and each of them brings
    along the cores that were distributed to it.

    Returns:
        What full rounds bring each node core, and the cores that make no full round: these belong
        to no node core, or the lowest would have them all.
    """
    takers = sorted(node_cores)
    others = sorted(set(socket).difference(takers))
    full = len(others) - len(others) % len(takers)
    rounds = {taker: tuple(others[turn : full : len(takers)]) for turn, taker in enumerate(takers)}
    return rounds, tuple(others[full:])


def cut_unique(
    placements: Sequence[Placement], scope: Scope, cutter: Cutter, cores: Cores, *, balanced: bool
) -> Assignments:
    """Give every rank cores of its own.

    A rank for which none is left shares all cores near its GPU; it does not count when shares
    are balanced.
    """
    parts = _islands(placements, scope, cutter, cores)
    if not balanced:
        return dict(chain.from_iterable(part.cut(None) for part in parts))
    size = min(filter(None, chain.from_iterable(part.sizes() for part in parts)), default=0)
    return {
        rank: Assignment(cores.divide(found.cores, size)[0]) if found.own else found
        for part in parts
        for rank, found in part.cut(size)
    }


def _islands(
    placements: Sequence[Placement], scope: Scope, cutter: Cutter, cores: Cores
) -> list[_Even | _Fair]:
    found = islands(group_gpus(placements, attrgetter("cores")))
    nodes = [_clean_nodes(groups, placements) if scope is Scope.SOCKET else () for groups in found]
    node_sizes = [cutter.even(node.cores, _count(node)) for own in nodes for node in own]
    least = min(node_sizes, default=0)
    gpus = [ranks for groups in found for group in groups for ranks in group.ranks]
    crowded = len(gpus) < len(placements)
    return [
        _Fair(groups, cutter, cores)
        if len(groups) > 1
        else _Even(
            groups[0].cores, own or groups, cutter, least=least if own else 0, crowded=crowded
        )
        for groups, own in zip(found, nodes, strict=True)
    ]


def islands(groups: Iterable[GpuGroup]) -> list[list[GpuGroup]]:
    """Put the groups together whose cores overlap, directly or through others."""
    found: list[tuple[set[int], list[GpuGroup]]] = []
    for group in groups:
        touching = [island for island in found if not island[0].isdisjoint(group.cores)]
        found = [island for island in found if island[0].isdisjoint(group.cores)]
        reach = set(group.cores).union(*(island[0] for island in touching))
        found.append((reach, [*chain.from_iterable(island[1] for island in touching), group]))
    return [members for _, members in found]


def _clean_nodes(groups: Sequence[GpuGroup], placements: Iterable[Placement]) -> list[GpuGroup]:
    """The nodes of a socket, if rule 4 applies; else none.

    It does where all GPUs have the whole socket, nodes lie inside it and apart from each other,
    and each has a core for every rank.
    """
    ranks = set(chain.from_iterable(groups[0].ranks))
    here = (placed for placed in placements if placed.rank in ranks)
    nodes = group_gpus(here, attrgetter("node_cores"))
    node_cores = [core for node in nodes for core in node.cores]
    apart = len(set(node_cores)) == len(node_cores)
    inside = set(groups[0].cores).issuperset(node_cores)
    clean = len(groups) == 1 and apart and inside
    return nodes if clean and all(_count(node) <= len(node.cores) for node in nodes) else []


def _count(group: GpuGroup) -> int:
    """The number of its ranks."""
    return sum(map(len, group.ranks))


def _assign(
    places: Sequence[int], ranks: Sequence[int], cutter: Cutter, size: int | None
) -> Iterator[tuple[int, Assignment]]:
    """Cut places among ranks; those for which none is left share all of them."""
    parts = list(zip(ranks, cutter.cut(places, len(ranks), size), strict=True))
    yield from ((rank, Assignment(part)) for rank, part in parts if part)
    yield from _shared([rank for rank, part in parts if not part], places)


def _shared(ranks: Iterable[int], places: Sequence[int]) -> Iterator[tuple[int, Assignment]]:
    """All the places for each, beginning at another one, for the case that they are trimmed."""
    for turn, rank in enumerate(ranks):
        start = turn % len(places)
        yield rank, Assignment((*places[start:], *places[:start]), own=False)


class _Even:
    """GPUs that have the same cores, cut node by node.

    Args:
        cores: their cores.
        nodes: the groups whose cores are cut; by socket scope the GPUs of each node, and the
            other cores are distributed to theirs.
        cutter: how they are cut.
        least: the smallest equal part of any node of any socket.
        crowded: whether there are more ranks than GPUs.
    """

    def __init__(
        self,
        cores: Sequence[int],
        nodes: Sequence[GpuGroup],
        cutter: Cutter,
        *,
        least: int,
        crowded: bool,
    ) -> None:
        self._cores = cores
        self._nodes = nodes
        self._cutter = cutter
        self._least = least
        # With more ranks than GPUs there is no answer of gpu_affinity that must be kept.
        self._equal = cutter.even(cores, sum(map(_count, nodes))) if crowded else 0
        node_cores = [core for node in nodes for core in node.cores]
        self._rounds, self._spare = distribute(cores, node_cores)
        self._each = 1 + len(self._rounds[node_cores[0]])  # a node core, and those it brings

    def sizes(self) -> list[int]:
        """The sizes in the partition, or the largest equal size where that is larger."""
        sizes = self._partition_sizes()
        return sizes if self._equal <= min(sizes) else [self._equal]

    def _partition_sizes(self) -> list[int]:
        """The largest equal size in each node; the sizes of the shares where cores are spare."""
        if self._spare:
            return [len(found.cores) for _, found in self.cut(None)]
        return [self._each * size for node in self._nodes for size in self._node_sizes(node)]

    def _node_sizes(self, node: GpuGroup) -> list[int]:
        """The largest equal size of the parts; where cores are too few, for each GPU's ranks."""
        cutter, count = self._cutter.in_blocks, _count(node)
        if count <= len(node.cores):
            return [cutter.even(node.cores, count)]
        parts = cutter.cut(node.cores, len(node.ranks), len(node.cores))
        return [cutter.even(part, len(own)) for part, own in zip(parts, node.ranks, strict=True)]

    def cut(self, size: int | None) -> Iterable[tuple[int, Assignment]]:
        """Each rank's cores, at least of this size; None: as many as possible.

        Node cores are cut as by node. Where that comes to less than the size, as other sockets
        have more cores to distribute, there are more of them.
        """
        if size is not None and min(self._partition_sizes()) < size <= self._equal:
            return self._cut_equal(size)
        if self._spare:
            return self._grown(dict(self._cut(None, by_rank=True)))
        return self._cut(None if size is None else max(self._least, -(-size // self._each)))

    def _cut(self, size: int | None, *, by_rank: bool = False) -> Iterator[tuple[int, Assignment]]:
        """Cut each node; a share has with it what is distributed to a block of its size.

        Its node cores are another list than that block where they are whole L3 domains. First
        come the node cores, then all that a first round brought, …: trimming keeps node cores.
        """
        for node in self._nodes:
            own = self._cut_node(node, size, self._cutter, by_rank=by_rank)
            if self._each == 1:
                yield from own
                continue
            blocks = self._cut_node(node, size, self._cutter.in_blocks, by_rank=by_rank)
            for (rank, found), (_, block) in zip(own, blocks, strict=True):
                rounds = zip(*map(self._rounds.__getitem__, block.cores), strict=True)
                yield rank, Assignment((*found.cores, *chain.from_iterable(rounds)))

    def _cut_node(
        self, node: GpuGroup, size: int | None, cutter: Cutter, *, by_rank: bool
    ) -> Iterator[tuple[int, Assignment]]:
        """Equal parts are cut rank by rank.

        Others are cut GPU by GPU, and then again for the ranks on each; unless only rank by rank
        there is enough: five cores for the five ranks on four GPUs, of which one has two.
        """
        suffice = cutter.even(node.cores, len(node.ranks)) >= max(map(len, node.ranks))
        enough = _count(node) <= len(node.cores)
        if by_rank or (enough and not (size is None and suffice)):
            by_gpu = [*chain(*node.ranks)]
            ordered = by_gpu if cutter.contiguous and suffice else sorted(by_gpu)
            yield from _assign(node.cores, ordered, cutter, size)
            return
        parts = cutter.cut(node.cores, len(node.ranks), None if size is None else len(node.cores))
        gpus = list(zip(node.ranks, parts, strict=True))
        for ranks, part in gpus:
            if part:
                yield from _assign(part, ranks, cutter, size)
        yield from _shared(chain(*(ranks for ranks, part in gpus if not part)), node.cores)

    def _cut_equal(self, size: int) -> Iterable[tuple[int, Assignment]]:
        """At least this size for each: equal parts of its node, and more of what is left."""
        found: dict[int, Assignment] = {}
        for node in self._nodes:
            ranks = [*chain(*node.ranks)]
            parts = self._cutter.cut(node.cores, len(ranks), size)
            found.update(zip(ranks, map(Assignment, parts), strict=True))
        return self._grown(found)

    def _grown(self, found: Mapping[int, Assignment]) -> Iterable[tuple[int, Assignment]]:
        """The cores that are in no share yet go to the smallest shares.

        What a rank has already no other rank wants: it keeps that, and it counts.
        """
        ranks = [*chain(*sorted(chain(*(node.ranks for node in self._nodes))))]
        shares: Sequence[frozenset[int]] = [frozenset(found[rank].cores) for rank in ranks]
        spare = frozenset(self._cores).difference(*shares)
        slow = frozenset(core for core in spare if core >= self._cutter.slow_from)
        for kind in (spare - slow, slow):
            shares = grow(shares, [kind] * len(ranks), self._cutter.in_blocks.fill)
        for rank, share in zip(ranks, shares, strict=True):
            more = share.difference(found[rank].cores)
            yield rank, Assignment((*found[rank].cores, *sorted(more)))


class _Fair:
    """GPUs whose cores overlap without being the same."""

    def __init__(self, groups: Iterable[GpuGroup], cutter: Cutter, cores: Cores) -> None:
        gpus = sorted((ranks, group.cores) for group in groups for ranks in group.ranks)
        self._near = {rank: near for ranks, near in gpus for rank in ranks}
        self._cutter = cutter
        self._cores = cores
        self._shares = self._share()

    def sizes(self) -> list[int]:
        """The sizes of the shares."""
        return [self._cores.count(share) for share in self._shares]

    def cut(self, size: int | None) -> Iterator[tuple[int, Assignment]]:
        """Each rank's cores; first those that it keeps when it is trimmed to this size."""
        for (rank, near), share in zip(self._near.items(), self._shares, strict=True):
            if share:
                yield rank, Assignment(self._cutter.in_trimming_order(share, size))
            else:
                yield from _shared([rank], near)

    def _share(self) -> list[tuple[int, ...]]:
        """Fast and slow cores apart if every rank can have a fast one (case G5)."""
        wanted = list(map(frozenset, self._near.values()))
        if self._cores.core_of is not None:
            wanted = keep_whole(wanted, self._cores)
        fast = frozenset(range(self._cutter.slow_from))
        shares = fair_shares([near & fast for near in wanted], self._cutter.fill)
        if not all(shares):
            return fair_shares(wanted, self._cutter.fill)
        slow = fair_shares([near - fast for near in wanted], self._cutter.fill)
        return [own + more for own, more in zip(shares, slow, strict=True)]


# The modes that cut nothing: ALL, SINGLE and SINGLE_UNIQUE (gpu-affinity rule 3).


def pick_all(placements: Sequence[Placement]) -> Assignments:
    """Every rank gets all near cores; those near to some GPU by node first."""
    node_cores = node_cores_of(placements)
    lists = {placed.cores: placed.cores for placed in placements}
    found = {own: Assignment(nodes_first(own, node_cores)) for own in lists}
    return {placed.rank: found[placed.cores] for placed in placements}


def pick_single(placements: Sequence[Placement], cores: Cores, *, unique: bool) -> Assignments:
    """Every rank gets the first core near its GPU; unique: the first one not yet taken.

    A rank that finds none shares one. Ranks that share begin at another core each, as in the
    other unique modes.
    """
    node_cores = node_cores_of(placements)
    taken: set[int] = set()
    turns: Counter[tuple[int, ...]] = Counter()
    found: Assignments = {}
    for placed in placements:
        order = partial(_nearest_first, placed, node_cores)
        free = _first_free(order, taken, cores)
        if free is None:
            turn = turns[placed.cores] % len(placed.cores)
            turns[placed.cores] += 1
            free = next(islice(order(), turn, None))
            found[placed.rank] = Assignment(_whole(free, placed.cores, cores), own=False)
        else:
            own = tuple(p for p in _whole(free, placed.cores, cores) if p not in taken)
            found[placed.rank] = Assignment(own)
            taken.update(own if unique else ())
    return found


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


def _nearest_first(placed: Placement, node_cores: frozenset[int]) -> Iterator[int]:
    """A GPU's cores: of its own node, then of no GPU's node, then of the others'."""
    inside, own = frozenset(placed.cores), frozenset(placed.node_cores)
    yield from (core for core in placed.node_cores if core in inside)
    yield from (core for core in placed.cores if core not in node_cores)
    yield from (core for core in placed.cores if core in node_cores and core not in own)


def nodes_first(cores: tuple[int, ...], node_cores: frozenset[int]) -> tuple[int, ...]:
    """The same cores, those near to some GPU by node first."""
    return tuple(sorted(cores, key=lambda core: core not in node_cores))


def node_cores_of(placements: Iterable[Placement]) -> frozenset[int]:
    """The cores that are near to some GPU by NUMA node."""
    return frozenset().union(*{placed.node_cores for placed in placements})


# Cores that stay out of every share, for helper processes (case B10).


# An error, also where pinning is best effort: helpers that were counted on must have their cores.
def reserve_from_shares(
    placements: Sequence[Placement],
    assignments: Mapping[int, Assignment],
    count: int,
    cores: Cores,
) -> Assignments:
    """Reserve the last cores of each rank's own part: those that it misses least.

    Raises:
        GPUAffinityError: a rank has no core of its own besides these.
    """
    for placed in placements:
        assigned = assignments[placed.rank]
        found = cores.count(assigned.cores) if assigned.own else 0
        if found <= count:
            near = cores.count(placed.cores)
            raise _none_left(placed, count, f"{found} of the {near} cores near its GPU")
    return {rank: _without_last(found, count, cores) for rank, found in assignments.items()}


def reserve_from_near(
    placements: Sequence[Placement],
    pick: Callable[[Sequence[Placement]], Assignments],
    count: int,
    cores: Cores,
) -> Assignments:
    """Reserve the last cores of each distinct near list, and let ranks pick from the rest.

    Raises:
        GPUAffinityError: a rank finds no core among the rest, or none of its own where each is to
            have one.
    """
    node_cores = node_cores_of(placements)
    lists = {
        placed.cores: Assignment(nodes_first(placed.cores, node_cores)) for placed in placements
    }
    cut = {near: _without_last(found, count, cores) for near, found in lists.items()}
    taken = frozenset(place for found in cut.values() for place in found.reserved)
    left = {near: tuple(place for place in near if place not in taken) for near in lists}
    found = {}
    if all(left.values()):
        found = pick([placed._replace(cores=left[placed.cores]) for placed in placements])
    for placed in placements:
        if not left[placed.cores] or (found and not found[placed.rank].own):
            part = f"none of the {cores.count(placed.cores)} cores near its GPU"
            raise _none_left(placed, count, part)
    reserved = {placed.rank: cut[placed.cores].reserved for placed in placements}
    return {rank: own._replace(reserved=reserved[rank]) for rank, own in found.items()}


def _without_last(assigned: Assignment, count: int, cores: Cores) -> Assignment:
    kept, last = cores.divide(assigned.cores, max(cores.count(assigned.cores) - count, 0))
    return assigned._replace(cores=kept, reserved=last)


def _none_left(placed: Placement, count: int, part: str) -> GPUAffinityError:
    return GPUAffinityError(
        f"requested reserve={count}, but rank {placed.name} on GPU {placed.gpu} would have "
        f"no core left ({part}); reserve fewer, start fewer processes or allow more CPUs"
    )
