"""Leases: a ``flock`` on each claimed GPU's own directory in sysfs.

Every user can open ``/sys/bus/pci/devices/<address>``, no user can replace it, and the kernel drops
the lock when the last process that has the descriptor is gone (case E6). A device without such a
directory has a lock file in the lock directory; with GPUAFF_LOCK_DIR each has one as well (case
E5). A MIG instance's lease is a lock file, and a shared lock on its GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from gpuaff._system import descriptors, locks
from gpuaff.claims.locking import directory
from gpuaff.claims.model import Device

_SYSFS = "/sys/bus/pci/devices/"


def locks_of(device: Device) -> list[tuple[str, bool]]:
    """The locks that a lease of this device takes, in order: each path, and if it is shared."""
    own = _paths(device.uuid, None if device.is_mig else device.pci_bus_id)
    whole = [] if device.parent is None else _paths(device.parent, device.pci_bus_id)
    return [*((path, True) for path in whole), *((path, False) for path in own)]


def _paths(uuid: str, address: str | None) -> list[str]:
    found = []
    if address is not None and locks.identity(f"{_SYSFS}{address}") is not None:
        found.append(f"{_SYSFS}{address}")
    if not found or directory.is_shared():
        name = uuid.replace("/", "_")  # drivers before R470: MIG-GPU-…/7/0
        found.append(f"{directory.path()}/gpu-{name}")
    return found


def files_of(device: Device) -> list[str]:
    """The kernel's names of the files that hold a lease of this device alone."""
    return [locks.real_name(path) for path, is_shared in locks_of(device) if not is_shared]


class Holder(NamedTuple):
    """The process that has taken a lock of a device; children may share it and have outlived it.

    The pid is None when it is not visible here; ``shared`` is the lock of a GPU with leased MIG
    instances.
    """

    pid: int | None
    shared: bool


def holders(devices: Iterable[Device]) -> dict[str, tuple[Holder, ...]]:
    """The holders that keep others from leasing each device, by UUID, from /proc/locks.

    Looking takes no lock. A process in a PID namespace of its own does not see those outside. The
    holders of a whole GPU include those that share its lock, as the holders of its instances do.
    """
    held: dict[tuple[int, int] | None, list[Holder]] = {}
    for lock in locks.held_locks():
        if lock.kind == "FLOCK" and not lock.is_waiting:
            pid = lock.pid if lock.pid > 0 else None
            held.setdefault(lock.file, []).append(Holder(pid=pid, shared=not lock.is_write))
    found: dict[str, tuple[Holder, ...]] = {}
    for device in devices:
        of_device: dict[Holder, None] = {}
        for path, is_shared in locks_of(device):
            for holder in held.get(locks.identity(path), ()):
                if not (is_shared and holder.shared):
                    of_device[holder] = None
        found[device.uuid] = tuple(of_device)
    return found


class Lease:
    """The locks that a process holds; none at first."""

    def __init__(self) -> None:
        self._marks: dict[int, tuple[int, int, int]] = {}  # by descriptor

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors that hold it."""
        return tuple(self._marks)

    def take(self, devices: Sequence[Device]) -> Device | None:
        """Take the locks of all devices, or of none; return one that another process has leased."""
        try:
            for device in devices:
                if not all(self._take(path, is_shared) for path, is_shared in locks_of(device)):
                    self.release()
                    return device
        except BaseException:
            self.release()
            raise
        return None

    def _take(self, path: str, is_shared: bool) -> bool:
        name, in_sysfs = path.rpartition("/")[2], path.startswith(_SYSFS)
        while True:
            with directory.lock_errors(path):
                handle = locks.open_directory(path) if in_sysfs else directory.open_file(name)
                self._marks[handle] = descriptors.mark_of(handle)
                got_lock = locks.try_flock(handle, shared=is_shared)
            if got_lock and (in_sysfs or directory.still_has(name, handle)):
                return True
            del self._marks[handle]
            descriptors.close(handle)
            if not got_lock:
                return False
            # Its file was removed or replaced: everyone uses the new one.

    def release(self) -> None:
        """Give all locks back, for children that share them, too."""
        self._close(unlock=True)

    def abandon(self) -> None:
        """In a forked child: close the copies, and leave the locks to the parent."""
        self._close(unlock=False)

    def _close(self, *, unlock: bool) -> None:
        while self._marks:
            handle, mark = self._marks.popitem()
            # A daemon may have closed it, and the number may be another file's by now.
            with suppress(OSError):
                if descriptors.mark_of(handle) == mark:
                    if unlock:
                        locks.unlock(handle)
                    descriptors.close(handle)
