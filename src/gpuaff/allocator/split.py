"""From near cores to the cores of each rank, in each mode.

Unique modes put every core in at most one share. GPUs whose near cores touch, directly or through
others, form an *island*; it is cut evenly (gpu-affinity rules 2 and 4) or, where cores overlap
without being the same, max-min fair. Balanced shares all have the largest size that the islands
allow; up to one rank per GPU, that which gpu_affinity's partition of the cores allows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from gpuaff.allocator.cores import (
    Cores,
    Cutter,
    by_l3,
    fair_shares,
    grow,
    in_blocks,
    in_turn,
    keep_whole,
)
from gpuaff.allocator.model import Mode, Scope
from gpuaff.allocator.placement import Assignment, Job, Placement
from gpuaff.errors import GPUAffinityError

Assignments = dict[int, Assignment]
"""The cores of each rank."""


def assign(job: Job) -> Assignments:
    """The cores of each rank, before they are trimmed to a maximum."""
    if job.options.mode in (Mode.ALL, Mode.SINGLE, Mode.SINGLE_UNIQUE):
        return _reserve_from_near(job) if job.options.reserve else _pick(job, job.placements)
    found = _cut_unique(job)
    return _reserve_from_shares(job, found) if job.options.reserve else found


class _Group(NamedTuple):
    """GPUs whose ranks have the same near cores."""

    cores: tuple[int, ...]  # their places, ascending
    by_gpu: tuple[tuple[int, ...], ...]  # the ranks on each, ascending; GPUs by their first rank

    @property
    def ranks(self) -> list[int]:
        """The ranks on all its GPUs."""
        return [*chain.from_iterable(self.by_gpu)]


def _group(
    placements: Iterable[Placement], cores: Callable[[Placement], tuple[int, ...]]
) -> list[_Group]:
    """Group the GPUs by some of their ranks' cores; groups by their first rank."""
    groups: dict[tuple[int, ...], dict[tuple[int, tuple[int, ...]], list[int]]] = {}
    for placed in placements:
        gpus = groups.setdefault(cores(placed), {})
        gpus.setdefault((placed.gpu, placed.cores), []).append(placed.rank)
    return [_Group(own, tuple(map(tuple, gpus.values()))) for own, gpus in groups.items()]


def _cut_unique(job: Job) -> Assignments:
    """Give every rank cores of its own; one for which none is left shares all near its GPU."""
    islands = _islands(job)
    if not job.options.balanced:
        return dict(chain.from_iterable(island.cut(None) for island in islands))
    size = min(filter(None, chain.from_iterable(island.sizes for island in islands)), default=0)
    return {
        rank: Assignment(job.cores.divide(found.cores, size)[0]) if found.own else found
        for island in islands
        for rank, found in island.cut(size)
    }


def _islands(job: Job) -> list[_Even | _Fair]:
    """Put the groups together whose cores overlap, directly or through others."""
    found: list[list[_Group]] = []
    for group in _group(job.placements, attrgetter("cores")):
        reach = set(group.cores)
        near = [island for island in found if any(not reach.isdisjoint(g.cores) for g in island)]
        found = [island for island in found if island not in near]
        found.append([*chain.from_iterable(near), group])
    fills = {Mode.UNIQUE_INTERLEAVED: in_turn, Mode.CORE_COMPLEX: by_l3(job.topology, job.cores)}
    cutter = Cutter(job.cores.slow_from, fills.get(job.options.mode, in_blocks))
    nodes = [_clean_nodes(job, groups) for groups in found]
    even = [cutter.even(node.cores, len(node.ranks)) for own in nodes for node in own]
    # With more ranks than GPUs there is no answer of gpu_affinity that must be kept.
    crowded = any(len(ranks) > 1 for groups in found for group in groups for ranks in group.by_gpu)
    return [
        _Fair(groups, cutter, job.cores)
        if len(groups) > 1
        else _Even(groups[0].cores, own or groups, cutter, min(even) if own else 0, crowded)
        for groups, own in zip(found, nodes, strict=True)
    ]


