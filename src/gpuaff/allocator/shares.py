"""From the places of cores back to CPUs: the shares of a plan."""

from __future__ import annotations

from collections.abc import Sequence

from gpuaff.allocator.cores import Cores
from gpuaff.allocator.modes import Multithreading
from gpuaff.allocator.plan import Share
from gpuaff.allocator.sites import Draft, Site
from gpuaff.cpuset import CpuSet
from gpuaff.topology.model import Source, Topology


class ShareBuilder:
    """Makes shares; what several ranks have alike is worked out once."""

    def __init__(self, topology: Topology, cores: Cores, multithreading: Multithreading) -> None:
        self._topology = topology
        self._cores = cores.cpus
        self._single = multithreading is Multithreading.SINGLE_LOGICAL
        self._built: dict[tuple[int, ...], tuple[CpuSet, tuple[int, ...]]] = {}

    def share(self, rank: int, site: Site, draft: Draft) -> Share:
        """What a rank gets."""
        if draft.cores not in self._built:
            cpus = self._cpus(draft.cores)
            self._built[draft.cores] = cpus, self._topology.nodes_of(cpus)
        cpus, nodes = self._built[draft.cores]
        return Share(
            rank=rank,
            gpu=site.gpu,
            cpus=cpus,
            cores=len(draft.cores),
            numa_nodes=nodes,
            source=site.near.source,
        )

    def _cpus(self, places: Sequence[int]) -> CpuSet:
        cores = map(self._cores.__getitem__, places)
        return frozenset(map(min, cores)) if self._single else frozenset().union(*cores)


def share_of_all(
    topology: Topology, rank: int, *, gpu: int | None, cpus: CpuSet, cores: int
) -> Share:
    """What a rank keeps where nothing is cut."""
    return Share(
        rank=rank,
        gpu=gpu,
        cpus=cpus,
        cores=cores,
        numa_nodes=topology.nodes_of(cpus),
        source=Source.ALL,
    )
