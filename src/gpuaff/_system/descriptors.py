"""Descriptors of locks: they have numbers that job scripts' ``exec 3>log`` does not hit."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from itertools import count

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

LOWEST = 200
"""Locks have this number or a higher one."""

private: set[int] = set()
"""Those that a forked child closes, so that it does not keep its parent's locks."""

_turns: dict[int, int] = {}
_turn = count(1)


def close(*handles: int) -> None:
    """Close descriptors, unless they are closed already."""
    for handle in handles:
        private.discard(handle)
        with suppress(OSError):
            os.close(handle)


def close_private(handle: int, unlock: Callable[[int], object]) -> None:
    """Unlock and close one of those; in a forked child, which has closed its copy, do nothing."""
    if handle in private:
        with suppress(OSError):  # a file system without locks
            unlock(handle)  # closing is not enough: a child that is being forked may have a copy
        close(handle)


os.register_at_fork(after_in_child=lambda: close(*private))


def moved_up(handle: int) -> int:
    """The same open file under a number that scripts do not use; not inherited by programs."""
    try:
        # Closed on exec: a lease must not live on in a daemon that a script happens to start.
        higher = fcntl.fcntl(handle, fcntl.F_DUPFD_CLOEXEC, LOWEST)
    except OSError:  # a limit of open files below that number
        higher = handle
    else:
        os.close(handle)
    _turns[higher] = next(_turn)
    return higher


def mark_of(handle: int) -> tuple[int, ...]:
    """Distinguishes a descriptor from a later one of its number: daemons close all of theirs."""
    # The later one may be of the same file, so it includes how many `moved_up` had returned
    try:
        found = os.fstat(handle)
    except OSError:  # it is not open
        return ()
    return found.st_dev, found.st_ino, _turns.get(handle, 0)


def make_room() -> None:
    """Let the process's table of descriptors grow now, so that it has room for such numbers."""
    # The kernel makes a process that has threads wait for all processors before it has the larger
    # table (17 ms on a machine with 64 of them); one that has none yet does not wait
    with suppress(OSError):  # no descriptor is left: what needs one says so
        close(moved_up(os.open("/", os.O_RDONLY | os.O_DIRECTORY)))
