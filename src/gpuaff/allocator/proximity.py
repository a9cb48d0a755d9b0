"""Which of the allowed CPUs are near a GPU.

A search in steps, each cut to the allowed CPUs; an empty answer goes on to the next step, and
the step that answered stands in the plan. CPUs that a driver or sysfs names but the process
may not use are never taken (cases A5, A6), nor is a NUMA node without CPUs (cases A9, A10).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from gpuaff.allocator.model import Scope
from gpuaff.cpuset import CpuSet
from gpuaff.topology.model import Gpu, NumaNode, Source, Topology

_NONE: CpuSet = frozenset()


@dataclass(frozen=True, slots=True)
class Near:
    """The CPUs near one GPU.

    Attributes:
        cpus: the allowed ones; never empty where any CPU is allowed.
        source: the step that found them.
        told: all that were said to be near, allowed or not; empty when nobody said.
    """

    cpus: CpuSet
    source: Source
    told: CpuSet = _NONE

    @property
    def is_local(self) -> bool:
        """Whether they are what was asked for, not the next best."""
        return self.source not in (Source.NEAREST, Source.ALL)


class Neighbourhood:
    """The search, on one machine and for one set of allowed CPUs."""

    def __init__(self, topology: Topology, allowed: CpuSet) -> None:
        self._allowed = allowed
        self._nodes = topology.numa_nodes or ()
        self._packages = topology.packages or ()
        self._found: dict[tuple[Scope, int], Near] = {}
        self._wide: dict[CpuSet, CpuSet] = {}
        self._cut: dict[CpuSet, CpuSet] = {}

    def near(self, gpu: Gpu, scope: Scope) -> Near:
        """The allowed CPUs near a GPU."""
        key = scope, gpu.index
        if key not in self._found:
            self._found[key] = self._node(gpu) if scope is Scope.NODE else self._socket(gpu)
        return self._found[key]

    def _node(self, gpu: Gpu) -> Near:
        told = _NONE
        for cpus, source in self._said(gpu):
            if kept := self._kept(cpus):
                return Near(kept, source, cpus)
            told = told or cpus
        if kept := self._nearest(self._origins(gpu, told)):
            return Near(kept, Source.NEAREST, told)
        return Near(self._allowed, Source.ALL, told)

    def _socket(self, gpu: Gpu) -> Near:
        told = _NONE
        for cpus, source in self._said_of_socket(gpu):
            if kept := self._kept(cpus):
                return Near(kept, source, cpus)
            told = told or cpus
        node = self.near(gpu, Scope.NODE)
        if node.source is Source.ALL:
            return node
        wide = self._kept(self._packages_of(node.cpus))
        return Near(wide | node.cpus, node.source, told or node.told)

    def _said(self, gpu: Gpu) -> Iterator[tuple[CpuSet, Source]]:
        """What is known of a GPU's node, the best source first."""
        if gpu.node_cpus:
            yield gpu.node_cpus, gpu.source or Source.GIVEN
        if gpu.local_cpus:
            yield gpu.local_cpus, Source.SYSFS
        node = self._node_by_id.get(gpu.numa_node)
        if node is not None and node.cpus:
            yield node.cpus, _deduced(gpu)

    def _said_of_socket(self, gpu: Gpu) -> Iterator[tuple[CpuSet, Source]]:
        if gpu.socket_cpus:
            yield gpu.socket_cpus, gpu.source or Source.GIVEN
        for cpus, _ in self._said(gpu):
            if wide := self._packages_of(cpus):
                yield wide, _deduced(gpu)

    def _kept(self, cpus: CpuSet) -> CpuSet:
        """The allowed ones; GPUs mostly share their near CPUs, so each set is cut once."""
        if cpus not in self._cut:
            self._cut[cpus] = cpus & self._allowed
        return self._cut[cpus]

    def _origins(self, gpu: Gpu, told: CpuSet) -> list[NumaNode]:
        """The nodes from which distances to a GPU are measured."""
        own = self._node_by_id.get(gpu.numa_node)
        if own is not None:
            return [own]
        return [node for node in self._nodes if not node.cpus.isdisjoint(told)]

    def _nearest(self, origins: list[NumaNode]) -> CpuSet:
        """The allowed CPUs of the nearest nodes that have any; all of those equally near."""
        reach: dict[int, list[CpuSet]] = {}
        for origin in origins:
            for node, distance in zip(self._nodes, origin.distances or (), strict=False):
                if kept := self._kept(node.cpus):
                    reach.setdefault(distance, []).append(kept)
        return _NONE.union(*reach[min(reach)]) if reach else _NONE

    def _packages_of(self, cpus: CpuSet) -> CpuSet:
        """All CPUs of the packages that hold any of these."""
        if cpus not in self._wide:
            hit = {self._package_of.get(cpu, _NONE) for cpu in cpus}
            self._wide[cpus] = _NONE.union(*hit)
        return self._wide[cpus]

    @cached_property
    def _node_by_id(self) -> Mapping[int | None, NumaNode]:
        return {node.id: node for node in self._nodes}

    @cached_property
    def _package_of(self) -> Mapping[int, CpuSet]:
        return {cpu: package.cpus for package in self._packages for cpu in package.cpus}


def _deduced(gpu: Gpu) -> Source:
    """Who is behind an answer worked out from the GPU's node or from packages."""
    return Source.GIVEN if gpu.source is Source.GIVEN else Source.SYSFS
