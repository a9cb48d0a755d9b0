"""Descriptors that no Ctrl-C loses; those of locks have high numbers.

Python runs signal handlers between two of its steps, and Ctrl-C's raises there. A descriptor would
be lost that was made in one step and is kept by its owner only in a later one. So it is noted by
the very call that makes it: ``list.extend`` over a ``map`` is one step, also where another thread
gets the signal, which ``pthread_sigmask`` could not keep back. What is noted, and is not kept when
a claim fails, is closed then.

Job scripts' ``exec 3>log`` does not hit high numbers.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeVar

    T = TypeVar("T")

LOWEST = 200
"""Locks have this number or a higher one."""


class _Hand(threading.local):
    """What the calling thread has made; each has its own list."""

    def __init__(self) -> None:
        self.handles: list[int] = []


_hand = _Hand()


def made(maker: Callable[[T], int], argument: T) -> int:
    """Make a descriptor by a call that is written in C, and note it in the same step.

    Raises:
        OSError: the call's.
    """
    handles = _hand.handles
    handles.extend(map(maker, (argument,)))
    return handles[-1]


def opened(path: str, flags: int, *, mode: int = 0o777, dir_fd: int | None = None) -> int:
    """As ``os.open``, and noted; programs do not inherit it.

    Raises:
        OSError: as there.
    """
    how = partial(os.open, flags=flags | os.O_CLOEXEC, mode=mode, dir_fd=dir_fd)
    return made(how, path)


def close(*handles: int) -> None:
    """Close descriptors; those that are closed already do not matter.

    Each is forgotten in the same step: its number may be another's at once.
    """
    mine = _hand.handles
    for handle in handles:
        with suppress(OSError):
            if handle in mine:
                list(map(os.close, map(mine.pop, (mine.index(handle),))))
            else:
                os.close(handle)


def in_hand() -> int:
    """How many are noted: what is made from now on can be kept, or dropped."""
    return len(_hand.handles)


def keep(before: int) -> None:
    """All that was made since then and is still open has an owner by now."""
    del _hand.handles[before:]


def drop(before: int) -> None:
    """Close what was made since then and is still open; may be called again."""
    handles = _hand.handles
    while len(handles) > before:
        with suppress(OSError):
            list(map(os.close, map(handles.pop, (-1,))))


def moved_up(handle: int) -> int:
    """The same open file under a number that scripts do not use; not inherited by programs."""
    try:
        higher = made(partial(fcntl.fcntl, handle, fcntl.F_DUPFD_CLOEXEC), LOWEST)
    except OSError:  # a limit of open files below that number
        higher = handle
    else:
        close(handle)
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


def make_room() -> None:
    """Let the process's table of descriptors grow now, to have room for such numbers.

    The kernel makes a process that has threads wait for all processors before it has the larger
    table (17 ms on a machine with 64 of them); one that has none yet does not wait.
    """
    try:
        close(moved_up(opened("/", os.O_RDONLY | os.O_DIRECTORY)))
    except OSError:  # no descriptor is left: who needs one says so
        return
