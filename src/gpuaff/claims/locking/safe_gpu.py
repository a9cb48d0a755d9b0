"""safe_gpu's lock: while a claim looks and occupies, no script that uses safe_gpu does.

safe_gpu locks its file exclusively, by ``fcntl.lockf``, from its look until its placeholder is
there. A claim locks it *shared*, so that claims do not wait for each other, and by an open file
description lock: a classic one would be lost when anything in the process closes that file.

The kernel grants a shared lock beside other shared ones, so claims that keep coming would starve a
safe_gpu user: a claim that comes while one waits stands back until it has had its turn. Where
safe_gpu users follow each other, the claim waits in the kernel's queue.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from gpuaff._system import descriptors, env, kernel, locks
from gpuaff._system.interrupts import interruptible
from gpuaff.errors import ClaimTimeoutError, GpusBusyError, InvalidOptionError
from gpuaff.formatting import printable
from gpuaff.notices import Notice

DEFAULT = "/tmp/safe_gpu/gpu-lock-magic-RaNdOM-This_Name-NEED_BE-THE_SAME-Across_Users"  # noqa: S108 - safe_gpu's
"""The path that is built into safe_gpu."""

LIMIT = 60.0
"""How long a claim waits at least for safe_gpu users to choose, in seconds. They import torch
meanwhile, 4 s each on a real machine, one after another."""

STAND_BACK = 20.0
"""How long a claim lets waiting safe_gpu users go first, in seconds. Claims that hold the lock
meanwhile need a second, or the time that importing torch takes; one that holds it for longer is
stopped, and standing back does not help then."""

_STEP = 0.005
"""Seconds between two looks at the waiters."""

_TELL = 1.0
"""Seconds of waiting after which the log names the process that the claim waits for."""

_PATIENCE = 20
"""How often the file is looked for again, 5 ms apart, while safe_gpu may be making it."""

_open: set[int] = set()
"""The descriptors by which this process holds, or waits for, the lock."""

_said: set[str] = set()


def _forget_in_child() -> None:
    """A forked child must not keep its parent's lock alive, so it closes its copy."""
    descriptors.close(*_open)
    _open.clear()


kernel.in_forked_child(_forget_in_child)


def path() -> str | None:
    """The lock file's path; None when ``GPUAFF_SAFE_GPU`` is off.

    Raises:
        InvalidOptionError: the variable is neither ``off`` nor a path.
    """
    said = env.option("safe_gpu") or "on"
    if said.lower() in ("off", "no", "0", "false"):
        return None
    if said.lower() in ("on", "yes", "1", "true"):
        return DEFAULT
    # A relative path would be another file in each folder; a mistyped word is such a path.
    if not said.startswith("/") or said.endswith("/"):
        expected = "off, or the absolute path of the lock file that safe_gpu uses here"
        raise InvalidOptionError("GPUAFF_SAFE_GPU", said, expected)
    return said


def patience(wait: float | None) -> float | None:
    """How long a claim waits for safe_gpu users that are choosing, in seconds.

    Args:
        wait: how long it waits for GPUs. Even one that does not wait lets them choose: they are
            about to take GPUs, and it is not known yet which.
    """
    return None if wait is None else max(LIMIT, wait)


@contextmanager
def holding(
    wanted: int = 1,
    *,
    limit: float | None = LIMIT,
    where: str | None = None,
) -> Iterator[tuple[Notice, ...]]:
    """Keep safe_gpu's users from choosing GPUs.

    Args:
        wanted: how many GPUs were requested, for the error.
        limit: how long to wait for those that are choosing, in seconds; None is without limit.
        where: the lock file; None is :func:`path`.

    Yields:
        ``safe-gpu-unlocked`` where the file cannot be locked, which is logged too.

    Raises:
        ClaimTimeoutError: a safe_gpu user has held the lock for all that time.
        InvalidOptionError: ``GPUAFF_SAFE_GPU`` is invalid.
    """
    where = where or path()
    if where is None:
        yield ()
        return
    handle = -1
    warnings: tuple[Notice, ...] = ()
    try:
        handle = _lock_current(where, wanted, limit)
    except ClaimTimeoutError:  # which is an OSError, too
        raise
    except (OSError, locks.UnusableError) as error:
        warnings = (_unlocked(where, error),)
    try:
        yield warnings
    finally:
        _close(handle)


def _lock_current(where: str, wanted: int, limit: float | None) -> int:
    """Open and lock the file; once more where it has been replaced meanwhile.

    Whatever cleans /tmp may remove it, and the next safe_gpu user makes another one.
    """
    started = time.monotonic()
    while True:
        handle = _opened(where)
        try:
            _lock(handle, where, wanted, started, limit)
            if locks.identity(where) == locks.identity_of(handle):
                return handle
        except BaseException:
            _close(handle)
            raise
        _close(handle)


def _close(handle: int) -> None:
    if handle in _open:  # not in a forked child, and not what a thread waits for
        _open.discard(handle)
        _unlock(handle)
        descriptors.close(handle)


def _opened(where: str) -> int:
    """Open the file, which is made if it is missing.

    safe_gpu makes a folder that only its maker may write to (the usual umask), and then the file:
    so where there is a folder and no file, the file may appear in a moment.
    """
    folder, _, name = where.rpartition("/")
    for turn in range(_PATIENCE):
        if turn:
            time.sleep(_STEP)
        try:
            handle = _open_or_make(folder or "/", name)
        except (FileNotFoundError, PermissionError) as error:
            problem: OSError = error
            # Not found though it exists: the folder was a new one of safe_gpu's, still empty, and
            # another one was put in its place meanwhile.
            there = locks.identity(where) is not None and isinstance(error, PermissionError)
            if there or locks.identity(folder) is None:
                raise
            continue
        _open.add(handle)
        return handle
    raise problem


