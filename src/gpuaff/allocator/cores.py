"""The allowed physical cores in their order, so that the rest works on small numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import itemgetter

from gpuaff.cpuset import CpuSet
from gpuaff.records import dataclass
from gpuaff.topology.model import Topology

_LOWEST = itemgetter(0)


@dataclass(frozen=True)
class Cores:
    """The cores of which a process may use at least one CPU.

    A core's *place* is its position here; places compare as gpu_affinity orders cores
    (gpu-affinity rule 1): by the lowest CPU id of the whole core, allowed or not. On hybrid
    processors the fast cores come before all slow ones (case G5).

    Where ranks may use different siblings of a core, it has a place for each *piece*: see
    :mod:`gpuaff.allocator.pieces`.

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

    @cached_property
    def _places_of(self) -> Mapping[int, Sequence[int]]:
        found: dict[int, list[int]] = {}
        for place, core in enumerate(self.core_of or ()):
            found.setdefault(core, []).append(place)
        return found

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
        whole = {mate for place in places for mate in self._places_of[self.core_of[place]]}
        return tuple(place for place in sorted(whole) if self.cpus[place] <= allowed)

    def core(self, place: int) -> int:
        """The number of the core at a place."""
        return place if self.core_of is None else self.core_of[place]

    def count(self, places: Sequence[int]) -> int:
        """How many cores these places are (parts) of."""
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
    ordered = sorted(zip(map(min, known), map(allowed.__and__, known), strict=True), key=_LOWEST)
    cpus = [core for _, core in ordered if core]
    slow = topology.efficiency_cpus & allowed
    if not slow:
        return Cores(tuple(cpus), len(cpus))
    fast = [core for core in cpus if core.isdisjoint(slow)]
    return Cores((*fast, *(core for core in cpus if not core.isdisjoint(slow))), len(fast))
