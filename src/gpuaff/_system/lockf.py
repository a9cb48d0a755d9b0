"""A lock file of another library, which its users lock with ``fcntl.lockf``.

That is a classic record lock (``POSIX`` in /proc/locks). Open file description locks and those
exclude each other (``fcntl(2)``), while ``flock`` and those do not.
"""

from __future__ import annotations

import fcntl
import os
import struct
from contextlib import suppress

from gpuaff._system import lock_files, locks
from gpuaff._system.kernel import Tree

_WHOLE = 0
"""As a length: up to the end of the file, wherever that is."""


def try_shared(handle: int) -> bool:
    """Lock the whole file, shared, if that is possible at once.

    Raises:
        OSError: the file system, or this kernel, has no such locks.
    """
    return locks.try_range(handle, 0, length=_WHOLE, shared=True)


def wait_for_shared(handle: int) -> None:
    """Stand in the kernel's line for the same, and sleep until it is there.

    The kernel serves those in the line in their order; who tries again and again would never be
    served where there is always somebody in it.

    Raises:
        OSError: there can be no such lock.
    """
    fcntl.fcntl(handle, fcntl.F_OFD_SETLKW, _whole(fcntl.F_RDLCK))


def unlock(handle: int) -> None:
    """Give it back, for forked children too that share the open file."""
    locks.free_range(handle, 0, length=_WHOLE)


def exclusive_holder(handle: int) -> int | None:
    """Who has the file exclusively.

    Returns:
        Its process id, 0 or less when that cannot be told from here; None when nobody has it.
    """
    told = fcntl.fcntl(handle, fcntl.F_OFD_GETLK, _whole(fcntl.F_RDLCK))
    kind, _, _, _, pid = struct.unpack(locks.FLOCK, told)
    return None if kind == fcntl.F_UNLCK else int(pid)


def exclusive_waiters(handle: int) -> frozenset[int]:
    """The processes that sleep until they can have the file exclusively.

    Those of other PID namespaces are 0, or left out where another process there holds the lock.
    Without /proc/locks there are none. That file is read only where somebody has a lock at all: to
    read it stops all processors, 20 ms and more on a large machine.
    """
    if not _is_locked(handle):
        return frozenset()
    file = _listed_as(handle)
    return frozenset(
        lock.pid
        for lock in locks.held_locks()
        if lock.is_waiting and lock.is_write and lock.kind == "POSIX" and lock.file == file
    )


def _is_locked(handle: int) -> bool:
    """Whether anybody else has a lock on the file, shared or not."""
    told = fcntl.fcntl(handle, fcntl.F_OFD_GETLK, _whole(fcntl.F_WRLCK))
    return bool(struct.unpack(locks.FLOCK, told)[0] != fcntl.F_UNLCK)


def _listed_as(handle: int) -> tuple[int, int]:
    """The device number and inode by which /proc/locks calls an open file.

    ``fstat`` may tell another device, on btrfs that of the subvolume. The kernel tells the name
    itself of what is locked through a descriptor (``/proc/self/fdinfo``), so it is locked in the
    one way that means nothing to anybody here.
    """
    with suppress(OSError):
        locks.try_flock(handle, shared=True)
    for line in (Tree().read(f"proc/self/fdinfo/{handle}") or "").splitlines():
        if line.startswith("lock:"):
            major, minor, inode = line.split()[6].split(":")
            return os.makedev(int(major, 16), int(minor, 16)), int(inode)
    return lock_files.identity_of(handle)


def _whole(kind: int) -> bytes:
    return locks.byte_range(kind, 0, _WHOLE)
