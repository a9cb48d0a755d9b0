"""Leases: a ``flock`` on each claimed GPU's own directory in sysfs.

Every user can open ``/sys/bus/pci/devices/<address>``, and no user can delete or replace it; no
umask and no stale file play a part, and the kernel drops the lock when the last process that has
the descriptor is gone (case E6). A device without such a directory has a lock file in the lock
directory; with GPUAFF_LOCK_DIR each device has one as well, for containers, whose sysfs may be
another one (case E5). The lease of a MIG instance is a lock file, and a shared lock on its GPU,
which keeps others from leasing the whole GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from gpuaff._system import descriptors, locks
from gpuaff.claims.locking import lockdir
from gpuaff.claims.model import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """One lock of a device.

    Attributes:
        path: what is locked.
        name: its name in the lock directory; None for a directory in sysfs.
        shared: whether other leases may hold it too (the GPU of a MIG instance).
    """

    path: str
    name: str | None
    shared: bool = False


def locks_of(device: Device) -> tuple[Lock, ...]:
    """The locks that a lease of this device takes, in their order."""
    found = list(_locks(device.uuid, None if device.is_mig else device.pci_bus_id))
    if device.parent is not None:
        whole = _locks(device.parent, device.pci_bus_id)
        found = [Lock(path=one.path, name=one.name, shared=True) for one in whole] + found
    return tuple(found)


def _locks(uuid: str, address: str | None) -> Iterable[Lock]:
    directory = f"/sys/bus/pci/devices/{address}"
    in_sysfs = address is not None and locks.identity(directory) is not None
    if in_sysfs:
        yield Lock(path=directory, name=None)
    if not in_sysfs or lockdir.is_shared():
        name = f"gpu-{uuid.replace('/', '_')}"  # drivers before R470: MIG-GPU-…/7/0
        yield Lock(path=f"{lockdir.path()}/{name}", name=name)


def files_of(device: Device) -> tuple[str, ...]:
    """The kernel's names of the files that hold a lease of this device alone."""
    return tuple(locks.real_name(lock.path) for lock in locks_of(device) if not lock.shared)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that holds a lock of a device.

    Attributes:
        pid: the process that has taken it; children may share it, and may have outlived that
            process. None when it is not visible here.
        shared: whether it is shared: the GPU has leased MIG instances.
    """

    pid: int | None
    shared: bool


def holders(devices: Iterable[Device]) -> dict[str, tuple[Holder, ...]]:
    """The holders that keep others from leasing each device, by UUID, from /proc/locks.

    Looking takes no lock. The holders of a whole GPU include those that share its lock, as the
    holders of its instances do.

    A process in a PID namespace of its own does not see the locks of those outside.
    """
    held: dict[tuple[int, int], list[Holder]] = {}
    for lock in locks.held_locks():
        if lock.kind == "FLOCK" and not lock.is_waiting:
            pid = lock.pid if lock.pid > 0 else None
            held.setdefault(lock.file, []).append(Holder(pid=pid, shared=not lock.is_write))
    return {device.uuid: tuple(_holders_of(device, held)) for device in devices}


def _holders_of(
    device: Device, held: Mapping[tuple[int, int], Sequence[Holder]]
) -> Iterable[Holder]:
    from gpuaff._system.locks import (
        locked_name_of,  # only descriptions of holders need it
    )

    found: list[Holder] = []
    for lock in locks_of(device):
        # sysfs is no btrfs, and its directories are many.
        file = locks.identity(lock.path) if lock.name is None else locked_name_of(lock.path)
        for holder in () if file is None else held.get(file, ()):
            if not (lock.shared and holder.shared) and holder not in found:
                found.append(holder)
    return found


@dataclass()
class Lease:
    """The locks that a process holds.

    Attributes:
        handles: their descriptors, and what distinguishes each from a later one of its number.
    """

    handles: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors that hold it."""
        return tuple(self.handles)

    def take(self, devices: Sequence[Device]) -> Device | None:
        """Take the locks of all devices, or of none.

        Returns:
            None; or a device that another process has leased.

        Raises:
            LockDirectoryError: a lock file, or a directory in sysfs, cannot be used.
        """
        try:
            for device in devices:
                if not all(map(self._take, locks_of(device))):
                    self.release()
                    return device
        except BaseException:
            self.release()
            raise
        return None

    def _take(self, lock: Lock) -> bool:
        while True:
            with lockdir.using(lock.path):
                handle = _open(lock)
                self.handles[handle] = locks.mark_of(handle)
                is_taken = locks.try_flock(handle, shared=lock.shared)
            if is_taken and (lock.name is None or lockdir.still_has(lock.name, handle)):
                return True
            self.handles.pop(handle)
            descriptors.close(handle)
            if not is_taken:
                return False
            # Its file was removed or replaced: everyone uses the new one.

    def release(self) -> None:
        """Give all locks back, for children that share them, too.

        A descriptor that the process has closed meanwhile may be another file's by now.
        """
        while self.handles:
            handle, mark = self.handles.popitem()
            with suppress(OSError):
                if locks.mark_of(handle) == mark:
                    locks.unlock(handle)
                    descriptors.close(handle)

    def abandon(self) -> None:
        """In a forked child: close the copies, and leave the locks to the parent.

        A daemon has closed them already, and may have leased under the same numbers since.
        """
        while self.handles:
            handle, mark = self.handles.popitem()
            with suppress(OSError):
                if locks.mark_of(handle) == mark:
                    descriptors.close(handle)


def _open(lock: Lock) -> int:
    if lock.name is None:
        return locks.open_directory(lock.path)
    return lockdir.open_file(lock.name)
