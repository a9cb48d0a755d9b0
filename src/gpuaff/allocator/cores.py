"""The allowed physical cores in their order, so that the rest works on small numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import gcd

from gpuaff.cpuset import CpuSet
from gpuaff.topology.model import Topology


@dataclass(frozen=True)
class Cores:
    """The cores of which a process may use at least one CPU.

    A core's *place* is its position here; places compare as gpu_affinity orders cores
    (gpu-affinity rule 1): by the lowest CPU id of the whole core, allowed or not. On hybrid
    processors the fast cores come before all slow ones (case G5). Where ranks may use different
    siblings of a core, it has a place for each piece: see :func:`split_siblings`.

    Attributes:
        cpus: the allowed CPUs of each core, by its place.
        slow_from: the place of the first slow core; the number of places if there is none.
        core_of: the number of the core that is (partly) at each place; None when each is whole.
    """

    cpus: tuple[CpuSet, ...]
    slow_from: int
    core_of: tuple[int, ...] | None = None

    @cached_property
    def _place_of(self) -> Mapping[int, int]:
        return {cpu: place for place, core in enumerate(self.cpus) for cpu in core}

    def places(self, cpus: CpuSet) -> tuple[int, ...]:
        """The places, ascending, of the cores that hold any of these allowed CPUs.

        A core counts whole even where only some of its siblings are named: its CPUs are
        never split between two processes.
        """
        return tuple(sorted(set(map(self._place_of.__getitem__, cpus))))

    def places_within(self, cpus: CpuSet, allowed: CpuSet) -> tuple[int, ...]:
        """The same for a process that may use only these allowed CPUs, which hold the others."""
        places = self.places(cpus)
        if self.core_of is None:
            return places
        cores = set(map(self.core, places))
        found = enumerate(zip(self.core_of, self.cpus, strict=True))
        return tuple(at for at, (core, piece) in found if core in cores and piece <= allowed)

    def core(self, place: int) -> int:
        """The number of the core at a place."""
        return place if self.core_of is None else self.core_of[place]

    def count(self, places: Sequence[int]) -> int:
        """How many cores these places are (parts) of."""
        # Sizes count cores. Max-min fairness counts places, and so pieces.
        return len(places) if self.core_of is None else len(set(map(self.core, places)))

    def divide(self, places: Sequence[int], count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The places of the first ``count`` cores, and the others."""
        if self.core_of is None:
            return tuple(places[:count]), tuple(places[count:])
        first = set([*dict.fromkeys(map(self.core, places))][:count])
        return (
            tuple(place for place in places if self.core(place) in first),
            tuple(place for place in places if self.core(place) not in first),
        )


def allowed_cores(topology: Topology, allowed: CpuSet) -> Cores:
    """The cores of a machine that hold any of these CPUs.

    Where the machine's cores are unknown, or a CPU is in none of them, the CPU counts as a
    core of its own.
    """
    known = [core for core in topology.cores or () if core]
    known += [frozenset((cpu,)) for cpu in allowed.difference(*known)]
    cpus = [core for core in map(allowed.__and__, sorted(known, key=min)) if core]
    slow = topology.efficiency_cpus & allowed
    if not slow:
        return Cores(tuple(cpus), len(cpus))
    fast = [core for core in cpus if core.isdisjoint(slow)]
    return Cores((*fast, *(core for core in cpus if not core.isdisjoint(slow))), len(fast))


def split_siblings(cores: Cores, masks: Iterable[tuple[CpuSet, CpuSet]]) -> Cores:
    """Give a place to every *piece* of a core: those of its CPUs that the same ranks may have.

    With masks of their own, one rank may have CPU 0 and another its sibling 64: neither then gets
    a CPU outside its mask, and both CPUs are used. Masks of whole cores, which is what schedulers
    give, split nothing.

    Args:
        cores: whole cores, of all CPUs that any rank may use.
        masks: for each rank, the CPUs that it may use and those of them that it wants; the
            siblings of a wanted CPU are wanted too.
    """
    each = set(masks)
    torn = _torn(cores, {allowed for allowed, _ in each})
    if not torn:
        return cores
    claims = [(allowed, torn.intersection(cores.places(near))) for allowed, near in each]
    pieces: list[tuple[int, CpuSet]] = []
    for place, core in enumerate(cores.cpus):
        cuts = [allowed for allowed, wanted in claims if place in wanted]
        pieces += [(place, piece) for piece in _pieces(core, cuts)]
    fast = sum(1 for place, _ in pieces if place < cores.slow_from)
    return Cores(tuple(cpus for _, cpus in pieces), fast, tuple(place for place, _ in pieces))


def _torn(cores: Cores, masks: Iterable[CpuSet]) -> set[int]:
    """The places of the cores of which a mask has some CPUs and not the others."""
    widths = list(map(len, cores.cpus))
    torn: set[int] = set()
    for mask in masks:
        places = cores.places(mask)
        if sum(map(widths.__getitem__, places)) > len(mask):
            torn.update(place for place in places if not cores.cpus[place] <= mask)
    return torn


def _pieces(core: CpuSet, masks: Iterable[CpuSet]) -> list[CpuSet]:
    pieces = [core]
    for mask in masks:
        pieces = [half for piece in pieces for half in (piece & mask, piece - mask) if half]
    return sorted(pieces, key=min)


def keep_whole(wanted: Sequence[frozenset[int]], cores: Cores) -> list[frozenset[int]]:
    """Keep ranks that could each have a whole core from having a piece of it each.

    Of such a core they compete for one piece, the one that the fewest others may have, and leave
    its other pieces to those others, who may not have all of it.

    Args:
        wanted: the places that each rank may have.
        cores: what is at these places.
    """
    pieces_of: dict[int, set[int]] = {}
    for place in frozenset().union(*wanted):
        pieces_of.setdefault(cores.core(place), set()).add(place)
    lost: list[set[int]] = [set() for _ in wanted]
    for pieces in pieces_of.values():
        whole = [rank for rank, places in enumerate(wanted) if places.issuperset(pieces)]
        if len(whole) > 1:
            kept = min(pieces, key=lambda piece: (sum(piece in may for may in wanted), piece))
            for rank in whole:
                lost[rank] |= pieces - {kept}
    return [places - gone for places, gone in zip(wanted, lost, strict=True)]


def workers_parts(cores: Sequence[CpuSet], workers: int) -> tuple[CpuSet, ...]:
    """Cut cores among workers, and leave the first one to the process that they work for.

    The first core stays out where there are at least two: it is a fast one on hybrid processors
    (case G5), and the main process, which feeds the GPU, is what all workers wait for.

    Workers get blocks of neighbouring cores, which mostly share caches; their sizes differ by one
    core at most. Where there are more workers than cores, cores and workers are cut into as many
    groups as both can be divided by, and the workers of a group share its cores: a DataLoader
    takes its batches in turn, so it is as slow as its slowest worker, and of three workers on two
    cores, each on one, two would be slow.

    Args:
        cores: the CPUs of each core, in their order, none of them empty; at least one.
        workers: how many workers there are, at least one.

    Returns:
        Each worker's CPUs; none is empty.
    """
    rest = cores[1:] or cores
    groups = workers if workers <= len(rest) else gcd(workers, len(rest))
    edges = [len(rest) * block // groups for block in range(groups + 1)]
    blocks = [frozenset().union(*rest[start:end]) for start, end in pairwise(edges)]
    return tuple(blocks[worker * groups // workers] for worker in range(workers))
