"""safe_gpu's lock: while a claim looks and occupies, no script that uses safe_gpu does.

safe_gpu locks its file exclusively, by ``fcntl.lockf``, from its look until its placeholder is
there. A claim locks it *shared*, so that claims do not wait for each other, and by an open file
description lock: a classic one would be lost when anything in the process closes that file.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread

from gpuaff._system import descriptors, env, locks
from gpuaff._system.interrupts import interruptible
from gpuaff.claims.locking.directory import holder_in_words
from gpuaff.errors import ClaimTimeoutError, GpusBusyError, InvalidOptionError
from gpuaff.formatting import printable
from gpuaff.notices import Notice

# It is built into safe_gpu.
DEFAULT = "/tmp/safe_gpu/gpu-lock-magic-RaNdOM-This_Name-NEED_BE-THE_SAME-Across_Users"  # noqa: S108

# In seconds: so long does a claim wait at least for safe_gpu users to choose, even one that does
# not wait for GPUs: it is not known yet which they take. They import torch meanwhile, 4 s each on
# a real machine, one after another.
LIMIT = 60.0
# So long does a claim let waiting safe_gpu users go first. Claims that hold the lock meanwhile need
# a second, or the time that importing torch takes; one that holds it for longer is stopped.
STAND_BACK = 20.0
_STEP = 0.005  # between two looks at the waiters
_LOG_AFTER = 1.0  # so long a wait is logged, with the process that the claim waits for

_logged: set[str] = set()


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
    wanted: int = 1, *, limit: float | None = LIMIT, where: str | None = None
) -> Iterator[tuple[Notice, ...]]:
    """Keep safe_gpu's users from choosing GPUs, by the lock file ``where``; None is :func:`path`.

    Yields ``safe-gpu-unlocked`` where the file cannot be locked, and logs it. ClaimTimeoutError, of
    the number of GPUs that is ``wanted``, where a safe_gpu user has held the lock for ``limit``
    seconds; None is without limit.
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


def _locked(where: str, wanted: int, limit: float | None) -> int:
    """Open and lock the file; once more where it was replaced meanwhile, by what cleans /tmp."""
    started = time.monotonic()
    while True:
        handle = _opened(where)
        try:
            _let_waiters_go_first(handle, where, limit)
            is_locked = _try(handle) or _wait(handle, where, wanted, started, limit)
            if is_locked and locks.identity(where) == locks.identity(handle):
                return handle
        except BaseException:
            _close(handle)
            raise
        _close(handle)


def _try(handle: int) -> bool:
    return locks.try_range(handle, 0, length=locks.WHOLE, shared=True)


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


def _let_waiters_go_first(handle: int, where: str, limit: float | None) -> None:
    """Let earlier waiters have their turn; when one of them holds the lock, we queue behind it."""
    # The kernel grants a shared lock beside other shared ones, so claims that keep coming would
    # starve a safe_gpu user.
    file = locks.identity(handle)
    if any(locks.identity(other) == file for other in descriptors.private - {handle}):
        return  # they wait for this process
    ahead, missing = locks.exclusive_waiters(handle), 0
    started = time.monotonic()
    # Missing twice: one just being woken is in neither list, and /proc/locks may skip a line.
    while ahead and missing < 2 and locks.exclusive_holder(handle) is None:
        waited = time.monotonic() - started
        if waited >= (STAND_BACK if limit is None else min(STAND_BACK, limit)):
            return
        if waited >= _LOG_AFTER:
            _log_wait(where, f"{holder_in_words(min(ahead))}, which waits for other claims,")
        with interruptible():
            time.sleep(_STEP)
        missing = 0 if ahead & locks.exclusive_waiters(handle) else missing + 1


def _wait(handle: int, where: str, wanted: int, started: float, limit: float | None) -> bool:
    """Lock the file when our turn has come in the kernel's queue."""
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
            if limit is not None and waited >= limit:
                raise _timed_out(handle, where, wanted, waited)
            if waited >= _LOG_AFTER:
                _log_wait(where, holder_in_words(locks.exclusive_holder(handle)))
            with interruptible():
                has_lock.wait(_LOG_AFTER if limit is None else min(_LOG_AFTER, limit - waited))
        return _try(handle)  # False where that is another file than the thread's by now
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
    _log("warning", f"gpuaff: {notice.message} [{notice.code}]")
    return notice


def _log_wait(where: str, process: str) -> None:
    _log("info", f"gpuaff: waiting for {process} to choose GPUs with safe_gpu ({where})")


def _log(level: str, message: str) -> None:
    """Log it, once in a process."""
    if message not in _logged:
        import logging  # only a claim that waits, or warns, pays for it

        _logged.add(message)
        getattr(logging.getLogger("gpuaff"), level)(printable(message))
