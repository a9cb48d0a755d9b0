"""The guard: one claimer at a time chooses among the GPUs that are not leased, and leases them.

So a claimer gets all that it asked for or nothing, and two of them do not take half each. That no
GPU is ever given to two does not depend on it: leases see to that.

The driver is asked before, and who has leased what is read again under the guard. So claimers ask
the driver all at once, and one who hangs in it holds up nobody.

It is a ``flock`` of our own and not filelock's, which opens the file for writing (and truncates
whatever stands there, up to 3.29 at least), asks again every 50 ms, and takes 40 ms to import.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from gpuaff._system import descriptors, kernel, locks
from gpuaff._system.interrupts import interruptible
from gpuaff.claims.locking import lockdir
from gpuaff.errors import LockDirectoryError

NAME = "guard"

LIMIT = 20.0
"""How long is waited for whoever has it, in seconds: leasing takes milliseconds. The driver, which
may hang, is not asked under the guard."""

_STEPS = 0.001, 0.01
"""Seconds between two tries, at first and at last. The kernel would wake us, but not when time is
up."""

_open: set[int] = set()
"""The descriptors by which this process holds, or waits for, the guard."""


def _forget_in_child() -> None:
    """A forked child must not keep its parent's guard alive, so it closes its copy."""
    descriptors.close(*_open)
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
    handle = _had(limit)
    try:
        yield
    finally:
        _let_go(handle)


def _had(limit: float) -> int:
    """The open file, locked; once more where somebody has removed or replaced it meanwhile."""
    end = time.monotonic() + limit
    while True:
        handle = _opened()
        try:
            with lockdir.using(f"{lockdir.path()}/{NAME}"):
                _wait(handle, end, limit)
            if lockdir.still_has(NAME, handle):
                return handle
        except BaseException:
            _let_go(handle)
            raise
        _let_go(handle)


def let_go() -> None:
    """Give the guard back if this process still has it: Ctrl-C may come between any two steps."""
    for handle in tuple(_open):
        _let_go(handle)


def _let_go(handle: int) -> None:
    if handle in _open:  # not in a child that was forked meanwhile
        with suppress(OSError):  # where there are no locks, an error has said so
            locks.unlock(handle)  # closing is not enough: a forked child may have a copy
        _open.discard(handle)
        descriptors.close(handle)


def _wait(handle: int, end: float, limit: float) -> None:
    step, longest = _STEPS
    while not locks.try_flock(handle):
        if time.monotonic() >= end:
            raise _stuck(handle, limit)
        with interruptible():
            time.sleep(step)
        step = min(step * 1.5, longest)


def _opened() -> int:
    handle = lockdir.open_file(NAME)
    _open.add(handle)
    return handle


def _stuck(handle: int, limit: float) -> LockDirectoryError:
    return LockDirectoryError(
        f"{lockdir.path()}/{NAME}",
        f"{_holder(handle)} has held it for more than {limit:.0f} s, while leasing GPUs takes "
        "milliseconds: see whether it is stopped, and continue or end it",
    )


def _holder(handle: int) -> str:
    from gpuaff._system.locks import locked_name

    file = locked_name(handle)
    pids = [lock.pid for lock in locks.held_locks() if lock.file == file and not lock.is_waiting]
    known = [f"process {pid} ({kernel.name_of(pid) or 'unknown'})" for pid in pids if pid > 0]
    with suppress(IndexError):
        return known[0]
    return "a process that cannot be seen from here"
