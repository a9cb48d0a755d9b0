"""What claims are about: devices, how they are used, and what was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from gpuaff.records import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Device:
    """What can be claimed: a whole GPU, or one MIG instance of a GPU.

    Attributes:
        index: NVML's index of the GPU, or of the GPU that the instance is part of.
        uuid: ``GPU-…`` or ``MIG-…``.
        pci_bus_id: the GPU's PCI address as sysfs spells it, ``0000:07:00.0``; None when unknown.
        name: the product name.
        parent: for a MIG instance, the UUID of its GPU.
        gpu_instance: for a MIG instance, the GPU instance that it is part of. All parts of one
            have the same memory.
    """

    index: int
    uuid: str
    pci_bus_id: str | None = None
    name: str | None = None
    parent: str | None = None
    gpu_instance: int | None = None

    @property
    def is_mig(self) -> bool:
        """Whether it is a MIG instance."""
        return self.parent is not None

    def __str__(self) -> str:
        return f"MIG instance {self.uuid}" if self.is_mig else f"GPU {self.index}"


class ComputeMode(str, Enum):
    """Who may have a context on a GPU (``nvmlComputeMode_t``; cases E13, E16)."""

    DEFAULT = "default"
    EXCLUSIVE_THREAD = "exclusive_thread"
    PROHIBITED = "prohibited"
    EXCLUSIVE_PROCESS = "exclusive_process"


@dataclass(frozen=True, kw_only=True)
class DeviceReading:
    """What the driver says about the use of a device; None is what it does not say.

    Attributes:
        device: which one.
        compute: the processes with a context and the bytes that each has (None: not told).
        graphics: the processes that draw, likewise. A process may be in both.
        used: bytes in use, without what the driver keeps for itself.
        free: bytes that are free.
        total: bytes that there are.
        utilization: how busy it was lately, in percent.
        compute_mode: who may have a context on it.
        display: whether a screen is driven by it.
        denied: whether this process may not use it at all (a device cgroup).
        lost: whether it has fallen off the bus, or was lost in another way.
        problems: what failed, in words.
    """

    device: Device
    compute: Mapping[int, int | None] | None = None
    graphics: Mapping[int, int | None] | None = None
    used: int | None = None
    free: int | None = None
    total: int | None = None
    utilization: int | None = None
    compute_mode: ComputeMode | None = None
    display: bool | None = None
    denied: bool = False
    lost: bool = False
    problems: tuple[str, ...] = ()


class Busy(str, Enum):
    """Why a device is not free."""

    LEASED = "leased"
    """Somebody holds its lease."""
    PROCESSES = "processes"
    """Others compute on it."""
    MEMORY = "memory"
    """Memory is in use that no visible process explains."""
    EXCLUSIVE = "exclusive"
    """Its compute mode lets one process in, and one is there."""
    PROHIBITED = "prohibited"
    """Its compute mode lets nobody in."""
    UNREADABLE = "unreadable"
    """The driver does not tell whether it is free, or whether it fits what was asked for."""
    LOST = "lost"
    """It has fallen off the bus."""
    DENIED = "denied"
    """This process may not use it."""
    SMALL = "small"
    """It has less memory in all than was asked for."""
    MEMORY_LOW = "memory_low"
    """It has less free memory than was asked for."""
    WORKING = "working"
    """It works harder than was asked for."""

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Whether a device is free.

    Attributes:
        device: which one.
        busy: why it is not free; None when it is.
        pids: the processes that have it, as far as they are known; ascending.
        message: one line for people: why, and who; empty when it is free.
        leaving: whether those who have it are about to be gone: they have ended, and the driver
            still lists them (0.1 s on a real machine).
        lasting: whether waiting would not help.
    """

    device: Device
    busy: Busy | None = None
    pids: tuple[int, ...] = ()
    message: str = ""
    leaving: bool = False
    lasting: bool = False


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What is asked of each device.

    Attributes:
        min_free_memory: bytes that must be free on each.
        max_utilization: percent that none may be busier than.
    """

    min_free_memory: int | None = None
    max_utilization: int | None = None


@dataclass(frozen=True, kw_only=True)
class ClaimedGpu:
    """A GPU, or MIG instance, that a claim holds.

    Attributes:
        index: what nvidia-smi calls the GPU; for a MIG instance, the GPU that it is part of.
        uuid: ``GPU-…`` or ``MIG-…``.
        pci_bus_id: the GPU's PCI address as sysfs spells it, ``0000:07:00.0``; None when the driver
            does not tell.
        local: CUDA's number of it in this process: torch's ``cuda:<local>``.
        name: the product name.
    """

    index: int
    uuid: str
    pci_bus_id: str | None
    local: int
    name: str | None = None


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """How a wait stands: what ``on_wait`` is called with.

    Attributes:
        position: how many who want any of the same GPUs come before; 0 is next.
        waited: for how long so far, in seconds.
        wanted: how many GPUs are asked for.
        free: how many of those that fit are free.
        reasons: one line for each GPU that is not.
    """

    position: int
    waited: float
    wanted: int
    free: int
    reasons: tuple[str, ...] = field(default=())
