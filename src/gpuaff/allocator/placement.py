"""Where each rank is placed: its GPU, the CPUs that it may use, and the cores near the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from gpuaff.allocator.cores import Cores, allowed_cores, split_siblings
from gpuaff.allocator.model import Options, Scope
from gpuaff.allocator.proximity import Near, Neighbourhood
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.errors import GPUAffinityError
from gpuaff.topology.model import Gpu, Source, Topology


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
