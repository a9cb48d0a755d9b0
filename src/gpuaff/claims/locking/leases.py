"""Leases: a ``flock`` on each claimed GPU's own directory in sysfs.

Every user can open ``/sys/bus/pci/devices/<address>``, no user can replace it, and its lock ends
with the last process that has it open (case E6). A device without such a directory has a lock file;
with GPUAFF_LOCK_DIR every device has one, too (case E5). A MIG instance has a lock file, and a
shared lock on its GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress

from gpuaff._system import descriptors, env, locks
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
    if not found or env.option("lock_dir") is not None:
        found.append(f"{directory.path()}/gpu-{uuid}")
    return found


def holders(devices: Iterable[Device]) -> dict[str, int | None]:
    """The processes that keep others from leasing devices, by UUID, from /proc/locks.

    Each is the one that has taken the lock, which children may have outlived; None where it is not
    visible here, as outside of this PID namespace, whose locks may even be missing.
    """
    held = [one for one in locks.held_locks() if one.kind == "FLOCK" and not one.is_waiting]
    found: dict[str, int | None] = {}
    for device in devices:
        for path, is_shared in locks_of(device):
            file = locks.identity(path)
            for lock in held:
                if lock.file == file and (lock.is_write or not is_shared):
                    pid = lock.pid if lock.pid > 0 else None
                    found[device.uuid] = found.get(device.uuid) or pid
    return found


class Lease:
    """The locks that a process holds; none at first."""

    def __init__(self) -> None:
        self._marks: dict[int, tuple[int, ...]] = {}  # by descriptor
        self._pid = os.getpid()

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
        """Give all locks back, for children that share them, too; a child closes its copies."""
        while self._marks:
            handle, mark = self._marks.popitem()
            # A daemon may have closed it, and the number may be another file's by now.
            if descriptors.mark_of(handle) == mark:
                if os.getpid() == self._pid:
                    with suppress(OSError):  # a file system without locks
                        locks.unlock(handle)
                descriptors.close(handle)
