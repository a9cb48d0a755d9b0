"""Processes and their users: the only module that imports psutil, and late."""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass

from gpuaff._system import kernel
from gpuaff.errors import GpuaffError


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessInfo:
    """A process, as it describes itself: its starter has chosen the command. None is unknown."""

    pid: int | None = None  # where it is not visible here, that of its own PID namespace
    command: str | None = None  # its arguments, too; its name where this user may not read those
    user: str | None = None
    since: float | None = None  # in seconds since 1970; of claimers and waiters, of that
    exiting: bool = False  # the kernel is about to free all that it holds


def look_up(pid: int) -> ProcessInfo | None:
    """Describe a process; None when there is no such process, or it is not visible."""
    import psutil

    try:  # what this user may not read is None
        found = psutil.Process(pid).as_dict(["cmdline", "name", "username", "create_time"])
    except (psutil.Error, OSError, OverflowError, ValueError):
        return None
    program, *arguments = found["cmdline"] or [""]  # a zombie's is empty
    command = " ".join((program.rpartition("/")[2], *arguments))
    return ProcessInfo(
        pid=pid,
        command=command or found["name"] or "a process",
        user=found["username"],
        since=found["create_time"],
        exiting=kernel.is_exiting(pid),
    )


def user_name(uid: int) -> str:
    """A user's name; the number where it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)


def caller_and_descendants() -> list[int]:
    """This process's parent and its descendants, ascending, without this one and its own."""
    me, caller = os.getpid(), os.getppid()
    lines = {pid: {pid, *kernel.ancestors(pid)} for pid in kernel.process_ids()}
    if caller not in lines:
        raise GpuaffError(
            "the process that called gpuaff is not visible (it may be outside of this container): "
            "name one with --pid"
        )
    return [pid for pid, line in lines.items() if caller in line and me not in line]
