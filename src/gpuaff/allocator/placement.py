"""Where each rank is placed: its GPU, the CPUs that it may use, and the cores near the GPU.

Near CPUs are searched for in steps, each cut to the allowed CPUs; an empty answer goes on to the
next step, and the plan names the step that answered. CPUs that a driver or sysfs names but the
process may not use are never taken (cases A5, A6), nor is a NUMA node without CPUs (cases A9, A10).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from gpuaff.allocator.cores import Cores, allowed_cores, split_siblings
from gpuaff.allocator.model import Options, Scope
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.errors import GPUAffinityError
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


class Placement(NamedTuple):
    """One rank, and the cores near its GPU.

    Attributes:
        rank: its local rank in the plan.
        name: its local rank in the job, for errors.
        gpu: the physical index of its GPU.
        allowed: the CPUs that it may use.
        near: those of them that are near its GPU, by the scope of the plan.
        cores: the places of their cores, ascending.
        node_cores: the places of the cores near its GPU by NUMA node, ascending; empty where
            these are unknown.
    """

    rank: int
    name: int
    gpu: int
    allowed: CpuSet
    near: Near
    cores: tuple[int, ...]
    node_cores: tuple[int, ...]


class GpuGroup(NamedTuple):
    """GPUs whose ranks have the same near cores.

    Attributes:
        cores: the places of these cores, ascending.
        ranks: the ranks on each GPU, ascending; GPUs by their first rank.
    """

    cores: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]


class Assignment(NamedTuple):
    """The cores that one rank gets.

    Attributes:
        cores: their places; trimming cuts the tail off.
        own: whether no other rank gets them (unique modes only).
        reserved: the places that are kept out of its share.
    """

    cores: tuple[int, ...]
    own: bool = True
    reserved: tuple[int, ...] = ()


def group_gpus(
    placements: Iterable[Placement], cores: Callable[[Placement], tuple[int, ...]]
) -> list[GpuGroup]:
    """Group the GPUs by some of their ranks' cores; groups by their first rank."""
    groups: dict[tuple[int, ...], dict[tuple[int, tuple[int, ...]], list[int]]] = {}
    for placed in placements:
        gpus = groups.setdefault(cores(placed), {})
        gpus.setdefault((placed.gpu, placed.cores), []).append(placed.rank)
    return [GpuGroup(own, tuple(map(tuple, gpus.values()))) for own, gpus in groups.items()]


def granted_cpus(topology: Topology, options: Options) -> tuple[CpuSet, ...]:
    """The online CPUs that each rank may use: all the same ones, or those of its own mask.

    Masks also name CPUs that are not online (case A18).

    Raises:
        GPUAffinityError: none of a rank's CPUs is online.
    """
    if options.rank_allowed is not None:
        return tuple(_online(topology, rank, own) for rank, own in enumerate(options.rank_allowed))
    usable = topology.allowed & topology.cpus if topology.cpus else topology.allowed
    if topology.cpus and not usable:
        raise GPUAffinityError(
            f"no CPU is allowed: the allowed set ({format_cpulist(topology.allowed) or 'empty'}) "
            f"holds none of the online CPUs {format_cpulist(topology.cpus)}; "
            "check the CPU mask or cpuset that the job was started with"
        )
    return (usable,) * options.nproc


def _online(topology: Topology, rank: int, own: CpuSet) -> CpuSet:
    usable = own & topology.cpus if topology.cpus else own
    if not usable:
        raise GPUAffinityError(
            f"rank_allowed gives rank {rank} the CPUs {format_cpulist(own)}, but only the CPUs "
            f"{format_cpulist(topology.cpus)} are online; give each rank's CPUs by their ids on "
            "this machine"
        )
    return usable


def chosen_cpus(allowed: Sequence[CpuSet], cpus: CpuSet, topology: Topology) -> list[CpuSet]:
    """What each rank may use when only these CPUs are shared out.

    Raises:
        GPUAffinityError: no rank may use some of them, or a rank may use none of them.
    """
    everyone = union(allowed)
    if beyond := cpus - everyone:
        offline = beyond - topology.cpus if topology.cpus else frozenset[int]()
        reasons = (("not online", offline), ("not allowed", beyond - offline))
        found = "; ".join(f"{why}: {format_cpulist(some)}" for why, some in reasons if some)
        raise GPUAffinityError(
            f"requested cpus={format_cpulist(cpus)}, but not all of them are available ({found}); "
            f"allowed CPUs: {format_cpulist(everyone) or 'none known'}. Name only allowed CPUs, or "
            "start the job with a wider CPU mask"
        )
    own = {usable: usable & cpus for usable in set(allowed)}
    for rank, usable in enumerate(allowed):
        if not own[usable]:
            raise GPUAffinityError(
                f"requested cpus={format_cpulist(cpus)}, but rank {rank} may use only the CPUs "
                f"{format_cpulist(usable)}, none of which is in the list; add some of these"
            )
    return [own[usable] for usable in allowed]


def union(sets: Iterable[CpuSet]) -> CpuSet:
    """The union; equal sets, as most ranks and GPUs have them, are read once."""
    each = set(sets)
    return each.pop() if len(each) == 1 else frozenset().union(*each)


def place_ranks(
    topology: Topology,
    gpus: Sequence[int],
    allowed: Sequence[CpuSet],
    around: Mapping[CpuSet, Neighbourhood],
    scope: Scope,
    names: Sequence[int],
) -> tuple[list[Placement], Cores]:
    """Place each rank, by its GPU and the CPUs that it may use.

    Args:
        topology: the machine.
        gpus: each rank's GPU.
        allowed: what each rank may use.
        around: the search for near CPUs, for each set of allowed ones.
        scope: what counts as near.
        names: what errors call each rank.

    Returns:
        The placements, by rank, and the cores that any rank may use: in pieces where ranks may
        use different siblings.

    Raises:
        GPUAffinityError: a GPU is not among the machine's.
    """
    ranks = [(gpu_of(topology, gpu), around[own], own) for gpu, own in zip(gpus, allowed)]  # noqa: B905 - both one per rank
    near = [search.near(gpu, scope) for gpu, search, _ in ranks]
    cores = allowed_cores(topology, union(around))
    if len(around) > 1:
        cores = split_siblings(cores, zip(allowed, (own.cpus for own in near), strict=True))
    # All later steps know only each rank's list of cores. So equal sets, named for each rank, give
    # the same plan as one set for all.
    places = cache(cores.places_within)  # GPUs and ranks mostly share their near CPUs
    placements = []
    for rank, (gpu, search, own) in enumerate(ranks):
        node = search.near(gpu, Scope.NODE)
        node_cores = () if node.source is Source.ALL else places(node.cpus, own)
        cpus = near[rank].cpus
        placements.append(
            Placement(rank, names[rank], gpu.index, own, near[rank], places(cpus, own), node_cores)
        )
    return placements, cores


def gpu_of(topology: Topology, index: int) -> Gpu:
    """The GPU with this physical index.

    Raises:
        GPUAffinityError: there is none.
    """
    try:
        return topology.gpu_by_index[index]
    except KeyError:
        raise GPUAffinityError(
            f"GPU {index} is visible, but the topology has only the GPUs "
            f"{sorted(topology.gpu_by_index)}; observe the machine again, or correct its "
            "description"
        ) from None
