"""What programs that lock begin with (claims/lockers.py): devices, leases, other users."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from gpuaff.claims.locking.leases import Lease
from gpuaff.claims.locking.queue import Place
from gpuaff.claims.model import Device
from gpuaff.errors import LockDirectoryError


def become(uid: int) -> None:
    """Another user of the machine (root only)."""
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)


def gpu(number: int, address: str | None = None) -> Device:
    """A GPU without a directory in sysfs, unless it is told."""
    return Device(index=number, uuid=f"GPU-{number}", pci_bus_id=address)


def instance(number: int, *, of: int = 0) -> Device:
    """A MIG instance."""
    return Device(index=of, uuid=f"MIG-{number}", parent=f"GPU-{of}")


def leased(*devices: Device) -> Lease | str:
    """A lease, or what is in the way. It excludes others of this process as those of others."""
    lease = Lease()
    taken = lease.take(devices)
    return lease if taken is None else str(taken)


def free(*devices: Device) -> bool:
    """Whether they can be leased."""
    lease = leased(*devices)
    if isinstance(lease, Lease):
        lease.release()
    return isinstance(lease, Lease)


def stand(*gpus: str) -> Place:
    """A place in the queue, for one of some GPUs."""
    place = Place()
    place.join(place.entries(), wanted=1, gpus=frozenset(gpus or ["GPU-0"]))
    return place


def hear() -> str:
    return sys.stdin.readline().strip()


def refused(work: Callable[[], object]) -> str:
    """What an error says."""
    try:
        work()
    except LockDirectoryError as error:
        return str(error)
    return "not refused"
