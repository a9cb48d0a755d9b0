"""The allowed physical cores in their order, and cutting them: blocks, turns, L3, max-min fair."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from math import gcd
from typing import NamedTuple

from gpuaff.cpuset import CpuSet
from gpuaff.topology.model import Topology


class Cores:
    """The cores of which a process may use at least one CPU; a *place* is a position here.

    They are ordered by the lowest CPU id of the whole core, allowed or not (gpu-affinity rule 1),
    fast cores before slow ones (case G5). :func:`split_siblings` gives a core several places.
    """

    def __init__(self, cpus: Sequence[CpuSet], slow_from: int, core_of: Sequence[int]) -> None:
        self.cpus = cpus  # the allowed CPUs of each core, or piece of one, by its place
        self.slow_from = slow_from  # the first slow core's place; the number of places without one
        self.core_of = core_of  # the number of the core that is (partly) at each place
        self._place_of = {cpu: place for place, core in enumerate(cpus) for cpu in core}

    def places(self, cpus: CpuSet) -> tuple[int, ...]:
        """The places, ascending, of the cores that hold any of these allowed CPUs."""
        return tuple(sorted(set(map(self._place_of.__getitem__, cpus))))

    def places_within(self, cpus: CpuSet, allowed: CpuSet) -> tuple[int, ...]:
        """The same for a process that may use only these allowed CPUs, which hold the others."""
        cores = set(map(self.core_of.__getitem__, self.places(cpus)))
        pieces = (place for place, core in enumerate(self.core_of) if core in cores)
        return tuple(place for place in pieces if self.cpus[place] <= allowed)

    def count(self, places: Iterable[int]) -> int:
        """How many cores these places are (parts) of; what is max-min fair counts places."""
        return len(set(map(self.core_of.__getitem__, places)))

    def divide(self, places: Sequence[int], count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The places of the first ``count`` cores, and the others."""
        first = {*[*dict.fromkeys(map(self.core_of.__getitem__, places))][:count]}
        return (
            tuple(place for place in places if self.core_of[place] in first),
            tuple(place for place in places if self.core_of[place] not in first),
        )


def allowed_cores(topology: Topology, allowed: CpuSet) -> Cores:
    """The cores of a machine that hold any of these CPUs; a CPU in no known core is its own."""
    known = [core for core in topology.cores or () if core]
    known += [frozenset((cpu,)) for cpu in allowed.difference(*known)]
    cpus = [core for core in map(allowed.__and__, sorted(known, key=min)) if core]
    fast = [core for core in cpus if core.isdisjoint(topology.efficiency_cpus)]
    slow = [core for core in cpus if not core.isdisjoint(topology.efficiency_cpus)]
    return Cores([*fast, *slow], len(fast), range(len(cpus)))


def split_siblings(cores: Cores, masks: Iterable[tuple[CpuSet, CpuSet]]) -> Cores:
    """Give a place to every *piece* of a core: those of its CPUs that the same ranks may have.

    One rank may have CPU 0 and another its sibling 64; masks of whole cores split nothing.
    ``masks`` has for each rank the CPUs that it may use and those of them that it wants; the
    siblings of a wanted CPU are wanted too.
    """
    each = [(allowed, cores.places(allowed), cores.places(near)) for allowed, near in set(masks)]
    torn = {at for mask, places, _ in each for at in places if not cores.cpus[at] <= mask}
    claims = [(mask, torn.intersection(wanted)) for mask, _, wanted in each]
    found: list[tuple[int, CpuSet]] = []
    for place, core in enumerate(cores.cpus):
        pieces = [core]
        for mask in (mask for mask, wanted in claims if place in wanted):
            pieces = [half for piece in pieces for half in (piece & mask, piece - mask) if half]
        found += [(place, piece) for piece in sorted(pieces, key=min)]
    fast = sum(1 for place, _ in found if place < cores.slow_from)
    return Cores([cpus for _, cpus in found], fast, [place for place, _ in found])