def _clean_nodes(job: Job, groups: Sequence[_Group]) -> list[_Group]:
    """The nodes of a socket, if rule 4 applies; else none.

    They must lie inside it, apart from each other, and each have a core for every rank.
    """
    if job.options.scope is not Scope.SOCKET or len(groups) > 1:
        return []
    here = [placed for placed in job.placements if placed.cores == groups[0].cores]
    nodes = _group(here, attrgetter("node_cores"))
    node_cores = [core for node in nodes for core in node.cores]
    apart = len(set(node_cores)) == len(node_cores)
    inside = set(groups[0].cores).issuperset(node_cores)
    enough = all(len(node.ranks) <= len(node.cores) for node in nodes)
    return nodes if apart and inside and enough else []


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
    """GPUs that have the same cores, cut node by node; by socket with what is distributed to them.

    ``least`` is the nodes' smallest equal part. ``crowded``: there are more ranks than GPUs.
    """

    def __init__(
        self,
        cores: Sequence[int],
        nodes: Sequence[_Group],
        cutter: Cutter,
        least: int,
        crowded: bool,
    ) -> None:
        self._cores, self._nodes, self._cutter, self._least = cores, nodes, cutter, least
        # The others are distributed round-robin (gpu-affinity rule 4); spare make no full round.
        takers = sorted(core for node in nodes for core in node.cores)
        others = sorted(set(cores).difference(takers))
        rounds = len(others) // len(takers)
        dealt, self._spare = others[: rounds * len(takers)], others[rounds * len(takers) :]
        self._brought = {core: dealt[at :: len(takers)] for at, core in enumerate(takers)}
        self._each = 1 + rounds  # a node core, and those it brings
        # By partition: the largest equal shares; where cores are spare, the unbalanced ones.
        largest = self.cut(None) if self._spare else self._cut(len(cores))
        self._sizes = [len(found.cores) if found.own else 0 for _, found in largest]
        self._equal = cutter.even(cores, sum(len(node.ranks) for node in nodes)) if crowded else 0
        self.sizes = self._sizes if self._equal <= min(self._sizes) else [self._equal]

    def cut(self, size: int | None) -> Iterator[tuple[int, Assignment]]:
        """Each rank's cores, at least of this size; None: as many as possible."""
        # Other sockets may have more cores to distribute: then more node cores make up the size.
        if size is not None and min(self._sizes) < size <= self._equal:
            parts = (_assign(node.cores, node.ranks, self._cutter, size) for node in self._nodes)
            return self._grown(chain.from_iterable(parts))
        if size is None or self._spare:
            return self._grown(self._cut(None))
        return self._cut(max(self._least, -(-size // self._each)))

    def _cut(self, size: int | None) -> Iterator[tuple[int, Assignment]]:
        """Cut each node; a share has with it what is distributed to a block of its size."""
        # Node cores come first, then what each round brought: trimming keeps node cores. They are
        # another list than the block where they are whole L3 domains.
        for node in self._nodes:
            own = self._cut_node(node, size, self._cutter)
            blocks = self._cut_node(node, size, self._cutter.in_blocks)
            for (rank, found), (_, block) in zip(own, blocks, strict=True):
                rounds = zip(*map(self._brought.__getitem__, block.cores), strict=True)
                more = chain.from_iterable(rounds)
                yield rank, found._replace(cores=(*found.cores, *more))

    def _cut_node(
        self, node: _Group, size: int | None, cutter: Cutter
    ) -> Iterator[tuple[int, Assignment]]:
        """Cut equal parts rank by rank; others GPU by GPU, if there is enough, then by rank."""
        ranks = node.ranks
        suffice = cutter.even(node.cores, len(node.by_gpu)) >= max(map(len, node.by_gpu))
        gpu_by_gpu = size is None and suffice and not self._spare
        if len(ranks) <= len(node.cores) and not gpu_by_gpu:
            ordered = sorted(ranks) if cutter.fill is in_turn or not suffice else ranks
            return _assign(node.cores, ordered, cutter, size)
        most = None if size is None else len(node.cores)
        parts = cutter.cut(node.cores, len(node.by_gpu), most)
        pairs = list(zip(node.by_gpu, parts, strict=True))
        without = chain.from_iterable(ranks for ranks, part in pairs if not part)
        assigned = (_assign(part, ranks, cutter, size) for ranks, part in pairs if part)
        return chain(chain.from_iterable(assigned), _shared(without, node.cores))

    def _grown(
        self, assigned: Iterable[tuple[int, Assignment]]
    ) -> Iterator[tuple[int, Assignment]]:
        """The cores that are in no share yet go to the smallest shares."""
        found = dict(assigned)
        ranks = [*chain(*sorted(chain(*(node.by_gpu for node in self._nodes))))]
        shares: Sequence[frozenset[int]] = [frozenset(found[rank].cores) for rank in ranks]
        spare = frozenset(self._cores).difference(*shares)
        slow = frozenset(core for core in spare if core >= self._cutter.slow_from)
        for kind in (spare - slow, slow):
            shares = grow(shares, [kind] * len(ranks), self._cutter.in_blocks.fill)
        for rank, share in zip(ranks, shares, strict=True):
            own = found[rank].cores
            yield rank, found[rank]._replace(cores=(*own, *sorted(share.difference(own))))


class _Fair:
    """GPUs whose cores overlap without being the same."""

    def __init__(self, groups: Iterable[_Group], cutter: Cutter, cores: Cores) -> None:
        gpus = sorted((ranks, group.cores) for group in groups for ranks in group.by_gpu)
        self._near = {rank: near for ranks, near in gpus for rank in ranks}
        self._cutter = cutter
        wanted = keep_whole([*map(frozenset, self._near.values())], cores)
        fast = frozenset(range(cutter.slow_from))
        # Fast and slow cores apart if every rank can have a fast one (case G5).
        shares = fair_shares([near & fast for near in wanted], cutter.fill)
        if all(shares):
            slow = fair_shares([near - fast for near in wanted], cutter.fill)
            self._shares = [own + more for own, more in zip(shares, slow, strict=True)]
        else:
            self._shares = fair_shares(wanted, cutter.fill)
        self.sizes = [cores.count(share) for share in self._shares]

    def cut(self, size: int | None) -> Iterator[tuple[int, Assignment]]:
        """Each rank's cores; first those that it keeps when it is trimmed to this size."""
        for (rank, near), share in zip(self._near.items(), self._shares, strict=True):
            if share:
                yield rank, Assignment(self._cutter.in_trimming_order(share, size))
            else:
                yield from _shared([rank], near)


# The modes that cut nothing: ALL, SINGLE and SINGLE_UNIQUE (gpu-affinity rule 3).


def _pick(job: Job, placements: Sequence[Placement]) -> Assignments:
    if job.options.mode is not Mode.ALL:
        return _pick_single(job, placements)
    order = _nodes_first(job)
    return {placed.rank: Assignment(order(placed.cores)) for placed in placements}


def _pick_single(job: Job, placements: Sequence[Placement]) -> Assignments:
    """Every rank gets the first core near its GPU; unique: the first one not yet taken.

    Ranks that find none share, each from another core on. Cores without taken pieces come first.
    """
    anyones, core_of = _node_cores(job), job.cores.core_of
    taken: set[int] = set()
    turns: Counter[tuple[int, ...]] = Counter()
    found: Assignments = {}
    for placed in placements:
        order = _nearest_first(placed, anyones)
        touched = {core_of[place] for place in taken}
        whole = (place for place in order if core_of[place] not in touched)
        free = next(chain(whole, (place for place in order if place not in taken)), None)
        first = order[turns[placed.cores] % len(order)] if free is None else free
        turns[placed.cores] += free is None
        same = [place for place in placed.cores if core_of[place] == core_of[first]]
        cores = tuple(place for place in same if free is None or place not in taken)
        found[placed.rank] = Assignment(cores, own=free is not None)
        taken.update(cores if job.options.mode is Mode.SINGLE_UNIQUE else ())
    return found


def _nearest_first(placed: Placement, anyones: frozenset[int]) -> list[int]:
    """A GPU's cores: of its own node, then of no GPU's node, then of the others'."""
    own = frozenset(placed.node_cores)
    return sorted(placed.cores, key=lambda core: 0 if core in own else 1 + (core in anyones))


def _nodes_first(job: Job) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
    """What puts those of some cores first that are near to some GPU by node."""
    anyones = _node_cores(job)
    return cache(lambda cores: tuple(sorted(cores, key=lambda core: core not in anyones)))


def _node_cores(job: Job) -> frozenset[int]:
    return frozenset().union(*{placed.node_cores for placed in job.placements})


# Cores that stay out of every share, for helper processes (case B10). Too few are an error, also
# where pinning is best effort: helpers that were counted on must have their cores.


def _reserve_from_shares(job: Job, assignments: Assignments) -> Assignments:
    """Reserve the last cores of each rank's own part: those that it misses least."""
    for placed in job.placements:
        found = job.own_cores(assignments[placed.rank])
        if found <= job.options.reserve:
            raise _none_left(job, placed, found)
    return {rank: _without_last(job, found.cores) for rank, found in assignments.items()}


def _reserve_from_near(job: Job) -> Assignments:
    """Reserve the last cores of each distinct near list, and let ranks pick from the rest."""
    order = _nodes_first(job)
    lists = {placed.cores for placed in job.placements}
    reserved = {near: _without_last(job, order(near)).reserved for near in lists}
    taken = frozenset(chain.from_iterable(reserved.values()))
    rest = [
        placed._replace(cores=tuple(place for place in placed.cores if place not in taken))
        for placed in job.placements
    ]
    found = _pick(job, [placed for placed in rest if placed.cores])
    for placed in job.placements:
        if placed.rank not in found or not found[placed.rank].own:
            raise _none_left(job, placed, 0)
        found[placed.rank] = found[placed.rank]._replace(reserved=reserved[placed.cores])
    return found


def _without_last(job: Job, places: Sequence[int]) -> Assignment:
    kept = max(job.cores.count(places) - job.options.reserve, 0)
    cores, last = job.cores.divide(places, kept)
    return Assignment(cores, reserved=last)


def _none_left(job: Job, placed: Placement, found: int) -> GPUAffinityError:
    return GPUAffinityError(
        f"requested reserve={job.options.reserve}, but rank {placed.name} on GPU {placed.gpu} "
        f"would have no core left ({found} of the {job.cores.count(placed.cores)} cores near its "
        "GPU); reserve fewer, start fewer processes or allow more CPUs"
    )
