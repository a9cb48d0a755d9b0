"""Devices, how they are used, and what a claim requests of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from gpuaff._system.nvml_records import ComputeMode, Device, DeviceReading, LeftOut

__all__ = [
    "Busy", "ClaimedGpu", "ComputeMode", "Demand", "Device", "DeviceReading", "LeftOut", "Usage",
    "Waiting",
]  # fmt: skip


class Busy(str, Enum):
    """Why a device is not free."""

    LEASED = "leased"  # another claim holds its lease
    PROCESSES = "processes"  # other processes compute on it
    MEMORY = "memory"  # memory is in use that no visible process explains
    EXCLUSIVE = "exclusive"  # it is in exclusive mode, and already used
    PROHIBITED = "prohibited"  # its compute mode allows no process
    UNREADABLE = "unreadable"  # it is not known whether it is free, or meets the requirements
    LOST = "lost"  # it has fallen off the bus
    SMALL = "small"  # it has less memory in total than was requested
    MEMORY_LOW = "memory_low"  # it has less free memory than was requested
    WORKING = "working"  # its utilization exceeds ``max_utilization``
    KEPT = "kept"  # it is idle, and an earlier waiter may choose it


class Usage(NamedTuple):
    """Whether a device is free, and else why, by which processes."""

    device: Device
    busy: Busy | None = None
    pids: tuple[int, ...] = ()  # as far as they are known; ascending
    message: str = ""  # one line with the device's name; empty when it is free
    leaving: bool = False  # they are exiting, or have ended and are still listed (0.1 s)
    exiting: bool = False  # some of them are exiting, which may take seconds
    lasting: bool = False  # waiting would not help

    @classmethod
    def leased(cls, device: Device, why: str, *, exiting: bool) -> Usage:
        """Of a device whose lease another process holds."""
        message = f"{device}: {why}{', which is exiting' if exiting else ''}"
        return cls(device, Busy.LEASED, message=message, leaving=exiting, exiting=exiting)


class Demand(NamedTuple):
    """The requirements that each device must meet, in bytes and in percent."""

    min_free_memory: int | None = None
    max_utilization: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedGpu:
    """A GPU, or MIG instance, that a claim holds.

    Attributes:
        index: the GPU's index in nvidia-smi; for a MIG instance, that of its GPU.
        uuid: ``GPU-…`` or ``MIG-…``.
        pci_bus_id: the GPU's PCI address as sysfs spells it, ``0000:07:00.0``; None when unknown.
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
    """The state of a wait, for ``on_wait``.

    Attributes:
        position: how many earlier waiters want any of the same GPUs; 0 is next.
        waited: for how long so far, in seconds.
        wanted: how many GPUs are requested.
        free: how many candidates are free, and kept for no earlier waiter.
        reasons: one line for each candidate that is not.
    """

    position: int
    waited: float
    wanted: int
    free: int
    reasons: tuple[str, ...] = ()
