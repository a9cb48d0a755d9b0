"""What the NVIDIA driver says about GPUs, as records; None stands for what it does not say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from gpuaff.cpuset import CpuSet

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

Matrix: TypeAlias = tuple[tuple[str, ...], ...]
"""How GPU ``i`` and GPU ``j`` are connected, in the words of ``nvidia-smi topo -m``."""

_PCI_ADDRESS = re.compile(r"([0-9a-f]{1,8}):([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-7])", re.ASCII)


class MigInstance(NamedTuple):
    """A MIG compute instance of a GPU (case D2).

    Attributes:
        uuid: its ``MIG-…`` UUID.
        gpu_instance: the GPU instance id (``gi``); −1 when unknown.
        compute_instance: the compute instance id (``ci``); −1 when unknown.
    """

    uuid: str
    gpu_instance: int
    compute_instance: int


class GpuReading(NamedTuple):
    """Where a GPU is. Sets are never empty: an empty mask is None (case A1)."""

    index: int  # type: ignore[assignment]  # hides tuple.index
    uuid: str | None = None
    name: str | None = None
    pci_bus_id: str | None = None  # as sysfs spells it, ``0000:07:00.0``
    node_cpus: CpuSet | None = None
    socket_cpus: CpuSet | None = None
    memory_nodes: frozenset[int] | None = None  # the NUMA nodes whose memory is next to it
    memory_node: int | None = None  # the NUMA node that is its own memory (GH200)
    mig: tuple[MigInstance, ...] | None = None  # None: off, not supported or unknown (case D2)
    denied: bool = False  # by a device cgroup
    lost: bool = False  # it has fallen off the bus, or NVML gives no handle for another reason
    problems: tuple[str, ...] = ()  # what failed, in words


class Device(NamedTuple):
    """What can be claimed: a whole GPU, or one MIG instance of the GPU ``parent`` (its UUID)."""

    index: int  # type: ignore[assignment]  # hides tuple.index
    uuid: str
    pci_bus_id: str | None = None
    name: str | None = None
    parent: str | None = None
    gpu_instance: int | None = None  # its compute instances share its memory

    @property
    def is_mig(self) -> bool:
        """Whether it is a MIG instance."""
        return self.parent is not None

    def __str__(self) -> str:
        return f"MIG instance {self.uuid}" if self.is_mig else f"GPU {self.index}"


class LeftOut(NamedTuple):
    """A GPU that NVML counts and that cannot be claimed, though this process may use it."""

    index: int  # type: ignore[assignment]  # hides tuple.index
    why: str
    cut: bool = False  # it is in MIG mode and has no instance; otherwise it does not respond

    def __str__(self) -> str:
        return f"GPU {self.index} is left out: {self.why}"


class ComputeMode(str, Enum):
    """Which processes may have a context on a GPU (``nvmlComputeMode_t``; cases E13, E16)."""

    DEFAULT = "default"
    EXCLUSIVE_THREAD = "exclusive_thread"
    PROHIBITED = "prohibited"
    EXCLUSIVE_PROCESS = "exclusive_process"


class DeviceReading(NamedTuple):
    """How a device is used."""

    device: Device
    # The bytes that each process has (None: unknown), by its id in the first PID namespace (case
    # E15). One may compute and draw.
    compute: Mapping[int, int | None] | None = None  # those with a CUDA context
    graphics: Mapping[int, int | None] | None = None
    used: int | None = None  # in bytes, without what the driver keeps for itself
    free: int | None = None
    total: int | None = None
    utilization: int | None = None  # how busy it was lately, in percent
    compute_mode: ComputeMode | None = None
    display: bool | None = None  # whether it drives a screen
    lost: bool = False
    problems: tuple[str, ...] = ()  # what failed, in words


def pci_address(text: str | None) -> str | None:
    """NVML's ``00000000:07:00.0`` as sysfs spells it, ``0000:07:00.0``; None when it is none."""
    # The domain keeps at least four digits (``10001:00:00.0``)
    match = _PCI_ADDRESS.fullmatch((text or "").strip().lower())
    if match is None:
        return None
    domain, bus, device, function = (int(part, 16) for part in match.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function}"
