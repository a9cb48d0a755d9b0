"""Who sits where: the GPUs that a job uses, the ranks on each, and the cores near it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpuaff.allocator.cores import Cores
from gpuaff.allocator.modes import Scope
from gpuaff.allocator.near import Near, Neighbourhood
from gpuaff.allocator.reach import union
from gpuaff.cpuset import CpuSet
from gpuaff.errors import GPUAffinityError
from gpuaff.records import dataclass
from gpuaff.topology.model import Gpu, Source, Topology


@dataclass(frozen=True)
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


@dataclass(frozen=True)
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


@dataclass(frozen=True)
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