def _open_or_make(folder: str, name: str) -> int:
    # Without a sticky bit: with one, and ``fs.protected_regular``, the kernel would refuse the
    # O_CREAT by which safe_gpu opens files that are another user's.
    locks.make_folder(folder, mode=0o777, name=name)
    opened = locks.open_folder(folder)
    try:
        return locks.open_lock_file(opened, name)
    finally:
        descriptors.close(opened)


def _lock(handle: int, where: str, wanted: int, started: float, limit: float | None) -> None:
    _stand_back(handle, where, STAND_BACK if limit is None else min(STAND_BACK, limit))
    if locks.try_shared(handle):
        return
    line = _Line(handle)
    try:
        while not line.is_over:
            waited = time.monotonic() - started
            if limit is not None and waited >= limit:
                raise _too_late(handle, where, wanted, waited)
            if waited >= _TELL:
                _tell(where, _who(locks.exclusive_holder(handle)))
            with interruptible():
                line.sleep(_TELL if limit is None else min(_TELL, limit - waited))
    finally:
        line.leave()
    line.check()


def _stand_back(handle: int, where: str, limit: float) -> None:
    """Let earlier waiters have their turn, but not those that come after us.

    It has come when one of them holds the lock: then we queue behind it. A waiter that is just
    being woken is in neither list, so it counts as done only when it is missing twice.
    """
    if _open - {handle}:  # they wait for this process
        return
    ahead = locks.exclusive_waiters(handle)
    started = time.monotonic()
    missing = 0
    while ahead and missing < 2 and locks.exclusive_holder(handle) is None:
        waited = time.monotonic() - started
        if waited >= limit:
            return
        if waited >= _TELL:
            _tell(where, f"{_who(min(ahead))}, which waits for other claims,")
        with interruptible():
            time.sleep(_STEP)
        missing = 0 if ahead & locks.exclusive_waiters(handle) else missing + 1


class _Line:
    """A place in the kernel's queue for the lock.

    Such a wait cannot be interrupted, so another thread sleeps. When this one gives up, that one
    stays asleep, and unlocks as soon as it gets the lock.
    """

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._mutex = threading.Lock()
        self._done = False
        self._left = False
        self._problem: OSError | None = None
        self._thread = threading.Thread(target=self._stand, name="gpuaff-safe-gpu", daemon=True)
        try:
            self._thread.start()
            self._stands = True
        except RuntimeError:  # no more threads can be started: then we poll
            self._stands = False

    @property
    def is_over(self) -> bool:
        """Whether we have the lock, or never will."""
        return self._done

    def sleep(self, seconds: float) -> None:
        """Sleep until then, at most for so long."""
        if self._stands:
            self._thread.join(seconds)
        elif locks.try_shared(self._handle):
            self._done = True
        else:
            time.sleep(_STEP)

    def leave(self) -> None:
        """Give up, unless we have the lock."""
        if not self._stands:
            return
        with self._mutex:
            self._left = not self._done
            if self._left:
                _open.discard(self._handle)
        if not self._left:
            self._thread.join()  # no fork may happen while it runs

    def check(self) -> None:
        """Raise the problem, if such a lock is impossible here.

        Raises:
            OSError: the kernel's reason.
        """
        if self._problem is not None:
            raise self._problem

    def _stand(self) -> None:
        try:
            locks.wait_for_shared(self._handle)
        except OSError as error:
            self._problem = error
        with self._mutex:
            self._done = True
            if self._left:
                _unlock(self._handle)
                descriptors.close(self._handle)


def _unlock(handle: int) -> None:
    with suppress(OSError):
        locks.free_shared(handle)  # closing is not enough: a forked child may have a copy


def _too_late(handle: int, where: str, wanted: int, waited: float) -> ClaimTimeoutError:
    holder = _who(locks.exclusive_holder(handle))
    why = (
        f"{holder} is choosing GPUs with safe_gpu, and holds its lock {where}: see whether it is "
        "stopped or hangs, or set GPUAFF_SAFE_GPU=off where nobody uses safe_gpu"
    )
    return ClaimTimeoutError(waited, GpusBusyError(wanted, 0, (why,)))


def _unlocked(where: str, error: Exception) -> Notice:
    why = _why(error) if isinstance(error, OSError) else str(error)
    notice = Notice(
        "safe-gpu-unlocked",
        f"safe_gpu's lock {where} cannot be had: {why}. A script that uses safe_gpu and chooses at "
        "the same moment may take the same GPU. Remove what is there, or ask its owner to; "
        "GPUAFF_SAFE_GPU names another file, or is off where nobody uses safe_gpu",
    )
    _log("warning", f"gpuaff: {notice.message} [{notice.code}]")
    return notice


_REASONS = {
    errno.ENOENT: "there is none, and nowhere to make it",
    errno.EINVAL: "this kernel has no open file description locks (Linux 3.15 has them)",
}


def _why(error: OSError) -> str:
    told = locks.in_the_way(error) or _REASONS.get(error.errno or 0)
    return told or error.strerror or str(error)


def _tell(where: str, whom: str) -> None:
    _log("info", f"gpuaff: waiting for {whom} to choose GPUs with safe_gpu ({where})")


def _log(level: str, message: str) -> None:
    """Log it, once in a process."""
    if message in _said:
        return
    _said.add(message)
    import logging  # only a claim that waits, or warns, pays for it

    getattr(logging.getLogger("gpuaff"), level)(printable(message))


def _who(pid: int | None) -> str:
    if pid is None or pid <= 0:
        return "a process that cannot be seen from here"
    return f"process {pid} ({kernel.name_of(pid) or 'unknown'})"
