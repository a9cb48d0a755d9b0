"""How near GPUs are to each other: by NVLink, by PCI, and by NUMA node and package.

The words are nvidia-smi's (``nvidia-smi topo -m`` prints their legend): ``NV#`` is a bonded set of
NVLinks; ``PIX`` one PCIe switch, ``PXB`` several, ``PHB`` the host bridge, ``NODE`` the NUMA node
and ``SYS`` the link between nodes are what a path over PCIe goes through. ``SOC`` is the old word
for SYS. PSB is a switch like PIX; C2C is NVIDIA's link between chips.
"""

from __future__ import annotations

from collections.abc import Sequence

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    from gpuaff.cpuset import CpuSet
    from gpuaff.topology.model import Gpu, Topology

    Place: TypeAlias = tuple[str | None, int | CpuSet | None, CpuSet | frozenset[int] | None]

_PATHS = {"C2C": 0, "PIX": 1, "PSB": 1, "PXB": 2, "PHB": 3, "NODE": 4, "SYS": 5, "SOC": 5}
_NOWHERE: Place = (None, None, None)


def ranks(topology: Topology, indices: Sequence[int]) -> list[list[int]]:
    """How far apart each two of these GPUs are.

    The link counts first (the more NVLinks the nearer, any of them before PCI, and there
    PIX < PXB < PHB < NODE < SYS), then whether they share a NUMA node, or at least a package. Where
    two cells of the table tell different things of one pair, the farther counts. A pair that the
    table does not tell (``N/A``, no table) is taken for PHB on one PCI bus, for NODE on one NUMA
    node, else for SYS.

    Args:
        topology: the machine; a GPU that it does not have is far from all.
        indices: physical indices.

    Returns:
        A number for positions ``i`` and ``j`` of ``indices``: 0 for the nearest kind of pair that
        there is among them, 1 for the next, and so on without gaps; 0 where ``i`` is ``j``.
    """
    words = _Words(topology)
    places = [_place(topology, topology.gpu_by_index.get(index)) for index in indices]
    kinds = {
        (i, j): _kind(words.between(indices[i], indices[j]), places[i], places[j])
        for i in range(len(indices))
        for j in range(i)
    }
    rank_of = {kind: rank for rank, kind in enumerate(sorted(set(kinds.values())))}
    table = [[0] * len(indices) for _ in indices]
    for (i, j), kind in kinds.items():
        table[i][j] = table[j][i] = rank_of[kind]
    return table


class _Words:
    """What a topology's table tells of two GPUs."""

    def __init__(self, topology: Topology) -> None:
        self._rows = topology.links or ()
        self._row_of = {gpu.index: row for row, gpu in enumerate(topology.gpus)}

    def between(self, one: int, other: int) -> int | None:
        """How far apart by their link; None when neither cell tells."""
        i, j = self._row_of.get(one), self._row_of.get(other)
        if i is None or j is None:
            return None
        told = [far for far in (self._cell(i, j), self._cell(j, i)) if far is not None]
        return max(told, default=None)

    def _cell(self, row: int, column: int) -> int | None:
        if row >= len(self._rows) or column >= len(self._rows[row]):
            return None
        word = self._rows[row][column]
        if word.startswith("NV") and word[2:].isdecimal() and len(word) < 6:
            return -int(word[2:])
        return _PATHS.get(word)


def _kind(link: int | None, one: Place, other: Place) -> tuple[int, int]:
    """What pairs are ordered by: their link, then 0 on one NUMA node, 1 in one package, else 2."""
    bus, node, package = ((a is not None and a == b) for a, b in zip(one, other, strict=True))
    if link is None:
        link = _PATHS["PHB" if bus else "NODE" if node else "SYS"]
    return link, 0 if node else 1 if package else 2


def _place(topology: Topology, gpu: Gpu | None) -> Place:
    """A GPU's PCI bus, its NUMA node and its package, each by whatever tells them apart."""
    if gpu is None:
        return _NOWHERE
    near = gpu.local_cpus or gpu.node_cpus or _node_cpus(topology, gpu.numa_node)
    bus = gpu.pci_bus_id.rpartition(":")[0] if gpu.pci_bus_id else None
    node = near if gpu.numa_node is None else gpu.numa_node
    if topology.packages is None or near is None:
        return bus, node, gpu.socket_cpus
    at = frozenset(package.id for package in topology.packages if not near.isdisjoint(package.cpus))
    return bus, node, at or None


def _node_cpus(topology: Topology, number: int | None) -> CpuSet | None:
    found = (node.cpus for node in topology.numa_nodes or () if node.id == number)
    return next(found, None) or None
