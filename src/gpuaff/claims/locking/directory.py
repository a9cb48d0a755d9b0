"""The lock directory: one path for everyone on this machine.

``GPUAFF_LOCK_DIR``, else ``/tmp/gpuaff``. It holds the guard, the registry (holders and waiters)
and lock files for devices that have none in sysfs. Where the variable is set, for containers that
mount one directory, each claim takes a lock file there as well (case E5).
"""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager

# Not its class FileLock, which opens the path itself: it refuses files of other users in a sticky
# directory, accepts FIFOs and hard links, and, for Python 3.10, truncates the file.
from filelock import lock_descriptor, unlock_descriptor

from gpuaff._system import descriptors, env, kernel, locks
from gpuaff._system.interrupts import interruptible
from gpuaff.errors import LockDirectoryError
from gpuaff.formatting import process_in_words

# Not /run/lock or /dev/shm: the first belongs to root on many systems, and systemd empties the
# second when a user logs out. Not the home: it is often on a network file system.
DEFAULT = "/tmp/gpuaff"  # noqa: S108 - the one place where every user may write

# Writable for all, and sticky: systemd-tmpfiles leaves such files alone (the XDG base directory
# specification); else it would remove a registry that jobs of weeks still use (case E9).
_KEPT = 0o1666

_GUARD = "guard"
# In seconds.
_GUARD_LIMIT = 20.0  # leasing takes milliseconds, and the driver is not asked meanwhile
_MAKING = 0.1  # making a file takes microseconds
_PAUSE = 0.005  # between two tries: a blocking flock has no time limit

_README = b"""Here gpuaff coordinates which process holds or waits for which GPU.
docs/lease-protocol.md in its sources says what the files are. Do not remove them.
"""

_REMEDY = "remove it, ask its owner to, or set GPUAFF_LOCK_DIR to another folder for everyone"
_OTHER_REMEDIES = {
    errno.EMFILE: "close some, or raise the limit (ulimit -n)",
    errno.ENFILE: "close some, or raise the limit (ulimit -n)",
    errno.ENOENT: "make that one, or set GPUAFF_LOCK_DIR to another folder for everyone",
}


def path() -> str:
    """The lock directory's path; an error if it would differ in each working directory."""
    found = env.option("lock_dir") or DEFAULT
    if not found.startswith("/"):
        expected = "GPUAFF_LOCK_DIR must be a whole path, the same for everyone: /scratch/gpuaff"
        raise LockDirectoryError(found, expected)
    return found.rstrip("/") or "/"


def open_file(name: str, *, size: int = 0) -> int:
    """Open a file of the lock directory, which is made with ``size`` bytes (0: only to be read)."""
    end = time.monotonic() + _MAKING
    while True:
        try:
            return _open_or_make(name, size)
        except LockDirectoryError as error:  # noqa: PERF203 - tried again, but for a while
            # Another user may be making it, and have yet to let everyone in.
            if error.errno != errno.EACCES or time.monotonic() >= end:
                raise
            time.sleep(_PAUSE)


def _open_or_make(name: str, size: int) -> int:
    where = path()
    with lock_errors(where):
        folder = locks.open_folder(where, mode=0o1777, readme=_README, file_mode=_KEPT)
    try:
        with lock_errors(f"{where}/{name}"):
            return locks.open_lock_file(folder, name, size=size, mode=_KEPT)
    finally:
        descriptors.close(folder)


@contextmanager
def lock_errors(file: str) -> Iterator[None]:
    """Raise what the kernel refuses to do with a file as a LockDirectoryError with a remedy."""
    try:
        yield
    except LockDirectoryError:
        raise
    except OSError as error:
        remedy = _OTHER_REMEDIES.get(error.errno or 0, _REMEDY)
        problem = f"{locks.problem_of(error)}: {remedy}"
        raise LockDirectoryError(file, problem, error.errno) from None


def has(name: str) -> bool:
    """Whether it has such a file; an error where it neither is nor can be made."""
    with lock_errors(path()):
        locks.check_folder(path())
    return locks.identity(f"{path()}/{name}") is not None


def still_has(name: str, handle: int) -> bool:
    """Whether an open file is still the one of that name."""
    return locks.identity(f"{path()}/{name}") == locks.identity(handle)


def holder_in_words(pid: int | None) -> str:
    """The process that holds a lock, as the kernel knows it."""
    if pid is None or pid <= 0:
        return "a process that is not visible here"
    return process_in_words(kernel.name_of(pid) or "a process", pid)


@contextmanager
def guarded(*, limit: float = _GUARD_LIMIT) -> Iterator[None]:
    """Hold the guard: one claimer at a time chooses among the free GPUs and leases them."""
    # So a claim gets all the GPUs that it requested or none, and two claims do not take half each.
    # That no GPU is leased twice does not depend on it. The driver is asked before, so a process
    # that hangs in it blocks no other.
    end = time.monotonic() + limit
    handle = -1
    try:
        while handle == -1 or not still_has(_GUARD, handle):
            descriptors.close_private(handle, unlock_descriptor)
            handle = open_file(_GUARD)
            descriptors.private.add(handle)
            with lock_errors(f"{path()}/{_GUARD}"):
                while not lock_descriptor(handle, blocking=False):
                    if time.monotonic() >= end:
                        raise _held_too_long(handle, limit)
                    with interruptible():
                        time.sleep(_PAUSE)
        yield
    finally:
        descriptors.close_private(handle, unlock_descriptor)


def _held_too_long(handle: int, limit: float) -> LockDirectoryError:
    file = locks.identity(handle)
    pids = [lock.pid for lock in locks.held_locks() if lock.file == file and not lock.is_waiting]
    holder = holder_in_words(max(pids, default=None))
    return LockDirectoryError(
        f"{path()}/{_GUARD}",
        f"{holder} has locked it for more than {limit:.0f} s, while leasing GPUs takes "
        "milliseconds: see whether it is stopped, and continue or end it",
    )
