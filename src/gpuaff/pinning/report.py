"""What a call reports: why it cannot pin, each warning once in a process, and one line a call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import suppress

from gpuaff._system import kernel
from gpuaff._system.interrupts import interruptible
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.errors import GPUAffinityError, NoDriverError
from gpuaff.formatting import printable
from gpuaff.notices import KINDS, Notice
from gpuaff.settings import pinning_is_off

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeVar

    from gpuaff.allocator.model import Plan

    _T = TypeVar("_T")

_logged: set[str] = set()
"""The messages of warnings that were logged."""


class UnavailableError(Exception):
    """Raised in a transaction that cannot pin; the last warning says why."""

    def __init__(self, warnings: Iterable[Notice], plan: Plan | None = None) -> None:
        super().__init__(warnings, plan)
        self.warnings, self.plan = tuple(warnings), plan


def try_twice(attempt: Callable[[], _T]) -> _T | UnavailableError:
    """Run transactions: where a cpuset has changed during one, a second plans from what is left."""
    with suppress(UnavailableError, OSError):
        return attempt()
    try:
        return attempt()
    except UnavailableError as error:
        return error
    except OSError as error:
        return UnavailableError([refusal(error)])


def unsupported_reason() -> Notice | None:
    """Why pinning is unavailable here; None where it is available.

    InvalidOptionError is raised where the variable GPUAFF is neither a yes nor a no.
    """
    if pinning_is_off():
        return Notice("off", "GPUAFF=off: the mask stays")
    if not kernel.can_pin():
        text = "this system has no sched_setaffinity (Linux has): the CPUs stay as they are"
        return Notice("not-linux", text)
    if kernel.machine_tree().is_live:
        return None
    text = "GPUAFF_FSROOT describes another machine, which this process is not on: unset it to pin"
    return Notice("other-machine", text)


def refusal(error: OSError, cpus: CpuSet = frozenset()) -> Notice:
    """The kernel refuses to set these CPUs; where they are unknown, to report or to set any."""
    what = (
        f"CPUs {format_cpulist(cpus)}" if cpus else "to report this process's CPUs, or to set any"
    )
    text = (
        f"the kernel refused {what} ({error.strerror}): no thread was moved; a cpuset or a seccomp "
        "filter may forbid it; where CPUs have come or gone, call set_affinity() to plan anew"
    )
    return Notice("pin-failed", text)


def refuse_if_broken(notices: Iterable[Notice]) -> None:
    """Raise the first warning that ``strict`` makes an error."""
    for notice in notices:
        if notice.code == "no-driver":
            raise NoDriverError(notice.message)
        if KINDS[notice.code].strict:
            raise GPUAffinityError(f"{notice.message} [{notice.code}; strict]")


def say(notices: Iterable[Notice], *, rank: int | None = None) -> None:
    """Log each warning once per process."""
    who = "" if rank is None else f"rank {rank}: "
    for notice in notices:
        kind = KINDS[notice.code]
        if notice.message in _logged or (kind.once_per_job and rank):
            continue
        if log(kind.level, f"{who}{notice.message} [{notice.code}]"):
            _logged.add(notice.message)


def log(level: str, message: str) -> bool:
    """Log a message; whether that was done, as far as can be known."""
    # No handler shows INFO where logging was not imported, which takes a while.
    if level == "info" and "logging" not in sys.modules:
        return False
    import logging

    with interruptible():  # a handler may wait
        getattr(logging.getLogger("gpuaff"), level)(f"gpuaff: {printable(message)}")
    return True
