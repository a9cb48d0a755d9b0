"""The lock directory: one path for everyone on this machine.

``GPUAFF_LOCK_DIR``, else ``/tmp/gpuaff``. It holds the guard, the registry (holders and waiters)
and lock files for devices that have none in sysfs. Where the variable is set, for containers that
mount one directory, each claim takes a lock file there as well (case E5). It must be local: no
network file system (case E9).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gpuaff._system import descriptors, env, locks
from gpuaff.errors import LockDirectoryError

DEFAULT = "/tmp/gpuaff"  # noqa: S108 - the one place where every user may write
"""Not /run/lock or /dev/shm: the first belongs to root on many systems, and systemd empties the
second when a user logs out."""

_KEPT = 0o1666
"""Writable for all, and sticky: systemd-tmpfiles leaves such files alone (the XDG base directory
specification); else it would remove a registry that jobs of weeks still use (case E9)."""

_README = b"""Here gpuaff coordinates which process holds or waits for which GPU.
docs/lease-protocol.md in its sources says what the files are. Do not remove them.
"""

_REMEDY = "remove it, ask its owner to, or set GPUAFF_LOCK_DIR to another folder for everyone"


def path() -> str:
    """The lock directory's path.

    Raises:
        LockDirectoryError: the path is relative, so it would differ in each working directory.
    """
    found = env.option("lock_dir") or DEFAULT
    if not found.startswith("/"):
        raise LockDirectoryError(
            found, "GPUAFF_LOCK_DIR must be a whole path, the same for everyone: /scratch/gpuaff"
        )
    return found.rstrip("/") or "/"


def is_shared() -> bool:
    """Whether GPUAFF_LOCK_DIR is set, so that each claim takes a lock there as well."""
    return env.option("lock_dir") is not None


def open_file(name: str, *, size: int = 0) -> int:
    """Open a file of the lock directory; both are made if missing.

    Args:
        name: its name there.
        size: how many bytes are set aside when it is made.

    Returns:
        Its descriptor, which programs do not inherit.

    Raises:
        LockDirectoryError: something else is in its place, it may not be written, or the disk is
            full.
    """
    where = path()
    at = where
    try:
        locks.make_folder(where, mode=0o1777, name="README", content=_README, file_mode=_KEPT)
        folder = locks.open_folder(where)
        try:
            at = f"{where}/{name}"
            return locks.open_lock_file(folder, name, size=size, mode=_KEPT)
        finally:
            descriptors.close(folder)
    except locks.UnusableError as error:
        raise LockDirectoryError(at, f"{error}: {_REMEDY}") from None
    except OSError as error:
        raise _refusal(at, error) from None


@contextmanager
def using(file: str) -> Iterator[None]:
    """Raise what the kernel refuses to do with a file as an error that has a remedy.

    Args:
        file: its path.

    Raises:
        LockDirectoryError: the kernel has refused something.
    """
    try:
        yield
    except LockDirectoryError:
        raise
    except OSError as error:
        raise _refusal(file, error) from None


def _refusal(file: str, error: OSError) -> LockDirectoryError:
    problem = f"{error.strerror} ({_why(error)}): {_remedy(error)}"
    return LockDirectoryError(file, problem, error.errno)


def _remedy(error: OSError) -> str:
    import errno

    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "close some, or raise the limit (ulimit -n)"
    if error.errno == errno.ENOENT:
        return "make that one, or set GPUAFF_LOCK_DIR to another folder for everyone"
    return _REMEDY


def has(name: str) -> bool:
    """Whether the lock directory has such a file."""
    return locks.identity(f"{path()}/{name}") is not None


def still_has(name: str, handle: int) -> bool:
    """Whether an open file is still the one of that name."""
    try:
        folder = locks.open_folder(path())
    except OSError:
        return False
    try:
        return locks.is_current(folder, name, handle)
    finally:
        descriptors.close(folder)


def _why(error: OSError) -> str:
    import errno

    words = {
        errno.EPERM: "this user may not use it, or its file system has no hard links",
        errno.ENOSPC: "no room is left",
        errno.EDQUOT: "no room is left for this user",
        errno.EROFS: "it cannot be written",
        errno.ENOENT: "the folder above it is missing",
        errno.EMFILE: "this process has too many files open",
        errno.ENFILE: "this machine has too many files open",
        errno.EAGAIN: "its owner keeps others from opening it",
        errno.EBADF: _NO_LOCKS,
        errno.EINVAL: _NO_LOCKS,
        errno.ENOLCK: _NO_LOCKS,
        errno.ENOSYS: _NO_LOCKS,
        errno.EOPNOTSUPP: _NO_LOCKS,
    }
    told = locks.in_the_way(error) or words.get(error.errno or 0)
    return told or "it cannot be used"


_NO_LOCKS = "it cannot be locked as is needed: network file systems cannot"
