"""The kernel's file locks, and the files that exist only to be locked.

``flock(2)`` and the byte ranges of ``F_OFD_SETLK`` (``fcntl(2)``) belong to an open file: forked
children share them, and they end when the last has closed it. Classic record locks would end as
soon as any code in the process closes the file; OFD locks exclude them, ``flock`` excludes neither.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import struct
from contextlib import suppress
from typing import NamedTuple

from gpuaff._system.descriptors import close, moved_up
from gpuaff._system.kernel import Tree

WHOLE = 0  # as a length: up to the end of the file, wherever that is
_FLOCK = "hhqqi4x"  # struct flock of a 64-bit system: type, whence, start, length, pid
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
# Do not wait for the writer of a FIFO, and do not follow a link: either may have been planted.
_FILE = os.O_NOCTTY | os.O_NONBLOCK | os.O_NOFOLLOW
_LOCK = re.compile(
    r"^\d+:\s+(-> )?\s*(\w+)\s+\w+\s+(\w+)\s+(-?\d+) (\w+):(\w+):(\d+) ", re.MULTILINE
)
_NO_LOCKS = "it cannot be locked: network file systems cannot, and neither can Linux before 3.15"
_HINTS = {  # where the kernel's words are not clear
    errno.ELOOP: "a link stands in its place",
    errno.ENOTDIR: "a folder is expected, and a file or a link stands there",
    errno.EISDIR: "a folder stands in its place",
    errno.ENXIO: "something that is no file stands in its place",
    errno.EPERM: "this user may not use it",
    errno.ENOENT: "the folder above it is missing",
    errno.EAGAIN: "its owner keeps others from opening it",
    **dict.fromkeys((errno.EBADF, errno.EINVAL, errno.ENOLCK), _NO_LOCKS),
    **dict.fromkeys((errno.ENOSYS, errno.EOPNOTSUPP), _NO_LOCKS),
}


class UnusableError(OSError):
    """A file cannot be used as a lock file; the text says why."""


def problem_of(error: OSError) -> str:
    """Why a lock file cannot be used, in words."""
    hint = _HINTS.get(error.errno or 0)
    return f"{error.strerror or error}{f' ({hint})' if hint else ''}"


# ---- locks; OSError where the file system, or this kernel, has none ------------------------------


def try_flock(handle: int, *, shared: bool = False) -> bool:
    """Take a ``flock`` if that is possible at once; forked children share it."""
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(handle: int) -> None:
    """Release a ``flock``, for all who share the open file."""
    fcntl.flock(handle, fcntl.LOCK_UN)


def try_range(handle: int, start: int, *, length: int = 1, shared: bool = False) -> bool:
    """Take a byte range if that is possible at once."""
    try:
        _ofd(handle, fcntl.F_OFD_SETLK, fcntl.F_RDLCK if shared else fcntl.F_WRLCK, start, length)
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, fcntl(2)
        return False
    return True


def free_range(handle: int, start: int, *, length: int = 1) -> None:
    """Release a byte range, also for forked children that share the open file."""
    _ofd(handle, fcntl.F_OFD_SETLK, fcntl.F_UNLCK, start, length)


def locked_bytes(handle: int, start: int, end: int) -> list[int]:
    """The bytes from ``start`` up to ``end`` (not included) that others have exclusively."""
    found: list[int] = []
    spans = [(start, end)]
    while spans:
        low, high = spans.pop()
        if low >= high:
            continue
        kind, _, at, length, _ = _ofd(handle, fcntl.F_OFD_GETLK, fcntl.F_RDLCK, low, high - low)
        if kind == fcntl.F_UNLCK:
            continue
        last = high if length == WHOLE else min(high, at + length)
        found.extend(range(max(at, low), last))
        spans += [(low, at), (last, high)]
    return sorted(found)


def wait_for_shared(handle: int) -> None:
    """Lock the whole file, shared; sleep in the kernel's queue, which serves in order."""
    _ofd(handle, fcntl.F_OFD_SETLKW, fcntl.F_RDLCK, 0, WHOLE)


def exclusive_holder(handle: int) -> int | None:
    """The process that has the file exclusively (0 or less: unknown here); None when none has."""
    kind, _, _, _, pid = _ofd(handle, fcntl.F_OFD_GETLK, fcntl.F_RDLCK, 0, WHOLE)
    return None if kind == fcntl.F_UNLCK else pid


