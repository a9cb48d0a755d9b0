"""The guard: one claimer at a time chooses among the free GPUs and leases them.

So a claim gets all the GPUs that it requested or none, and two claims do not take half each. That
no GPU is leased twice does not depend on it. The driver is asked before, so a process that hangs
in it blocks no other.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# Not its class FileLock, which opens the path itself: it refuses files of other users in a sticky
# directory, accepts FIFOs and hard links, and, for Python 3.10, truncates the file.
from filelock import lock_descriptor, unlock_descriptor

from gpuaff._system import descriptors, locks
from gpuaff._system.interrupts import interruptible
from gpuaff.claims.locking import directory
from gpuaff.errors import LockDirectoryError

NAME = "guard"

# In seconds.
LIMIT = 20.0  # leasing takes milliseconds, and the driver is not asked meanwhile
_PAUSE = 0.005  # between two tries: a blocking flock has no time limit


@contextmanager
def guarded(*, limit: float = LIMIT) -> Iterator[None]:
    """Hold the guard; LockDirectoryError where another process has it for too long."""
    end = time.monotonic() + limit
    handle = -1
    try:
        while handle == -1 or not directory.still_has(NAME, handle):
            _close(handle)
            handle = directory.open_file(NAME)
            descriptors.private.add(handle)
            _lock(handle, end, limit)
        yield
    finally:
        _close(handle)


def _close(handle: int) -> None:
    if handle in descriptors.private:  # a forked child has closed its copy
        with suppress(OSError):  # a file system without locks
            unlock_descriptor(handle)  # a child that is being forked may have a copy
        descriptors.close(handle)


def _lock(handle: int, end: float, limit: float) -> None:
    with directory.lock_errors(f"{directory.path()}/{NAME}"):
        while not lock_descriptor(handle, blocking=False):
            if time.monotonic() >= end:
                raise _held_too_long(handle, limit)
            with interruptible():
                time.sleep(_PAUSE)


def _held_too_long(handle: int, limit: float) -> LockDirectoryError:
    file = locks.identity(handle)
    pids = [lock.pid for lock in locks.held_locks() if lock.file == file and not lock.is_waiting]
    holder = directory.holder_in_words(max(pids, default=None))
    return LockDirectoryError(
        f"{directory.path()}/{NAME}",
        f"{holder} has locked it for more than {limit:.0f} s, while leasing GPUs takes "
        "milliseconds: see whether it is stopped, and continue or end it",
    )
