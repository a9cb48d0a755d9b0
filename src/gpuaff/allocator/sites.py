"""Who sits where: the GPUs that a job uses, the ranks on each, and the cores near it."""

from __future__ import annotations

from collections.abc import Iterable

from gpuaff.allocator.cores import Cores
from gpuaff.allocator.modes import Scope
from gpuaff.allocator.near import Near, Neighbourhood
from gpuaff.errors import GPUAffinityError
from gpuaff.records import dataclass
from gpuaff.topology.model import Gpu, Source, Topology


@dataclass(frozen=True)
class Site:
    """One GPU that the job uses.

    Attributes:
        gpu: its physical index.
        ranks: the ranks on it, ascending.
        near: the CPUs near it, by the scope that was asked for.
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
    """

    cores: tuple[int, ...]
    own: bool = True


def find_sites(
    topology: Topology, nproc: int, scope: Scope, cores: Cores, around: Neighbourhood
) -> tuple[Site, ...]:
    """The GPUs of ranks 0 … ``nproc`` − 1, in the order in which ranks first use them.

    Rank r uses the visible GPU r modulo their number (gpu-affinity rule 2, and several ranks
    on a GPU where there are more ranks than GPUs).

    Raises:
        GPUAffinityError: a visible GPU is not among the machine's.
    """
    ranks: dict[int, list[int]] = {}
    for rank in range(nproc):
        ranks.setdefault(topology.visible[rank % len(topology.visible)], []).append(rank)
    places = _Places(cores)
    sites = []
    for index, own in ranks.items():
        gpu = _gpu(topology, index)
        near, node = around.near(gpu, scope), around.near(gpu, Scope.NODE)
        node_cores = () if node.source is Source.ALL else places.of(node)
        sites.append(Site(index, tuple(own), near, places.of(near), node_cores))
    return tuple(sites)


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
        self._read: dict[frozenset[int], tuple[int, ...]] = {}

    def of(self, near: Near) -> tuple[int, ...]:
        if near.cpus not in self._read:
            self._read[near.cpus] = self._cores.places(near.cpus)
        return self._read[near.cpus]
