"""safe_gpu's lock: while a claim looks and occupies, no script that uses safe_gpu does.

safe_gpu locks its file exclusively, by ``fcntl.lockf``, from its look until its placeholder is
there. A claim locks it *shared*, so that claims do not wait for each other, and by an open file
description lock: a classic one would be lost when anything in the process closes that file.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from threading import Event, Thread

from gpuaff._system import descriptors, env, locks
from gpuaff._system.interrupts import interruptible
from gpuaff.claims.locking.directory import holder_in_words
from gpuaff.errors import ClaimTimeoutError, GpusBusyError, InvalidOptionError
from gpuaff.notices import Notice

# It is built into safe_gpu.
DEFAULT = "/tmp/safe_gpu/gpu-lock-magic-RaNdOM-This_Name-NEED_BE-THE_SAME-Across_Users"  # noqa: S108

# In seconds. A claim waits at least this long for safe_gpu users to choose, even one that does not
# wait for GPUs: it is not known yet which they take. They import torch meanwhile, 4 s each on a
# real machine, one after another.
LIMIT = 60.0
# A claim lets waiting safe_gpu users go first for this long. Claims that hold the lock need
# a second, or the time that importing torch takes; one that holds it for longer is stopped.
STAND_BACK = 20.0
_STEP = 0.005  # between two looks at the waiters
_LOG_AFTER = 1.0  # so long a wait is logged, with the process that the claim waits for


def path() -> str | None:
    """The lock file's path; None when ``GPUAFF_SAFE_GPU`` is off."""
    value = env.option("safe_gpu") or "on"
    if value.lower() in ("off", "no", "0", "false"):
        return None
    if value.lower() in ("on", "yes", "1", "true"):
        return DEFAULT
    # A relative path would be another file in each folder; a mistyped word is such a path.
    if not value.startswith("/") or value.endswith("/"):
        expected = "off, or the absolute path of the lock file that safe_gpu uses here"
        raise InvalidOptionError("GPUAFF_SAFE_GPU", value, expected)
    return value


@contextmanager
def holding(
    wanted: int = 1, *, limit: float = LIMIT, where: str | None = None
) -> Iterator[tuple[Notice, ...]]:
    """Keep safe_gpu's users from choosing GPUs, by the lock file ``where``; None is :func:`path`.

    Yields ``safe-gpu-unlocked`` where it cannot be locked; ClaimTimeoutError after ``limit``.
    """
    where = where or path()
    handle = -1
    warnings: tuple[Notice, ...] = ()
    try:
        if where is not None:
            handle = _locked(where, wanted, limit)
    except ClaimTimeoutError:  # which is an OSError, too
        raise
    except OSError as error:
        warnings = (_unlocked(str(where), error),)
    try:
        yield warnings
    finally:
        _close(handle)


def _locked(where: str, wanted: int, limit: float) -> int:
    """Open and lock the file."""
    handle = _opened(where)
    try:
        _let_waiters_go_first(handle, where, limit)
        if not locks.try_range(handle, 0, length=locks.WHOLE, shared=True):
            _wait(handle, where, wanted, limit)
    except BaseException:
        _close(handle)
        raise
    return handle


def _close(handle: int) -> None:
    descriptors.close_private(handle, lambda _: locks.free_range(handle, 0, length=locks.WHOLE))


def _opened(where: str) -> int:
    """Open the file, which is made if it is missing."""
    folder, _, name = where.rpartition("/")
    # Without a sticky bit: with one, and ``fs.protected_regular``, the kernel would refuse the
    # O_CREAT by which safe_gpu opens files that are another user's.
    opened = locks.open_folder(folder or "/", mode=0o777)
    try:
        handle = locks.open_lock_file(opened, name)
    finally:
        descriptors.close(opened)
    descriptors.private.add(handle)
    return handle


def _let_waiters_go_first(handle: int, where: str, limit: float) -> None:
    """Let earlier waiters have their turn; when one of them holds the lock, we queue behind it."""
    # The kernel grants a shared lock beside other shared ones, so claims that keep coming would
    # starve a safe_gpu user.
    file = locks.identity(handle)
    if any(locks.identity(other) == file for other in descriptors.private - {handle}):
        return  # they wait for this process
    ahead, started = locks.exclusive_waiters(handle), time.monotonic()
    while ahead and locks.exclusive_holder(handle) is None:
        waited = time.monotonic() - started
        if waited >= min(STAND_BACK, limit):
            return
        if waited >= _LOG_AFTER:
            _log_wait(where, f"{holder_in_words(min(ahead))}, which waits for other claims,")
        with interruptible():
            time.sleep(_STEP)
        ahead &= locks.exclusive_waiters(handle)


def _wait(handle: int, where: str, wanted: int, limit: float) -> None:
    """Lock the file when our turn has come in the kernel's queue."""
    started = time.monotonic()
    # Polling would never get the lock where safe_gpu users follow each other, and such a sleep
    # cannot be interrupted, so a thread sleeps, with an open file of its own. When we give up it
    # stays asleep, and unlocks as soon as it gets the lock.
    own, has_lock, is_over = _opened(where), Event(), Event()

    def sleep() -> None:
        with suppress(OSError):  # the caller's attempt raises the same
            locks.wait_for_shared(own)
        has_lock.set()
        is_over.wait()
        _close(own)

    thread = Thread(target=sleep, name="gpuaff-safe-gpu", daemon=True)
    thread.start()
    try:
        while not has_lock.is_set():
            waited = time.monotonic() - started
            if waited >= limit:
                raise _timed_out(handle, where, wanted, waited)
            if waited >= _LOG_AFTER:
                _log_wait(where, holder_in_words(locks.exclusive_holder(handle)))
            with interruptible():
                has_lock.wait(min(_LOG_AFTER, limit - waited))
        locks.try_range(handle, 0, length=locks.WHOLE, shared=True)  # beside the thread's
    finally:
        is_over.set()
        if has_lock.is_set():
            thread.join()  # no fork may happen while it runs


def _timed_out(handle: int, where: str, wanted: int, waited: float) -> ClaimTimeoutError:
    holder = holder_in_words(locks.exclusive_holder(handle))
    why = (
        f"{holder} is choosing GPUs with safe_gpu, and holds its lock {where}: see whether it is "
        "stopped or hangs, or set GPUAFF_SAFE_GPU=off if safe_gpu is not used on this machine"
    )
    return ClaimTimeoutError(waited, GpusBusyError(wanted, 0, (why,)))


def _unlocked(where: str, error: OSError) -> Notice:
    notice = Notice(
        "safe-gpu-unlocked",
        f"safe_gpu's lock {where} is unusable: {locks.problem_of(error)}. A script that uses "
        "safe_gpu and chooses at the same moment may take the same GPU. Remove what is there, or "
        "ask its owner to; GPUAFF_SAFE_GPU names another file, or is off if safe_gpu is not used",
    )
    from gpuaff.pinning.state import say

    say([notice])
    return notice


@cache  # so once for each process that is waited for
def _log_wait(where: str, process: str) -> None:
    from gpuaff.pinning.state import log

    log("info", f"waiting for {process} to choose GPUs with safe_gpu ({where})")
