"""Being woken by the kernel: when a watched file is closed, or a process ends.

Files by ``inotify(7)``, which also tells of the close that a killed process leaves to the kernel;
processes by ``pidfd_open(2)``. A user may have only so many inotify instances (128 by default), and
old kernels have no pidfds: then what is left wakes, and the caller's own time limit.
"""

from __future__ import annotations

import errno
import os
import select
import struct
from collections.abc import Collection, Iterator
from contextlib import suppress

from gpuaff._system import descriptors
from gpuaff._system.interrupts import interruptible

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing_extensions import Self

_CLOSED = 0x8 | 0x10
"""IN_CLOSE_WRITE and IN_CLOSE_NOWRITE of ``sys/inotify.h``."""

_EVENT = struct.Struct("iIII")
"""``struct inotify_event``: the watch, what happened, a cookie, the length of the name behind."""


class Watch:
    """Watches files and processes until it is closed.

    Attributes:
        sees_files: whether all files are watched that are there; False where no more of it could be
            had.
    """

    def __init__(self) -> None:
        """Nothing is watched at first."""
        self.sees_files = False
        self._files = -1
        self._unseen: list[str] = []
        self._processes: dict[int, int] = {}
        self._ended: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop watching."""
        self.follow(())
        if self._files >= 0:
            descriptors.close(self._files)
            self._files = -1

    def begin(self, paths: Collection[str]) -> None:
        """Watch files and directories from now on: their being closed wakes."""
        if paths and self._files < 0:
            self._files = _inotify()
            self._unseen = list(paths)
        self.sees_files = self._files >= 0
        self._see()

    def follow(self, pids: Collection[int]) -> None:
        """Watch these processes from now on, and no others.

        One that has ended wakes once, however long it is still listed.
        """
        for pid in self._processes.keys() - set(pids):
            descriptors.close(self._processes.pop(pid))
        self._ended &= set(pids)
        for pid in set(pids) - self._processes.keys() - self._ended:
            handle = _pidfd(pid)
            if handle is not None:
                self._processes[pid] = handle

    def wait(self, seconds: float) -> bool:
        """Sleep until something happens, but no longer.

        Returns:
            Whether anything has happened.
        """
        self._see()
        poll = select.poll()
        handles = [*self._processes.values(), *([self._files] if self._files >= 0 else [])]
        for handle in handles:
            poll.register(handle, select.POLLIN)
        with interruptible():
            happened = {handle for handle, _ in poll.poll(max(0, int(seconds * 1000)))}
        for pid in [pid for pid, handle in self._processes.items() if handle in happened]:
            descriptors.close(self._processes.pop(pid))
            self._ended.add(pid)
        closed = self._closed()
        return closed or bool(happened - {self._files})

    def _see(self) -> None:
        """Watch those files, too, that were not there before."""
        if self._unseen and self._files >= 0:
            refused = {path: _add(self._files, path) for path in self._unseen}
            self._unseen = [path for path, error in refused.items() if error]
            # A user has only so many watches, too: what is there and not watched must be looked at.
            self.sees_files = set(refused.values()) <= {0, errno.ENOENT}

    def _closed(self) -> bool:
        """Whether a watched file was closed until now: that counts once.

        A watched directory also tells of what is in it, and the files of a PCI device are read by
        many: those events have a name, and do not count.
        """
        found = False
        with suppress(BlockingIOError):
            while self._files >= 0:
                found |= any(not name for name in _names(os.read(self._files, 1 << 16)))
        return found


def _names(events: bytes) -> Iterator[int]:
    """How long the name of each event is."""
    at = 0
    while at < len(events):
        length = _EVENT.unpack_from(events, at)[3]
        yield length
        at += _EVENT.size + length


def _inotify() -> int:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "inotify_init1"):
        return -1
    return descriptors.made(libc.inotify_init1, os.O_NONBLOCK | os.O_CLOEXEC)


def _add(handle: int, path: str) -> int:
    """Watch a file; the errno where that is refused, else 0."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.inotify_add_watch(handle, os.fsencode(path), _CLOSED) < 0
    return ctypes.get_errno() if failed else 0


def _pidfd(pid: int) -> int | None:
    try:
        return descriptors.made(os.pidfd_open, pid)
    except (AttributeError, OSError):  # it is gone, out of sight, or there are no pidfds
        return None