def keep_whole(wanted: Sequence[frozenset[int]], cores: Cores) -> list[frozenset[int]]:
    """Keep ranks that could each have a whole core from having a piece of it each.

    Of such a core they compete for one piece, the one that the fewest others may have, and leave
    its other pieces to those others, who may not have all of it.
    """
    pieces_of: dict[int, set[int]] = {}
    for place in frozenset().union(*wanted):
        pieces_of.setdefault(cores.core_of[place], set()).add(place)
    lost: list[set[int]] = [set() for _ in wanted]
    for pieces in pieces_of.values():
        whole = [at for at, may in enumerate(wanted) if len(pieces) > 1 and may >= pieces]
        if len(whole) > 1:
            kept = min(pieces, key=lambda piece: (sum(piece in may for may in wanted), piece))
            for rank in whole:
                lost[rank] |= pieces - {kept}
    return [places - gone for places, gone in zip(wanted, lost, strict=True)]


def workers_parts(cores: Sequence[CpuSet], workers: int) -> tuple[CpuSet, ...]:
    """Cut cores (at least one) into blocks for workers; of several the first stays out.

    That is the main process's, which all workers wait for, and a fast one on hybrid processors
    (case G5). Where there are more workers than cores, groups of them share groups of cores, all
    alike: a DataLoader takes its batches in turn, so it is as slow as its slowest worker.
    """
    rest = cores[1:] or cores
    groups = workers if workers <= len(rest) else gcd(workers, len(rest))
    edges = [len(rest) * block // groups for block in range(groups + 1)]
    blocks = [frozenset().union(*rest[start:end]) for start, end in pairwise(edges)]
    return tuple(blocks[worker * groups // workers] for worker in range(workers))


# ---- cutting -------------------------------------------------------------------------------------

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
    places, or else the one with most. A domain counts as far as its places are in the list;
    ``l3_of`` has the number of each place's.
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
        while lacking := size - len(part):
            enough = (domain for domain in free if len(domain) >= lacking)
            domain = next(enough, max(free, key=len))
            part += domain[:lacking]
            del domain[:lacking]
    return list(map(tuple, parts))


def by_l3(topology: Topology, cores: Cores) -> Fill:
    """:func:`in_l3_domains` of a machine; :func:`in_blocks` where its domains are unknown."""
    if not topology.l3:
        return in_blocks
    domain_of = {cpu: number for number, cpus in enumerate(topology.l3) for cpu in cpus}
    lone = len(topology.l3)
    pairs = zip(cores.core_of, map(min, cores.cpus), strict=True)
    l3_of = [domain_of.get(cpu, lone + core) for core, cpu in pairs]  # in none: one of its own
    return partial(in_l3_domains, l3_of=l3_of)


class Cutter(NamedTuple):
    """How lists of places are cut in one plan."""

    slow_from: int  # the place of the first slow core
    fill: Fill

    @property
    def in_blocks(self) -> Cutter:
        """The same without L3 domains: parts have the same sizes."""
        return self if self.fill is in_turn else self._replace(fill=in_blocks)

    def kinds(self, places: Sequence[int], parts: int) -> list[tuple[int, ...]]:
        """The lists that are cut on their own: fast and slow cores, if each part can have both."""
        fast = bisect_left(places, self.slow_from)
        if parts <= fast < len(places):
            return [tuple(places[:fast]), tuple(places[fast:])]
        return [tuple(places)]

    def even(self, places: Sequence[int], parts: int) -> int:
        """The largest size that all parts can have."""
        return sum(len(kind) // parts for kind in self.kinds(places, parts))

    def cut(self, places: Sequence[int], parts: int, size: int | None) -> list[tuple[int, ...]]:
        """Cut places, ascending, into parts, each with its fast cores first.

        ``size`` is that of every part, or less where there is not enough. None: every place is in
        a part, and the first parts get the odd ones.
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
        """Places, ascending, but first the ``size`` that are kept: fast cores, whole L3 domains."""
        left = len(places) if size is None else size
        kept: list[int] = []
        for kind in self.kinds(places, 1):
            kept += self.fill(kind, [min(len(kind), left - len(kept))])[0]
        return (*kept, *sorted(set(places).difference(kept)))


# Sharing cores among claimants that may have different ones, which gpu_affinity refuses. Sizes are
# *max-min fair*: no share can grow without making one shrink that is no larger. Cores are whole, so
# it is the vector of sizes that is best when sorted ascending and compared from the front. Cores
# are grouped by who may have them; the sizes come from a flow between claimants and groups.

Group = tuple[tuple[int, ...], tuple[int, ...]]
"""The claimants that may have some cores, and the places of these cores; both ascending."""


def fair_shares(wanted: Sequence[frozenset[int]], fill: Fill) -> list[tuple[int, ...]]:
    """Share out the cores that each claimant may have, each once; earlier claimants win ties."""
    groups = group_cores(wanted)
    flow = _Flow(groups, len(wanted))
    shares: list[list[int]] = [[] for _ in wanted]
    for number, (claimants, cores) in enumerate(groups):
        sizes = [flow.given[claimant, number] for claimant in claimants]
        for claimant, part in zip(claimants, fill(cores, sizes), strict=True):
            shares[claimant] += part
    return [tuple(sorted(share)) for share in shares]


def grow(
    shares: Sequence[frozenset[int]], more: Iterable[frozenset[int]], fill: Fill
) -> Sequence[frozenset[int]]:
    """Share out more cores; what a claimant has, and no other may have, counts, and is kept."""
    wanted = [have | claim for have, claim in zip(shares, more, strict=True)]
    return shares if wanted == shares else list(map(frozenset, fair_shares(wanted, fill)))


def group_cores(wanted: Sequence[frozenset[int]]) -> list[Group]:
    """Group cores by who may have them; groups of few claimants first, then by lowest core."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for core in sorted(frozenset().union(*wanted)):
        claimants = tuple(claimant for claimant, cores in enumerate(wanted) if core in cores)
        groups.setdefault(claimants, []).append(core)
    found = [(claimants, tuple(cores)) for claimants, cores in groups.items()]
    return sorted(found, key=lambda group: (len(group[0]), group[1][0]))


class _Flow:
    """How many cores of each group each claimant has: ``given``, by claimant and group.

    All claimants rise equally, without those that cannot rise. Who cannot rise by one core now
    never can: the cores within reach are all with claimants that have no more than it has, or one
    more.
    """

    def __init__(self, groups: Sequence[Group], claimants: int) -> None:
        self.given: Counter[tuple[int, int]] = Counter()
        self._free = [len(cores) for _, cores in groups]
        self._claimants = [claimants for claimants, _ in groups]
        rising = list(range(claimants))
        while rising:
            step = sum(self._free) // len(rising)
            while step > 1 and not self._raise_all(rising, step):
                step //= 2
            if step <= 1:
                rising = [claimant for claimant in rising if self._raise(claimant, 1)]

    def _raise_all(self, claimants: Iterable[int], amount: int) -> bool:
        """Give each of them so many cores more, or change nothing."""
        before = self.given.copy(), self._free.copy()
        if all(self._raise(claimant, amount) for claimant in claimants):
            return True
        self.given, self._free = before
        return False

    def _raise(self, claimant: int, amount: int) -> bool:
        while amount:
            path = self._path(claimant)
            if not path:
                return False
            passed = [(giver, group) for (_, group), (giver, _) in pairwise(path)]
            last = path[-1][1]
            step = min(amount, self._free[last], *map(self.given.__getitem__, passed))
            for taker in path:
                self.given[taker] += step
            for giver in passed:
                self.given[giver] -= step
            self._free[last] -= step
            amount -= step
        return True

    def _path(self, start: int) -> list[tuple[int, int]]:
        """The shortest way to free cores: who takes from which group, the last one freely."""
        paths: dict[int, list[tuple[int, int]]] = {start: []}
        queue, visited = [start], set[int]()
        for claimant in queue:
            for group, members in enumerate(self._claimants):
                if group in visited or claimant not in members:
                    continue
                visited.add(group)
                path = [*paths[claimant], (claimant, group)]
                if self._free[group]:
                    return path
                for giver in members:
                    if giver not in paths and self.given[giver, group]:
                        paths[giver] = path
                        queue.append(giver)
        return []
