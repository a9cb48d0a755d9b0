"""What the driver says about the use of GPUs and MIG instances, as records."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from gpuaff.records import dataclass


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


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A GPU that NVML counts and that cannot be claimed, though this process may use it.

    Attributes:
        index: NVML's index.
        why: what failed, in words.
        cut: whether it is in MIG mode and has no instance; else it does not respond.
    """

    index: int
    why: str
    cut: bool = False

    def __str__(self) -> str:
        return f"GPU {self.index} is left out: {self.why}"


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
