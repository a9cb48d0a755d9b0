"""What claims are about: devices, how they are used, and what was asked for.

What the driver says of devices comes from its gate, and belongs to these records.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from gpuaff._system.nvml_usage import ComputeMode, Device, DeviceReading, LeftOut

__all__ = [
    "Busy",
    "ClaimedGpu",
    "ComputeMode",
    "Demand",
    "Device",
    "DeviceReading",
    "LeftOut",
    "Usage",
    "Waiting",
]


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
    KEPT = "kept"
    """It is idle, and an earlier waiter may choose it."""

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Whether a device is free.

    Attributes:
        device: which one.
        busy: why it is not free; None when it is.
        pids: the processes that have it, as far as they are known; ascending.
        message: one line for people: why, and who; empty when it is free.
        leaving: whether those who have it are about to be gone: they are exiting, or have ended
            and the driver still lists them (0.1 s on a real machine).
        exiting: whether some of these are exiting, which may take seconds.
        lasting: whether waiting would not help.
    """

    device: Device
    busy: Busy | None = None
    pids: tuple[int, ...] = ()
    message: str = ""
    leaving: bool = False
    exiting: bool = False
    lasting: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What is asked of each device.

    Attributes:
        min_free_memory: bytes that must be free on each.
        max_utilization: percent that none may be busier than.
    """

    min_free_memory: int | None = None
    max_utilization: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """How a wait stands: what ``on_wait`` is called with.

    Attributes:
        position: how many who want any of the same GPUs come before; 0 is next.
        waited: for how long so far, in seconds.
        wanted: how many GPUs are asked for.
        free: how many of those that fit are free, and kept for no earlier waiter.
        reasons: one line for each GPU that is not.
    """

    position: int
    waited: float
    wanted: int
    free: int
    reasons: tuple[str, ...] = field(default=())
