"""Being woken by the kernel: when a watched file is closed, or a process ends.

Files by ``inotify(7)``, which also tells of the close that a killed process leaves to the kernel;
processes by ``pidfd_open(2)``. A user may have only so many inotify instances (128 by default), and
old kernels have no pidfds: then what is left wakes, and the caller's own time limit.
"""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Collection
from contextlib import suppress

from gpuaff.system import locks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing_extensions import Self

_CLOSED = 0x8 | 0x10
"""IN_CLOSE_WRITE and IN_CLOSE_NOWRITE of ``sys/inotify.h``."""


class Watch:
    """Watches files and processes until it is closed.

    Attributes:
        sees_files: whether files are watched; False where no instance could be had.
    """

    def __init__(self, paths: Collection[str]) -> None:
        """Begin to watch.

        Args:
            paths: files and directories whose being closed wakes; those that are not there do not.
        """
        self._files = _inotify(paths) if paths else -1
        self._processes: dict[int, int] = {}
        self._ended: set[int] = set()
        self.sees_files = self._files >= 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop watching."""
        self.follow(())
        if self._files >= 0:
            locks.close(self._files)
            self._files = -1

    def follow(self, pids: Collection[int]) -> None:
        """Watch these processes from now on, and no others.

        One that has ended wakes once, however long it is still listed.
        """
        for pid in self._processes.keys() - set(pids):
            locks.close(self._processes.pop(pid))
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
        poll = select.poll()
        handles = [*self._processes.values(), *([self._files] if self._files >= 0 else [])]
        for handle in handles:
            poll.register(handle, select.POLLIN)
        happened = poll.poll(max(0, int(seconds * 1000)))
        self._drain()
        woken = {handle for handle, _ in happened}
        for pid in [pid for pid, handle in self._processes.items() if handle in woken]:
            locks.close(self._processes.pop(pid))
            self._ended.add(pid)
        return bool(happened)

    def _drain(self) -> None:
        """Forget what has happened until now: it counts once."""
        with suppress(BlockingIOError):
            while self._files >= 0:
                os.read(self._files, 1 << 16)


def _inotify(paths: Collection[str]) -> int:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "inotify_init1"):
        return -1
    handle = int(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    for path in paths if handle >= 0 else ():
        failed = libc.inotify_add_watch(handle, os.fsencode(path), _CLOSED) < 0
        if failed and ctypes.get_errno() != errno.ENOENT:  # a user has only so many watches, too
            locks.close(handle)
            return -1
    return handle


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # it is gone, out of sight, or there are no pidfds
        return None
