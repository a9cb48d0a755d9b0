"""The kernel's file locks. The files that are locked are :mod:`lock_files`' part.

Two kinds are used. ``flock(2)`` belongs to an open file description: forked children share it, and
it is gone when the last of them has closed it. So do the byte ranges of ``F_OFD_SETLK``
(``fcntl(2)``, "Open file description locks"); the classic ones would be lost as soon as anyone in
the process closes the file.
"""

from __future__ import annotations

import fcntl
import os
import struct
from dataclasses import dataclass

from gpuaff._system.kernel import Tree

FLOCK = "hhqqi4x"
"""``struct flock`` of a 64-bit system: type, whence, start, length, pid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLock:
    """A line of /proc/locks.

    Attributes:
        kind: ``FLOCK``, ``POSIX`` or ``OFDLCK``.
        is_write: whether it is exclusive.
        pid: who has taken it; −1 for OFD locks, 0 for one outside of this PID namespace.
        file: the device number and inode of what is locked.
        is_waiting: whether somebody still waits for it.
    """

    kind: str
    is_write: bool
    pid: int
    file: tuple[int, int]
    is_waiting: bool


def held_locks() -> tuple[FileLock, ...]:
    """All locks that this process may see (``proc_locks(5)``). No lock is taken to look."""
    lines = (Tree().read("proc/locks") or "").splitlines()
    return tuple(lock for lock in map(_lock_of, lines) if lock is not None)


def _lock_of(line: str) -> FileLock | None:
    fields = line.split()
    waiting = len(fields) > 1 and fields[1] == "->"
    if waiting:
        del fields[1]
    if len(fields) < 8 or fields[5].count(":") != 2:  # "<none>:0" where there is no file
        return None
    major, minor, inode = fields[5].split(":")
    return FileLock(
        kind=fields[1],
        is_write=fields[3] == "WRITE",
        pid=int(fields[4]),
        file=(os.makedev(int(major, 16), int(minor, 16)), int(inode)),
        is_waiting=waiting,
    )


# ---- flock -----------------------------------------------------------------------------------


def try_flock(handle: int, *, shared: bool = False) -> bool:
    """Take a ``flock`` if that is possible at once.

    Raises:
        OSError: the file system has none.
    """
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(handle: int) -> None:
    """Give a ``flock`` back, for everyone who shares the open file."""
    fcntl.flock(handle, fcntl.LOCK_UN)


# ---- byte ranges -----------------------------------------------------------------------------


def try_range(handle: int, start: int, *, length: int = 1, shared: bool = False) -> bool:
    """Take a byte range if that is possible at once."""
    try:
        fcntl.fcntl(handle, fcntl.F_OFD_SETLK, byte_range(_kind(shared=shared), start, length))
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, fcntl(2)
        return False
    return True


def free_range(handle: int, start: int, *, length: int = 1) -> None:
    """Give a byte range back, for everyone who shares the open file."""
    fcntl.fcntl(handle, fcntl.F_OFD_SETLK, byte_range(fcntl.F_UNLCK, start, length))


def locked_bytes(handle: int, start: int, end: int) -> list[int]:
    """The bytes from ``start`` up to ``end`` (not included) that others have exclusively.

    Ascending. Each of them is taken to be locked on its own. No lock is taken to look.
    """
    found: list[int] = []
    spans = [(start, end)]
    while spans:
        low, high = spans.pop()
        if low >= high:
            continue
        asked = byte_range(fcntl.F_RDLCK, low, high - low)
        kind, _, at, length, _ = struct.unpack(FLOCK, fcntl.fcntl(handle, fcntl.F_OFD_GETLK, asked))
        if kind == fcntl.F_UNLCK:
            continue
        last = high if length == 0 else min(high, at + length)
        found.extend(range(max(at, low), last))
        spans += [(low, at), (last, high)]
    return sorted(found)


def _kind(*, shared: bool) -> int:
    return fcntl.F_RDLCK if shared else fcntl.F_WRLCK


def byte_range(kind: int, start: int, length: int) -> bytes:
    """A ``struct flock``: what ``fcntl(2)`` takes. A length of 0 is up to the end of the file."""
    return struct.pack(FLOCK, kind, os.SEEK_SET, start, length, 0)
