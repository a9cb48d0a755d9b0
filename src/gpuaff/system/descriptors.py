"""Descriptors of locks: their high numbers, which job scripts' ``exec 3>log`` do not hit."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from itertools import count

LOWEST = 200
"""Locks have this number or a higher one."""


def moved_up(handle: int) -> int:
    """The same open file under a number that scripts do not use; not inherited by programs."""
    try:
        higher = fcntl.fcntl(handle, fcntl.F_DUPFD_CLOEXEC, LOWEST)
    except OSError:  # a limit of open files below that number
        higher = handle
    else:
        os.close(handle)
    _turns[higher] = next(_turn)
    return higher


_turn = count(1)
_turns: dict[int, int] = {}


def turn_of(handle: int) -> int:
    """When a descriptor was last given by :func:`moved_up`, in turns; 0: never.

    Whoever had the same number before has lost it to somebody who has closed it.
    """
    return _turns.get(handle, 0)


def owner_of(handle: int) -> int:
    """The number of the user to whom an open file belongs."""
    return os.fstat(handle).st_uid


def close(*handles: int) -> None:
    """Close descriptors; those that are closed already do not matter."""
    for handle in handles:
        with suppress(OSError):
            os.close(handle)


def make_room() -> None:
    """Let the process's table of descriptors grow now, to have room for such numbers.

    The kernel makes a process that has threads wait for all processors before it has the larger
    table (17 ms on a machine with 64 of them); one that has none yet does not wait.
    """
    try:
        os.close(moved_up(os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)))
    except OSError:  # no descriptor is left: who needs one says so
        return
