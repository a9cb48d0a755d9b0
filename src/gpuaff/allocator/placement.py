"""Where each rank is placed: its GPU, the CPUs that it may use, and the cores near the GPU.

Near CPUs are searched for in steps, each cut to the allowed CPUs; an empty answer goes on to the
next step, and the plan names the step that answered. CPUs that a driver or sysfs names but the
process may not use are never taken (cases A5, A6), nor is a NUMA node without CPUs (cases A9, A10).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from gpuaff.allocator.cores import Cores, allowed_cores, split_siblings
from gpuaff.allocator.model import Options, Scope
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.errors import GPUAffinityError
from gpuaff.topology.model import Gpu, NumaNode, Source, Topology

_NONE: CpuSet = frozenset()


def union(sets: Iterable[CpuSet]) -> CpuSet:
    """The union; equal sets, as most ranks and GPUs have them, are read once."""
    each = set(sets)
    return each.pop() if len(each) == 1 else frozenset().union(*each)


def nearest(at_distances: Iterable[tuple[int, frozenset[int]]]) -> frozenset[int]:
    """All that is at the smallest distance of those at which there is anything."""
    found = [(distance, some) for distance, some in at_distances if some]
    least = min((distance for distance, _ in found), default=None)
    return union(some for distance, some in found if distance == least)


class Near(NamedTuple):
    """The CPUs near one GPU."""

    cpus: CpuSet  # the allowed ones; never empty where any CPU is allowed
    source: Source  # the step that found them
    reported: CpuSet = _NONE  # all that a source named as near, allowed or not

    @property
    def is_local(self) -> bool:
        """Whether they are what was requested, not the next best."""
        return self.source not in (Source.NEAREST, Source.ALL)


class Neighbourhood:
    """The search, on one machine and for one set of allowed CPUs."""

    def __init__(self, topology: Topology, allowed: CpuSet) -> None:
        self._allowed = allowed
        self._nodes = topology.numa_nodes or ()
        self._node_by_id: Mapping[int | None, NumaNode] = {node.id: node for node in self._nodes}
        self._near: dict[tuple[Scope, int], Near] = {}
        # GPUs mostly share their near CPUs, so that each set is cut and widened once.
        self._intersect = cache(allowed.__and__)
        packages = [package.cpus for package in topology.packages or ()]
        self._widen = cache(lambda near: _NONE.union(*(p for p in packages if p & near)))

    def near(self, gpu: Gpu, scope: Scope) -> Near:
        """The allowed CPUs near a GPU."""
        key = scope, gpu.index
        if key not in self._near:
            self._near[key] = self._search(gpu, scope)
        return self._near[key]

    def _search(self, gpu: Gpu, scope: Scope) -> Near:
        reported = _NONE
        for cpus, source in self._reports(gpu, scope):
            if usable := self._intersect(cpus):
                return Near(usable, source, cpus)
            reported = reported or cpus
        if scope is Scope.NODE:
            own = self._node_by_id.get(gpu.numa_node)
            holders = [node for node in self._nodes if not node.cpus.isdisjoint(reported)]
            usable = nearest(
                (distance, self._intersect(node.cpus))
                for origin in ([own] if own else holders)
                for distance, node in zip(origin.distances or (), self._nodes, strict=False)
            )
            source = Source.NEAREST if usable else Source.ALL
            return Near(usable or self._allowed, source, reported)
        near = self.near(gpu, Scope.NODE)
        if near.source is Source.ALL:
            return near
        wide = self._intersect(self._widen(near.cpus)) | near.cpus
        return Near(wide, near.source, reported or near.reported)

    def _reports(self, gpu: Gpu, scope: Scope) -> Iterator[tuple[CpuSet, Source]]:
        """What is known of what is near a GPU, the best source first."""
        given = gpu.source or Source.GIVEN
        deduced = Source.GIVEN if gpu.source is Source.GIVEN else Source.SYSFS
        if scope is Scope.SOCKET:
            if gpu.socket_cpus:
                yield gpu.socket_cpus, given
            wide = (self._widen(cpus) for cpus, _ in self._reports(gpu, Scope.NODE))
            yield from ((cpus, deduced) for cpus in wide if cpus)
            return
        if gpu.node_cpus:
            yield gpu.node_cpus, given
        if gpu.local_cpus:
            yield gpu.local_cpus, Source.SYSFS
        node = self._node_by_id.get(gpu.numa_node)
        if node is not None and node.cpus:
            yield node.cpus, deduced


class Placement(NamedTuple):
    """One rank, and the places of the cores near its GPU, ascending."""

    rank: int
    name: int  # its local rank in the job, for errors
    gpu: int  # the physical index
    allowed: CpuSet
    near: Near  # by the scope of the plan
    cores: tuple[int, ...]  # those of ``near``
    node_cores: tuple[int, ...]  # those near by NUMA node; empty where these are unknown


class Job(NamedTuple):
    """The ranks of one plan, placed on the machine."""

    topology: Topology
    options: Options
    placements: Sequence[Placement]
    cores: Cores  # that any rank may use: in pieces where ranks may use different siblings
    around: Mapping[CpuSet, Neighbourhood]  # the search, for each set of allowed CPUs
    granted: CpuSet  # what any rank may use by its mask, also where ``cpus`` leaves it out
    domain_rule: int | None  # the version, where each rank stays inside the domain of its GPU

    def own_cores(self, assigned: Assignment) -> int:
        """How many cores a rank has that no other rank has."""
        return self.cores.count(assigned.cores) if assigned.own else 0


class Assignment(NamedTuple):
    """The places of the cores that one rank gets; trimming cuts the tail off."""

    cores: tuple[int, ...]
    own: bool = True  # whether no other rank gets them (unique modes only)
    reserved: tuple[int, ...] = ()  # what is kept out of its share


def granted_cpus(topology: Topology, options: Options) -> Sequence[CpuSet]:
    """The online CPUs that each rank may use: all the same ones, or those of its own mask."""
    masks, online = options.rank_allowed or (topology.allowed,) * options.nproc, topology.cpus
    if not online:
        return masks
    granted = [*map(cache(online.__and__), masks)]  # masks name offline CPUs, too (case A18)
    if all(granted):
        return granted
    rank = granted.index(_NONE)
    whose = f"rank_allowed[{rank}]" if options.rank_allowed else "the CPU mask"
    raise GPUAffinityError(
        f"no CPU is allowed: {whose} ({format_cpulist(masks[rank]) or 'empty'}) holds none of the "
        f"online CPUs {format_cpulist(online)}; check the mask, cpuset or rank_allowed"
    )


def chosen_cpus(granted: Sequence[CpuSet], cpus: CpuSet, online: CpuSet) -> Sequence[CpuSet]:
    """What each rank may use when only these CPUs are shared out."""
    requested, everyone = f"requested cpus={format_cpulist(cpus)}, but", union(granted)
    if beyond := cpus - everyone:
        machine = f"online: {format_cpulist(online) or 'unknown'}"
        raise GPUAffinityError(
            f"{requested} the CPUs {format_cpulist(beyond)} are not available ({machine}; "
            f"allowed: {format_cpulist(everyone) or 'none'}); name only allowed CPUs, or start "
            "the job with a wider CPU mask"
        )
    chosen = [*map(cache(cpus.__and__), granted)]
    if not all(chosen):
        rank = chosen.index(_NONE)
        raise GPUAffinityError(
            f"{requested} rank {rank} may use only the CPUs {format_cpulist(granted[rank])}, none "
            "of which is in the list; add some of these"
        )
    return chosen


def place_ranks(
    topology: Topology,
    options: Options,
    gpus: Sequence[int],
    allowed: Sequence[CpuSet],
    names: Sequence[int],
) -> tuple[Sequence[Placement], Cores, Mapping[CpuSet, Neighbourhood]]:
    """Place each rank, by its GPU and the CPUs that it may use; the rest is for :class:`Job`."""
    if missing := set(gpus) - topology.gpu_by_index.keys():
        raise GPUAffinityError(
            f"GPU {min(missing)} is visible, but the topology has only the GPUs "
            f"{sorted(topology.gpu_by_index)}; observe the machine again, or correct its "
            "description"
        )
    around = {own: Neighbourhood(topology, own) for own in set(allowed)}
    ranks = [(topology.gpu_by_index[gpu], own) for gpu, own in zip(gpus, allowed, strict=True)]
    near = [around[own].near(gpu, options.scope) for gpu, own in ranks]
    cores = allowed_cores(topology, union(around))
    if len(around) > 1:
        cores = split_siblings(cores, zip(allowed, (one.cpus for one in near), strict=True))
    # All later steps know only each rank's list of cores. So equal sets, named for each rank, give
    # the same plan as one set for all.
    places = cache(cores.places_within)  # GPUs and ranks mostly share their near CPUs
    placements = [
        Placement(
            rank=rank,
            name=names[rank],
            gpu=gpu.index,
            allowed=own,
            near=near[rank],
            cores=places(near[rank].cpus, own),
            node_cores=() if node.source is Source.ALL else places(node.cpus, own),
        )
        for rank, (gpu, own) in enumerate(ranks)
        for node in [around[own].near(gpu, Scope.NODE)]
    ]
    return placements, cores, around
