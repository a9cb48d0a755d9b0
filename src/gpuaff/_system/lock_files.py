"""The files and folders that are only there to be locked: made, opened, told apart.

Many users share them, so they are made whole and for everyone, and what is opened is looked at
before it is used: somebody may have planted something in its place.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

from gpuaff._system import descriptors
from gpuaff._system.descriptors import close, moved_up, opened, turn_of
from gpuaff._system.kernel import Tree

_FLAGS = os.O_NOCTTY | os.O_NONBLOCK | os.O_NOFOLLOW
"""Not to wait for the writer of a FIFO, and not to follow a link: either may have been planted."""

_PATIENCE = 20
"""How often a file with too many names is looked at again, 5 ms apart: its maker may be about to
take one away."""


def real_name(path: str) -> str:
    """A path without links: what /proc calls the file of a process that has opened it."""
    return os.path.realpath(path)


def identity(path: str) -> tuple[int, int] | None:
    """The device number and inode of a file, without opening it; None when there is none."""
    try:
        found = os.stat(path)
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


def open_directory(path: str) -> int:
    """Open a directory to lock it.

    Raises:
        OSError: there is none, or it may not be read.
    """
    return moved_up(opened(path, os.O_RDONLY | os.O_DIRECTORY))


def read_at(handle: int, offset: int, size: int) -> bytes:
    """Read a part of a file."""
    return os.pread(handle, size, offset)


def write_at(handle: int, offset: int, data: bytes) -> None:
    """Write a part of a file, at once: what is read meanwhile is the old text or the new one."""
    os.pwrite(handle, data, offset)


class UnusableError(Exception):
    """A file that is to be locked is none that can be; the text says why."""


_IN_THE_WAY = {
    errno.ELOOP: "a link stands in its place",
    errno.ENOTDIR: "a folder is expected, and a file or a link stands there",
    errno.EISDIR: "a folder stands in its place",
    errno.EACCES: "this user may not use it",
    errno.ENXIO: "something that is no file stands in its place",
}


def in_the_way(error: OSError) -> str | None:
    """What somebody has put where a file should be, in words; None when the error is another."""
    return _IN_THE_WAY.get(error.errno or 0)


def make_folder(
    path: str, *, mode: int, name: str, content: bytes = b"", file_mode: int = 0o666
) -> None:
    """Make a folder with a file in it; where there is something of its name, nothing is done.

    Both appear at once, whatever the umask is and whoever dies meanwhile. An empty folder could be
    replaced by another maker's, so it gets the file before it gets its name.

    Args:
        path: the folder.
        mode: what it may be used for by whom.
        name: the file's name.
        content: what is in the file.
        file_mode: what that may be used for by whom.

    Raises:
        OSError: it cannot be made, and nobody else has made it meanwhile.
    """
    if os.path.lexists(path):
        return
    unfinished = f"{path}.{os.getpid()}.{os.urandom(4).hex()}"
    os.mkdir(unfinished, 0o700)
    try:
        handle = open_folder(unfinished)
        try:
            _make(handle, name, content, mode=file_mode)
            os.fchmod(handle, mode)
        finally:
            close(handle)
        os.rename(unfinished, path)
    except BaseException as error:
        for remove, what in (os.unlink, f"{unfinished}/{name}"), (os.rmdir, unfinished):
            with suppress(OSError):
                remove(what)
        # Somebody else was first: ENOTEMPTY, or EPERM where that is another user and the folder
        # above is sticky, as /tmp is.
        if not (isinstance(error, OSError) and os.path.lexists(path)):
            raise


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
    found = os.fstat(handle)
    return (named.st_dev, named.st_ino) == (found.st_dev, found.st_ino)


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
    raise UnusableError(
        "it has another name elsewhere (a hard link), so it may be somebody's file; "
        "remove the one of the two that should not be"
    )


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


# Files as /proc/locks calls them.
#
# That names the device of the file system (``s_dev`` of its superblock), and so does
# /proc/self/mountinfo (``proc_pid_mountinfo(5)``). ``stat(2)`` mostly tells the same, but on btrfs
# each subvolume has a device number of its own there.


def locked_name(handle: int) -> tuple[int, int]:
    """The device number and inode of an open file, as /proc/locks has them.

    Those of ``stat(2)`` where /proc does not tell.
    """
    found = os.fstat(handle)
    mount = mount_of(Tree().read(f"proc/self/fdinfo/{handle}") or "")
    device = None if mount is None else device_of(mount, Tree().read("proc/self/mountinfo") or "")
    return (found.st_dev if device is None else device), found.st_ino


def locked_name_of(path: str) -> tuple[int, int] | None:
    """The same of a file that is not opened for it (``O_PATH``).

    None when there is none.
    """
    try:
        handle = descriptors.opened(path, os.O_PATH)
    except OSError:
        return None
    try:
        return locked_name(handle)
    finally:
        descriptors.close(handle)


def mount_of(fdinfo: str) -> int | None:
    """The number of the mount that an open file is on, by its lines in /proc/self/fdinfo."""
    for line in fdinfo.splitlines():
        key, _, value = line.partition(":")
        if key == "mnt_id" and value.strip().isdecimal():
            return int(value)
    return None


def device_of(mount: int, mountinfo: str) -> int | None:
    """The device number of a mount; None when it is not listed."""
    for line in mountinfo.splitlines():
        fields = line.split(maxsplit=3)
        if len(fields) > 2 and fields[0] == str(mount):
            major, _, minor = fields[2].partition(":")
            return os.makedev(int(major), int(minor))
    return None
