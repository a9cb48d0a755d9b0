"""The records that describe a machine, and two facts about one process on it.

These are which CPUs it may use (``allowed``) and which GPUs CUDA shows it (``visible``). What the
source of a :class:`Topology` does not contain is None, and ``notes`` say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from gpuaff._system.nvml_records import MigInstance as MigInstance
from gpuaff.cpuset import CpuSet
from gpuaff.notices import Notice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuaff.topology import Methods
else:
    Methods = object  # gpuaff.topology adds them: records import nothing that makes them


# The records here, and all that ``set_affinity`` uses, are named tuples: dataclasses import inspect
# and generate classes, which costs each process 26 ms of CPU time.


class Word(str, Enum):
    """An enum member that is, prints and compares as its string."""

    def __str__(self) -> str:
        return str(self.value)


class Source(Word):
    """Where the CPUs near a GPU are from; in a plan, which step of the search found them."""

    NVML = "nvml"
    """The driver."""
    SYSFS = "sysfs"
    """The PCI device in sysfs (``local_cpulist``, ``numa_node``)."""
    GIVEN = "given"
    """A saved or pasted description, or the caller."""
    NEAREST = "nearest"
    """The nearest NUMA node, by distance, that has allowed CPUs."""
    ALL = "all"
    """Unknown, so all allowed CPUs."""


class Package(NamedTuple):
    """A socket with its online CPUs; ``id`` is the kernel's, or numbered where it has none."""

    id: int
    cpus: CpuSet


class NumaNode(NamedTuple):
    """A NUMA node. It may have no CPUs (GPU memory, CXL) or no memory.

    Attributes:
        id: the kernel's node id; ids may be sparse.
        cpus: its online CPUs.
        has_memory: whether it has memory; None when unknown.
        distances: the ACPI SLIT distances (10 = itself) to every node of the topology, in the
            order of :attr:`Topology.numa_nodes`; None when unknown.
    """

    id: int
    cpus: CpuSet
    has_memory: bool | None = None
    distances: tuple[int, ...] | None = None


class Gpu(NamedTuple):
    """A physical GPU.

    Attributes:
        index: NVML's index, which is the order of PCI addresses.
        uuid: the full ``GPU-…`` UUID.
        pci_bus_id: the PCI address as sysfs spells it, ``0000:07:00.0``.
        name: the product name.
        node_cpus: the CPUs of its NUMA node, from the best ``source``. None when unknown; never
            empty.
        socket_cpus: the CPUs of its socket, from the same source; None when unknown.
        local_cpus: the PCI device's ``local_cpulist`` in sysfs.
        numa_node: the NUMA node next to it, which may have no CPUs. −1 in sysfs is None (A7).
        memory_node: the NUMA node that *is* its memory (GH200: "GPU NUMA ID"); a place for
            memory, never for a process.
        source: where ``node_cpus`` and ``socket_cpus`` are from; None when both are unknown.
        mig: its MIG instances; None when MIG is off or unknown, empty when it is on and has no
            instance.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index
    uuid: str | None = None
    pci_bus_id: str | None = None
    name: str | None = None
    node_cpus: CpuSet | None = None
    socket_cpus: CpuSet | None = None
    local_cpus: CpuSet | None = None
    numa_node: int | None = None
    memory_node: int | None = None
    source: Source | None = None
    mig: tuple[MigInstance, ...] | None = None


class Accelerator(NamedTuple):
    """A GPU or other accelerator on the PCI bus, whether or not this process may use it.

    Attributes:
        pci_bus_id: its PCI address as sysfs spells it, ``0000:07:00.0``.
        vendor: its PCI vendor, four digits: ``10de`` (NVIDIA), ``1002`` (AMD), ``8086`` (Intel).
        local_cpus: the CPUs next to it; None when unknown, never empty.
        numa_node: its NUMA node, which may have no CPUs; None when unknown.
    """

    pci_bus_id: str
    vendor: str
    local_cpus: CpuSet | None = None
    numa_node: int | None = None


class _Members(NamedTuple):
    cpus: CpuSet = frozenset()
    allowed: CpuSet = frozenset()
    cores: tuple[CpuSet, ...] | None = None
    efficiency_cpus: CpuSet = frozenset()
    packages: tuple[Package, ...] | None = None
    l3: tuple[CpuSet, ...] | None = None
    numa_nodes: tuple[NumaNode, ...] | None = None
    gpus: tuple[Gpu, ...] = ()
    links: tuple[tuple[str, ...], ...] | None = None
    visible: tuple[int, ...] = ()
    accelerators: tuple[Accelerator, ...] | None = None
    notes: tuple[Notice, ...] = ()


class Topology(_Members, Methods):
    """A machine, and what one process may use of it.

    Attributes:
        cpus: the online CPUs; empty when unknown.
        allowed: the CPUs that the process may use, a subset of ``cpus``.
        cores: the online CPUs of each physical core, ordered by their lowest id.
        efficiency_cpus: the CPUs of the slow cores of a hybrid processor (E cores, LITTLE).
        packages: the sockets, by id.
        l3: the CPUs of each L3 domain, ordered by their lowest id.
        numa_nodes: the NUMA nodes, by id.
        gpus: the physical GPUs, by index.
        links: how GPU ``i`` and GPU ``j`` (positions in ``gpus``) are connected, in
            nvidia-smi's words (``NV18``, ``PIX``, ``SYS``, ``X``).
        visible: the physical index of each CUDA device of the process, in CUDA's order.
        accelerators: every accelerator on the PCI bus, by address, from sysfs alone: the claimants
            of ``partition="machine"`` (``docs/concepts.md``). None when unknown.
        notes: what the source lacks or contradicts.
    """

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Topology cannot be changed: use _replace({name}=…)")

    @cached_property
    def gpu_by_index(self) -> Mapping[int, Gpu]:
        """The GPUs by their physical index."""
        return {gpu.index: gpu for gpu in self.gpus}

    def nodes_of(self, cpus: CpuSet) -> tuple[int, ...]:
        """The ids of the NUMA nodes that hold any of these CPUs."""
        return tuple(node.id for node in self.numa_nodes or () if not cpus.isdisjoint(node.cpus))

    def with_allowed(self, allowed: CpuSet) -> Topology:
        """The same machine for a process that may use only these CPUs (∩ the online ones)."""
        return self._replace(allowed=allowed & self.cpus if self.cpus else allowed)
