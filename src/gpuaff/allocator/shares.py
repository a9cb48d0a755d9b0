"""From the places of cores back to CPUs: the shares of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
        self._cores = cores
        self._single = multithreading is Multithreading.SINGLE_LOGICAL
        self._built: dict[tuple[int, ...], tuple[CpuSet, tuple[int, ...]]] = {}

    def share(self, rank: int, site: Site, draft: Draft) -> Share:
        """What a rank gets."""
        cpus, nodes = self._at(draft.cores)
        return Share(
            rank=rank,
            gpu=site.gpu,
            cpus=cpus,
            cores=self._cores.count(draft.cores),
            numa_nodes=nodes,
            source=site.near.source,
            reserved=self._at(draft.reserved)[0],
        )

    def _at(self, places: tuple[int, ...]) -> tuple[CpuSet, tuple[int, ...]]:
        """The CPUs at these places, and their NUMA nodes."""
        if places not in self._built:
            cpus = self._cpus(places)
            self._built[places] = cpus, self._topology.nodes_of(cpus)
        return self._built[places]

    def _cpus(self, places: Sequence[int]) -> CpuSet:
        if self._single:
            return frozenset(self._lowest(places))
        return frozenset().union(*map(self._cores.cpus.__getitem__, places))

    def _lowest(self, places: Iterable[int]) -> Iterable[int]:
        """The lowest CPU of each core, whose pieces may be at several places."""
        lowest: dict[int, int] = {}
        for place in places:
            core, cpu = self._cores.core(place), min(self._cores.cpus[place])
            lowest[core] = min(cpu, lowest.get(core, cpu))
        return lowest.values()


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