def exclusive_waiters(handle: int) -> frozenset[int]:
    """The processes that sleep until they can have the file exclusively.

    Those of other PID namespaces are 0, or missing where a process there holds the lock. Without
    /proc/locks there are none. That file is read only where the file is locked at all.
    """
    kind, *_ = _ofd(handle, fcntl.F_OFD_GETLK, fcntl.F_WRLCK, 0, WHOLE)
    if kind == fcntl.F_UNLCK:
        return frozenset()
    file = identity(handle)
    waiting = (lock for lock in held_locks() if lock.is_waiting and lock.file == file)
    return frozenset(lock.pid for lock in waiting if lock.is_write and lock.kind == "POSIX")


def _ofd(handle: int, command: int, kind: int, start: int, length: int) -> tuple[int, ...]:
    requested = struct.pack(_FLOCK, kind, os.SEEK_SET, start, length, 0)
    return struct.unpack(_FLOCK, fcntl.fcntl(handle, command, requested))


# ---- /proc/locks ---------------------------------------------------------------------------------


class FileLock(NamedTuple):
    """A line of /proc/locks."""

    kind: str  # ``FLOCK``, ``POSIX`` or ``OFDLCK``
    is_write: bool  # exclusive
    pid: int  # who has it or waits for it; −1 for OFD locks, 0 outside of this PID namespace
    file: tuple[int, int]  # see :func:`identity`
    is_waiting: bool


def held_locks(text: str | None = None) -> list[FileLock]:
    """All locks on files that this process may see, from a text of /proc/locks (None: now's)."""
    # To read that file stops all processors, 20 ms and more on a large machine
    lines, found = Tree().read("proc/locks") or "" if text is None else text, []
    for arrow, kind, mode, pid, major, minor, inode in _LOCK.findall(lines):
        file = os.makedev(int(major, 16), int(minor, 16)), int(inode)
        found.append(FileLock(kind, mode == "WRITE", int(pid), file, bool(arrow)))
    return found


# ---- files ---------------------------------------------------------------------------------------
# Many users share them: each is made with rights for everyone, whatever the umask is. What was
# opened is checked before it is used, since another user may have put something in its place.


def identity(file: str | int) -> tuple[int, int] | None:
    """The device number and inode of a path or an open file; None when there is none."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def check_folder(path: str) -> None:
    """Raise an OSError where there neither is a directory nor a place for it."""
    try:
        os.stat(f"{path}/.")
    except FileNotFoundError:
        os.stat(f"{os.path.dirname(path)}/.")


def open_directory(path: str) -> int:
    """Open a directory to lock it."""
    return moved_up(os.open(path, os.O_RDONLY | os.O_DIRECTORY))


def open_folder(path: str, *, mode: int, readme: bytes = b"", file_mode: int = 0o666) -> int:
    """Open the folder of the lock files; if it is missing, make it, with a README in it."""
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        return os.open(path, _FOLDER)
    folder = os.open(path, _FOLDER)
    try:
        os.fchmod(folder, mode)
        if readme:
            _make(folder, "README", mode=file_mode, content=readme)
    except BaseException:
        close(folder)
        raise
    return folder


def open_lock_file(folder: int, name: str, *, size: int = 0, mode: int = 0o666) -> int:
    """Open a file of a folder to lock it; if it is missing, make it with ``size`` bytes."""
    # One with a size is opened for writing, too. It is opened without O_CREAT, which
    # ``fs.protected_regular`` forbids for other users' files in such a folder.
    flags = (os.O_RDWR if size else os.O_RDONLY) | _FILE
    try:
        handle = os.open(name, flags, dir_fd=folder)
    except FileNotFoundError:
        with suppress(FileExistsError):  # another process was first
            _make(folder, name, mode=mode, size=size)
        handle = os.open(name, flags, dir_fd=folder)
    handle = moved_up(handle)
    found = os.fstat(handle)
    if stat.S_ISREG(found.st_mode) and found.st_nlink < 2:
        return handle
    close(handle)
    problem = "it is no regular file"
    if stat.S_ISREG(found.st_mode):
        problem = (
            "it has another name elsewhere (a hard link), so it may be another user's file; remove "
            "the one of the two that should not be"
        )
    raise UnusableError(problem)


def _make(folder: int, name: str, *, mode: int, size: int = 0, content: bytes = b"") -> None:
    handle = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR | _FILE, mode, dir_fd=folder)
    try:
        os.fchmod(handle, mode)
        if size:
            os.posix_fallocate(handle, 0, size)
        os.write(handle, content)
    finally:
        close(handle)
