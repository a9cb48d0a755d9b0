"""Which of the allowed CPUs are near a GPU.

A search in steps, each cut to the allowed CPUs; an empty answer goes on to the next step, and
the plan names the step that answered. CPUs that a driver or sysfs names but the process
may not use are never taken (cases A5, A6), nor is a NUMA node without CPUs (cases A9, A10).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from gpuaff.allocator.model import Scope
from gpuaff.cpuset import CpuSet
from gpuaff.topology.model import Gpu, Source, Topology

_NONE: CpuSet = frozenset()


class Near(NamedTuple):
    """The CPUs near one GPU.

    Attributes:
        cpus: the allowed ones; never empty where any CPU is allowed.
        source: the step that found them.
        reported: all that a source named as near, allowed or not; empty when no source did.
    """

    cpus: CpuSet
    source: Source
    reported: CpuSet = _NONE

    @property
    def is_local(self) -> bool:
        """Whether they are what was requested, not the next best."""
        return self.source not in (Source.NEAREST, Source.ALL)


class Neighbourhood:
    """The search, on one machine and for one set of allowed CPUs."""

    def __init__(self, topology: Topology, allowed: CpuSet) -> None:
        self._allowed = allowed
        self._nodes = topology.numa_nodes or ()
        self._node_by_id = {node.id: node for node in self._nodes}
        self._near: dict[tuple[Scope, int], Near] = {}
        # GPUs mostly share their near CPUs, so that each set is cut and widened once.
        self._intersect = cache(allowed.__and__)
        packages = [package.cpus for package in topology.packages or ()]
        self._widen = cache(lambda near: _NONE.union(*(p for p in packages if p & near)))

    def near(self, gpu: Gpu, scope: Scope) -> Near:
        """The allowed CPUs near a GPU."""
        key = scope, gpu.index
        if key not in self._near:
            self._near[key] = self._by_node(gpu) if scope is Scope.NODE else self._by_socket(gpu)
        return self._near[key]

    def _by_node(self, gpu: Gpu) -> Near:
        near = self._first_usable(self._reports(gpu))
        if near.cpus:
            return near
        if usable := self._nearest(gpu, near.reported):
            return Near(usable, Source.NEAREST, near.reported)
        return Near(self._allowed, Source.ALL, near.reported)

    def _by_socket(self, gpu: Gpu) -> Near:
        near = self._first_usable(self._socket_reports(gpu))
        if near.cpus:
            return near
        node = self.near(gpu, Scope.NODE)
        if node.source is Source.ALL:
            return node
        wide = self._intersect(self._widen(node.cpus))
        return Near(wide | node.cpus, node.source, near.reported or node.reported)

    def _first_usable(self, reports: Iterator[tuple[CpuSet, Source]]) -> Near:
        """The first report with an allowed CPU; without CPUs, the first one, if there is none."""
        reported = _NONE
        for cpus, source in reports:
            if usable := self._intersect(cpus):
                return Near(usable, source, cpus)
            reported = reported or cpus
        return Near(_NONE, Source.ALL, reported)

    def _reports(self, gpu: Gpu) -> Iterator[tuple[CpuSet, Source]]:
        """What is known of a GPU's node, the best source first."""
        if gpu.node_cpus:
            yield gpu.node_cpus, gpu.source or Source.GIVEN
        if gpu.local_cpus:
            yield gpu.local_cpus, Source.SYSFS
        node = None if gpu.numa_node is None else self._node_by_id.get(gpu.numa_node)
        if node is not None and node.cpus:
            yield node.cpus, _deduced(gpu)

    def _socket_reports(self, gpu: Gpu) -> Iterator[tuple[CpuSet, Source]]:
        if gpu.socket_cpus:
            yield gpu.socket_cpus, gpu.source or Source.GIVEN
        for cpus, _ in self._reports(gpu):
            if wide := self._widen(cpus):
                yield wide, _deduced(gpu)

    def _nearest(self, gpu: Gpu, reported: CpuSet) -> CpuSet:
        """The allowed CPUs of the nodes nearest to a GPU that have any; all equally near."""
        own = self._node_by_id.get(gpu.numa_node) if gpu.numa_node is not None else None
        holders = (node for node in self._nodes if not node.cpus.isdisjoint(reported))
        at_distance: dict[int, list[CpuSet]] = {}
        for origin in [own] if own else holders:
            for node, distance in zip(self._nodes, origin.distances or (), strict=False):
                if usable := self._intersect(node.cpus):
                    at_distance.setdefault(distance, []).append(usable)
        return _NONE.union(*at_distance[min(at_distance)]) if at_distance else _NONE


def _deduced(gpu: Gpu) -> Source:
    """The source of an answer that is worked out from the GPU's node or from packages."""
    return Source.GIVEN if gpu.source is Source.GIVEN else Source.SYSFS
