"""The kernel's file locks, and the files that are only there to be locked.

Two kinds are used. ``flock(2)`` belongs to an open file description: forked children share it, and
it is gone when the last of them has closed it. So do the byte ranges of ``F_OFD_SETLK``
(``fcntl(2)``, "Open file description locks"); the classic ones would be lost as soon as anyone in
the process closes the file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from contextlib import suppress
from functools import partial

from gpuaff.records import dataclass
from gpuaff.system import descriptors
from gpuaff.system.descriptors import moved_up, opened, turn_of
from gpuaff.system.kernel import Tree

FLOCK = "hhqqi4x"
"""``struct flock`` of a 64-bit system: type, whence, start, length, pid."""

_FLAGS = os.O_NOCTTY | os.O_NONBLOCK | os.O_NOFOLLOW
"""Not to wait for the writer of a FIFO, and not to follow a link: either may have been planted."""

_PATIENCE = 20
"""How often a file with too many names is looked at again, 5 ms apart: its maker may be about to
take one away."""


@dataclass(frozen=True, kw_only=True)
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


def real_name(path: str) -> str:
    """A path without links: what /proc calls the file of a process that has opened it."""
    return os.path.realpath(path)


def identity(path: str) -> tuple[int, int] | None:
    """The device number and inode of a file, without opening it; None when there is none."""
    try:
        found = os.stat(path)  # noqa: PTH116 - no Path here
    except OSError:
        return None
    return found.st_dev, found.st_ino


def identity_of(handle: int) -> tuple[int, int]:
    """The device number and inode of an open file."""
    found = os.fstat(handle)
    return found.st_dev, found.st_ino


def mark_of(handle: int) -> tuple[int, int, int]:
    """What tells a descriptor from a later one of its number: daemons close all that they have.

    That may be one of the same file, so it also counts when the file was opened here.

    Raises:
        OSError: it is not open.
    """
    return (*identity_of(handle), turn_of(handle))


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


def wait_for_range(handle: int, start: int) -> None:
    """Sleep until nobody has a byte exclusively; it is shared then, and given back at once."""
    fcntl.fcntl(handle, fcntl.F_OFD_SETLKW, byte_range(fcntl.F_RDLCK, start, 1))
    free_range(handle, start)


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


# ---- what is locked --------------------------------------------------------------------------


def open_directory(path: str) -> int:
    """Open a directory to lock it.

    Raises:
        OSError: there is none, or it may not be read.
    """
    return moved_up(opened(path, os.O_RDONLY | os.O_DIRECTORY))


def touch(handle: int) -> None:
    """Open and close what is locked, once more: so those who watch it look again.

    By the open file and not by its path, where somebody may have put something else.
    """
    again = partial(os.open, flags=os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with suppress(OSError):  # one step: see descriptors
        list(map(os.close, map(again, (f"/proc/self/fd/{handle}",))))


def close(*handles: int) -> None:
    """Close descriptors; those that are closed already do not matter."""
    for handle in handles:
        with suppress(OSError):
            descriptors.close(handle)


def read_at(handle: int, offset: int, size: int) -> bytes:
    """Read a part of a file."""
    return os.pread(handle, size, offset)


def write_at(handle: int, offset: int, data: bytes) -> None:
    """Write a part of a file, at once: what is read meanwhile is the old text or the new one."""
    os.pwrite(handle, data, offset)


class UnusableError(Exception):
    """A file that is to be locked is none that can be; the text says why."""


def make_folder(path: str) -> None:
    """Make a folder in which everybody may make files and nobody may remove others' (``1777``).

    It appears whole, whatever the umask is and whoever dies meanwhile: an empty folder could be
    replaced by another maker's, so it gets a file before it gets its name.

    Raises:
        OSError: it cannot be made.
    """
    if os.path.lexists(path):
        return
    unfinished = f"{path}.{os.getpid()}.{os.urandom(4).hex()}"
    os.mkdir(unfinished, 0o700)  # noqa: PTH102 - no Path here
    handle = open_folder(unfinished)
    try:
        _make(handle, "README", _README, mode=KEPT)
        os.fchmod(handle, 0o1777)
        os.rename(unfinished, path)  # noqa: PTH104
    except OSError:
        _remove(handle, unfinished)
        # Somebody else was first: ENOTEMPTY, or EPERM where that is another user and the folder
        # above is sticky, as /tmp is.
        if not os.path.lexists(path):
            raise
    except BaseException:
        _remove(handle, unfinished)
        raise
    finally:
        close(handle)


KEPT = 0o1666
"""For everyone, and sticky: systemd-tmpfiles leaves such files alone (the XDG base directory
specification), which would else remove a board that jobs of weeks still stand on (case E9)."""

_README = b"""Here gpuaff's users tell each other who holds or waits for which GPU.
docs/lease-protocol.md in its sources says what the files are. Do not remove them.
"""


def _remove(handle: int, path: str) -> None:
    with suppress(OSError):
        os.unlink("README", dir_fd=handle)
    with suppress(OSError):
        os.rmdir(path)  # noqa: PTH106


def open_folder(path: str) -> int:
    """Open the folder of the lock files; a link to a folder is not followed.

    Raises:
        OSError: there is none, or it may not be used.
    """
    return opened(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def open_lock_file(folder: int, name: str, *, size: int = 0, mode: int = 0o666) -> int:
    """Open a file of a folder to lock it; make it if there is none.

    It is made without a name, gets rights for everyone, and only then its name: so no umask and
    no death leaves one that others cannot open. It is opened without O_CREAT, which
    ``fs.protected_regular`` forbids for others' files in such a folder, and without following
    links; what was opened is looked at before it is used.

    Args:
        folder: the folder's descriptor.
        name: the file's name in it.
        size: how many bytes are set aside when it is made; such a file is written into, too.
        mode: what it may be used for by whom when it is made.

    Raises:
        OSError: it cannot be opened or made.
        UnusableError: it is no file of ours.
    """
    try:
        handle = _open(folder, name, size)
    except FileNotFoundError:
        _make(folder, name, b"", size, mode=mode)
        handle = _open(folder, name, size)
    handle = moved_up(handle)
    try:
        _check(folder, name, handle)
    except BaseException:
        close(handle)
        raise
    return handle


def is_current(folder: int, name: str, handle: int) -> bool:
    """Whether an open file still has its name: somebody may have removed or replaced it."""
    try:
        named = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return False
    opened = os.fstat(handle)
    return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)


def _check(folder: int, name: str, handle: int) -> None:
    """Refuse what somebody has planted: we would lock, and write into, a file of theirs."""
    opened = os.fstat(handle)
    if not stat.S_ISREG(opened.st_mode):
        raise UnusableError("it is no regular file")
    for turn in range(_PATIENCE):
        extra = os.fstat(handle).st_nlink - 1
        if extra <= 0 or extra == _unfinished_names(folder, name, opened):
            return
        if turn == 0:
            continue
        _pause()
    raise UnusableError("it has another name elsewhere (a hard link), so it may be somebody's file")


def _pause() -> None:
    import time

    time.sleep(0.005)


def _unfinished_names(folder: int, name: str, opened: os.stat_result) -> int:
    """How many names a maker has left that was killed between giving and taking names."""
    count = 0
    for other in os.listdir(folder):
        if other.startswith(f".{name}."):
            with suppress(OSError):
                found = os.stat(other, dir_fd=folder, follow_symlinks=False)
                count += (found.st_dev, found.st_ino) == (opened.st_dev, opened.st_ino)
    return count


def _open(folder: int, name: str, size: int) -> int:
    """A file that is only locked is opened for reading: that is enough, whatever its rights are."""
    return opened(name, (os.O_RDWR if size else os.O_RDONLY) | _FLAGS, dir_fd=folder)


def _make(folder: int, name: str, content: bytes, size: int = 0, *, mode: int) -> None:
    """Make a file that appears whole; where somebody else is first, theirs stays."""
    handle = _nameless(folder)
    if handle is None:
        _make_by_name(folder, name, content, size, mode=mode)
        return
    try:
        _fill(handle, content, size, mode)
        source = f"/proc/self/fd/{handle}"
        try:
            os.link(source, name, dst_dir_fd=folder, follow_symlinks=True)
        except FileExistsError:
            return
        except OSError:  # without /proc, or where the file system can't do it
            _make_by_name(folder, name, content, size, mode=mode)
    finally:
        close(handle)


def _nameless(folder: int) -> int | None:
    """A file without a name (``O_TMPFILE``); None where the file system has none."""
    try:
        return opened(".", os.O_TMPFILE | os.O_RDWR, mode=0o600, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            return None
        raise


def _make_by_name(folder: int, name: str, content: bytes, size: int, *, mode: int) -> None:
    unfinished = f".{name}.{os.getpid()}.{os.urandom(4).hex()}"
    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | _FLAGS
    handle = opened(unfinished, flags, mode=0o600, dir_fd=folder)
    try:
        _fill(handle, content, size, mode)
        with suppress(FileExistsError):
            os.link(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        close(handle)
        os.unlink(unfinished, dir_fd=folder)


def _fill(handle: int, content: bytes, size: int, mode: int) -> None:
    if content:
        os.write(handle, content)
    if size:
        os.posix_fallocate(handle, 0, size)
    os.fchmod(handle, mode)
