"""Descriptors of locks have high numbers, which job scripts' ``exec 3>log`` do not hit."""

from __future__ import annotations

import fcntl
import os

LOWEST = 200
"""Locks have this number or a higher one."""


def moved_up(handle: int) -> int:
    """The same open file under a number that scripts do not use; not inherited by programs."""
    try:
        higher = fcntl.fcntl(handle, fcntl.F_DUPFD_CLOEXEC, LOWEST)
    except OSError:  # a limit of open files below that number
        return handle
    os.close(handle)
    return higher


def make_room() -> None:
    """Let the process's table of descriptors grow now, to have room for such numbers.

    The kernel makes a process that has threads wait for all processors before it has the larger
    table (17 ms on a machine with 64 of them); one that has none yet does not wait.
    """
    try:
        os.close(moved_up(os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)))
    except OSError:  # no descriptor is left: who needs one says so
        return
