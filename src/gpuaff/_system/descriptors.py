"""Descriptors of locks: they have numbers that job scripts' ``exec 3>log`` does not hit."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from itertools import count

LOWEST = 200
"""Locks have this number or a higher one."""

_turns: dict[int, int] = {}
_turn = count(1)


def close(*handles: int) -> None:
    """Close descriptors, unless they are closed already."""
    for handle in handles:
        with suppress(OSError):
            os.close(handle)


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


def turn_of(handle: int) -> int:
    """How many descriptors :func:`moved_up` had returned when it returned this one; 0: never.

    It distinguishes a descriptor from an earlier one of the same number, which was closed.
    """
    return _turns.get(handle, 0)


def owner_of(handle: int) -> int:
    """The number of the user who owns an open file."""
    return os.fstat(handle).st_uid


def make_room() -> None:
    """Let the process's table of descriptors grow now, so that it has room for such numbers.

    The kernel makes a process that has threads wait for all processors before it has the larger
    table (17 ms on a machine with 64 of them); one that has none yet does not wait.
    """
    with suppress(OSError):  # no descriptor is left: what needs one says so
        close(moved_up(os.open("/", os.O_RDONLY | os.O_DIRECTORY)))
