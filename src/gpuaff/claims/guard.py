"""The guard: one claimer at a time looks at the GPUs and leases those that it chooses.

So a claimer gets all that it asked for or nothing, and two of them do not take half each. That no
GPU is ever given to two does not depend on it: leases see to that.

It is a ``flock`` of our own and not filelock's, whose open truncates whatever somebody has put in
the file's place, and whose import takes longer than all of ours.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from gpuaff.claims import lockdir
from gpuaff.errors import LockDirectoryError
from gpuaff.system import kernel, locks

NAME = "guard"

LIMIT = 20.0
"""How long is waited for whoever is looking, in seconds: looking takes milliseconds."""

_STEP = 0.002
"""Seconds between two tries. The kernel would wake us, but not when time is up."""

_open: set[int] = set()
"""The descriptors by which this process holds, or waits for, the guard."""


def _forget_in_child() -> None:
    """A forked child must not keep its parent's guard alive, so it closes its copy."""
    locks.close(*_open)
    _open.clear()


kernel.in_forked_child(_forget_in_child)


@contextmanager
def guarded(*, limit: float = LIMIT) -> Iterator[None]:
    """Hold the guard.

    Args:
        limit: how long to wait for it, in seconds.

    Raises:
        LockDirectoryError: its file cannot be used, or somebody holds it for too long.
    """
    handle = _opened()
    try:
        with lockdir.using(f"{lockdir.path()}/{NAME}"):
            _wait(handle, limit)
        yield
    finally:
        if handle in _open:  # not in a child that was forked meanwhile
            _open.discard(handle)
            with suppress(OSError):  # where there are no locks, an error has said so
                locks.unlock(handle)  # closing is not enough: a forked child may have a copy
            locks.close(handle)


def _wait(handle: int, limit: float) -> None:
    end = time.monotonic() + limit
    while not locks.try_flock(handle):
        if time.monotonic() >= end:
            raise _stuck(handle, limit)
        time.sleep(_STEP)


def _opened() -> int:
    handle = lockdir.open_file(NAME)
    _open.add(handle)
    return handle


def _stuck(handle: int, limit: float) -> LockDirectoryError:
    return LockDirectoryError(
        f"{lockdir.path()}/{NAME}",
        f"{_holder(handle)} has held it for more than {limit:.0f} s, while looking at GPUs takes "
        "milliseconds: see whether it is stopped or hangs in the driver, and end it",
    )


def _holder(handle: int) -> str:
    file = locks.identity_of(handle)
    pids = [lock.pid for lock in locks.held_locks() if lock.file == file and not lock.is_waiting]
    known = [f"process {pid} ({kernel.name_of(pid) or 'unknown'})" for pid in pids if pid > 0]
    with suppress(IndexError):
        return known[0]
    return "a process that cannot be seen from here"
