"""Who sits where: the GPUs that a job uses, the ranks on each, and the cores near it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpuaff.allocator.cores import Cores
from gpuaff.allocator.model import Options, Scope
from gpuaff.allocator.proximity import Near, Neighbourhood
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.errors import GPUAffinityError
from gpuaff.topology.model import Gpu, Source, Topology

# What each rank may use, before anything is cut: one set of CPUs for each.


def granted(topology: Topology, options: Options) -> tuple[CpuSet, ...]:
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
            f"rank_allowed gives rank {rank} the CPUs {format_cpulist(own)}, none of which is "
            f"online here: those are {format_cpulist(topology.cpus)}; give each rank's CPUs by "
            "their ids on this machine"
        )
    return usable


def chosen(allowed: Sequence[CpuSet], cpus: CpuSet, topology: Topology) -> tuple[CpuSet, ...]:
    """What each rank may use of the only CPUs that are to be shared out.

    Raises:
        GPUAffinityError: some of these are not allowed to any rank, or none is to some rank.
    """
    everyone = union(allowed)
    if beyond := cpus - everyone:
        raise _not_had(cpus, beyond, everyone, topology)
    own = {usable: usable & cpus for usable in allowed}
    for rank, usable in enumerate(allowed):
        if not own[usable]:
            raise GPUAffinityError(
                f"cpus={format_cpulist(cpus)} was asked for, but rank {rank} may use only "
                f"{format_cpulist(usable)}, which has none of them; name some of these as well"
            )
    return tuple(own[usable] for usable in allowed)


def _not_had(
    cpus: CpuSet, beyond: CpuSet, everyone: CpuSet, topology: Topology
) -> GPUAffinityError:
    offline = beyond - topology.cpus if topology.cpus else frozenset[int]()
    reasons = [
        f"{why}: {format_cpulist(some)}"
        for why, some in (("not online", offline), ("not allowed", beyond - offline))
        if some
    ]
    return GPUAffinityError(
        f"cpus={format_cpulist(cpus)} was asked for, but not all can be had "
        f"({'; '.join(reasons)}); allowed are {format_cpulist(everyone) or 'none that are known'}: "
        "name only such, or start the job with a wider CPU mask"
    )


def union(sets: Iterable[CpuSet]) -> CpuSet:
    """The union; equal sets, as most ranks and GPUs have them, are read once."""
    each = set(sets)
    return each.pop() if len(each) == 1 else frozenset().union(*each)


@dataclass(frozen=True, slots=True)
class Seat:
    """Where one rank sits, and what it may use.

    Attributes:
        rank: its local rank.
        gpu: the physical index of its GPU.
        allowed: the CPUs that it may use.
    """

    rank: int
    gpu: int
    allowed: CpuSet


@dataclass(frozen=True, slots=True)
class Site:
    """One GPU that the job uses, and ranks on it that are near the same CPUs.

    Attributes:
        gpu: its physical index.
        ranks: the ranks on it, ascending.
        near: the CPUs near it that these ranks may use, by the scope that was asked for.
        cores: the places of their cores, ascending.
        node_cores: the places of the cores near it by NUMA node, ascending; empty where
            nobody knows them.
    """

    gpu: int
    ranks: tuple[int, ...]
    near: Near
    cores: tuple[int, ...]
    node_cores: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """What one rank is to get, before anything is trimmed.

    Attributes:
        cores: the places of its cores, the dearest first: trimming cuts the tail off.
        own: whether no other rank gets them (unique modes only).
        reserved: the places that are kept out of its share.
    """

    cores: tuple[int, ...]
    own: bool = True
    reserved: tuple[int, ...] = ()


def take_seats(topology: Topology, allowed: Sequence[CpuSet]) -> tuple[Seat, ...]:
    """Where each rank sits, by what each may use; on a machine that has visible GPUs.

    Rank r uses the visible GPU r modulo their number (gpu-affinity rule 2, and several ranks
    on a GPU where there are more ranks than GPUs).
    """
    visible = topology.visible
    return tuple(Seat(rank, visible[rank % len(visible)], own) for rank, own in enumerate(allowed))


class Surroundings:
    """The search for near CPUs, for ranks that may not all use the same ones."""

    def __init__(self, topology: Topology, seats: Iterable[Seat]) -> None:
        self._topology = topology
        masks = {seat.allowed for seat in seats}
        self._around = {allowed: Neighbourhood(topology, allowed) for allowed in masks}

    @property
    def differ(self) -> bool:
        """Whether there are ranks that may use different CPUs."""
        return len(self._around) > 1

    def near(self, seat: Seat, scope: Scope) -> Near:
        """The CPUs near a rank's GPU that it may use.

        Raises:
            GPUAffinityError: the GPU is not among the machine's.
        """
        return self._around[seat.allowed].near(_gpu(self._topology, seat.gpu), scope)

    def near_any_gpu(self) -> CpuSet:
        """The CPUs of all GPUs' NUMA nodes, as far as any rank may use them."""
        allowed = union(self._around)
        around = self._around.get(allowed) or Neighbourhood(self._topology, allowed)
        found = (around.near(gpu, Scope.NODE) for gpu in self._topology.gpus)
        return union(near.cpus for near in found if near.is_local)


def find_sites(
    seats: Iterable[Seat], scope: Scope, around: Surroundings, cores: Cores
) -> tuple[Site, ...]:
    """Where the ranks sit, in the order in which they first use a site.

    Ranks on one GPU sit together, unless what they may use near it differs.
    """
    read = _Places(cores)
    ranks: dict[tuple[int, Near, tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for seat in seats:
        near, node = around.near(seat, scope), around.near(seat, Scope.NODE)
        node_cores = () if node.source is Source.ALL else read.of(node, seat.allowed)
        key = seat.gpu, near, read.of(near, seat.allowed), node_cores
        ranks.setdefault(key, []).append(seat.rank)
    return tuple(
        Site(gpu, tuple(own), near, near_cores, node_cores)
        for (gpu, near, near_cores, node_cores), own in ranks.items()
    )


def by_cores(sites: Iterable[Site]) -> dict[tuple[int, ...], list[Site]]:
    """The sites that have the same near cores together, in order."""
    groups: dict[tuple[int, ...], list[Site]] = {}
    for site in sites:
        groups.setdefault(site.cores, []).append(site)
    return groups


def _gpu(topology: Topology, index: int) -> Gpu:
    try:
        return topology.gpu_by_index[index]
    except KeyError:
        raise GPUAffinityError(
            f"GPU {index} is visible, but the topology has only the GPUs "
            f"{sorted(topology.gpu_by_index)}: it contradicts itself, observe it anew"
        ) from None


class _Places:
    """Near CPUs as cores; GPUs mostly share their near CPUs, so each set is read once."""

    def __init__(self, cores: Cores) -> None:
        self._cores = cores
        self._read: dict[tuple[CpuSet, CpuSet], tuple[int, ...]] = {}

    def of(self, near: Near, allowed: CpuSet) -> tuple[int, ...]:
        key = near.cpus, allowed
        if key not in self._read:
            self._read[key] = self._cores.places_within(*key)
        return self._read[key]
