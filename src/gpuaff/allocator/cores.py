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
    """

    cpus: tuple[CpuSet, ...]  # the allowed CPUs of each core, or piece of one, by its place
    slow_from: int  # the place of the first slow core; the number of places if there is none
    core_of: Sequence[int]  # the number of the core that is (partly) at each place

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
        wanted = {self.core_of[place] for place in self.places(cpus)}
        found = enumerate(zip(self.core_of, self.cpus, strict=True))
        return tuple(at for at, (core, piece) in found if core in wanted and piece <= allowed)

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
    """The cores of a machine that hold any of these CPUs.

    Where the machine's cores are unknown, or a CPU is in none of them, the CPU counts as a
    core of its own.
    """
    known = [core for core in topology.cores or () if core]
    known += [frozenset((cpu,)) for cpu in allowed.difference(*known)]
    cpus = [core for core in map(allowed.__and__, sorted(known, key=min)) if core]
    slow = topology.efficiency_cpus & allowed
    fast = [core for core in cpus if core.isdisjoint(slow)]
    slow_ones = [core for core in cpus if not core.isdisjoint(slow)] if slow else []
    return Cores((*fast, *slow_ones), len(fast), range(len(cpus)))


def split_siblings(cores: Cores, masks: Iterable[tuple[CpuSet, CpuSet]]) -> Cores:
    """Give a place to every *piece* of a core: those of its CPUs that the same ranks may have.

    With masks of their own, one rank may have CPU 0 and another its sibling 64: neither then gets
    a CPU outside its mask, and both CPUs are used. Masks of whole cores, which is what schedulers
    give, split nothing. ``masks`` has for each rank the CPUs that it may use and those of them
    that it wants; the siblings of a wanted CPU are wanted too.
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
    return Cores(tuple(cpus for _, cpus in found), fast, [place for place, _ in found])


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
    """Cut cores (at least one) among workers, and leave the first one to their main process.

    The first core stays out where there are at least two: it is a fast one on hybrid processors
    (case G5), and the main process, which feeds the GPU, is what all workers wait for.

    Workers get blocks of neighbouring cores, which mostly share caches; their sizes differ by one
    core at most. Where there are more workers than cores, cores and workers are cut into as many
    groups as both can be divided by, and the workers of a group share its cores: a DataLoader
    takes its batches in turn, so it is as slow as its slowest worker, and of three workers on two
    cores, each on one, two would be slow.
    """
    rest = cores[1:] or cores
    groups = workers if workers <= len(rest) else gcd(workers, len(rest))
    edges = [len(rest) * block // groups for block in range(groups + 1)]
    blocks = [frozenset().union(*rest[start:end]) for start, end in pairwise(edges)]
    return tuple(blocks[worker * groups // workers] for worker in range(workers))
