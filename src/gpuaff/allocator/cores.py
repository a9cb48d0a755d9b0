"""The allowed physical cores in their order, so that the rest works on small numbers."""

from __future__ import annotations

from collections.abc import Mapping
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

    Attributes:
        cpus: the allowed CPUs of each core, by its place.
        slow_from: the place of the first slow core; the number of cores if there is none.
    """

    cpus: tuple[CpuSet, ...]
    slow_from: int

    @cached_property
    def _place_of(self) -> Mapping[int, int]:
        return {cpu: place for place, core in enumerate(self.cpus) for cpu in core}

    def places(self, cpus: CpuSet) -> tuple[int, ...]:
        """The places, ascending, of the cores that hold any of these allowed CPUs.

        A core counts whole even where only some of its siblings are named: its CPUs are
        never split between two processes.
        """
        return tuple(sorted(set(map(self._place_of.__getitem__, cpus))))


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
