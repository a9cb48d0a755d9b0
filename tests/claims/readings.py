"""What the driver could tell of devices, for tests that judge it."""

from __future__ import annotations

from typing import Any

from gpuaff.claims.model import Device, DeviceReading

GIB, MIB = 1 << 30, 1 << 20
CONTEXT = 518 * MIB
"""What a context takes on an H100."""

IDLE = 3 * MIB
"""What is in use on an H100 that nobody uses."""


def gpu(index: int = 0) -> Device:
    return Device(index=index, uuid=f"GPU-{index}", pci_bus_id=f"0000:0{index}:00.0", name="H100")


def instance(number: int, *, index: int = 0, part: int | None = None) -> Device:
    """MIG instance ``number`` of a GPU; ``part`` is its GPU instance."""
    return Device(
        index=index,
        uuid=f"MIG-{number}",
        parent=f"GPU-{index}",
        gpu_instance=number if part is None else part,
    )


def idle(device: Device | None = None, **changes: Any) -> DeviceReading:
    """A device that nobody uses, but for the changes."""
    told: dict[str, Any] = {
        "device": device or gpu(),
        "compute": {},
        "graphics": {},
        "used": IDLE,
        "free": 79 * GIB,
        "total": 80 * GIB,
        "display": False,
    }
    return DeviceReading(**{**told, **changes})


def used_by(*pids: int, device: Device | None = None, **changes: Any) -> DeviceReading:
    """A device on which processes have a context each."""
    held = dict.fromkeys(pids, CONTEXT)
    used = IDLE + CONTEXT * len(pids)
    return idle(device, **{"compute": held, "used": used, "free": 79 * GIB - used, **changes})
