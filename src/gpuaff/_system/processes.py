"""Who has started whom, and what: the only module that imports psutil, and late."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpuaff._system import kernel
from gpuaff.errors import GpuaffError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeVar

    import psutil

    _T = TypeVar("_T")


def caller_and_descendants() -> list[int]:
    """The process that has started this one and all that it has started, but what is this one's.

    Returns:
        Their ids, ascending; some may have ended meanwhile.

    Raises:
        GpuaffError: they cannot be seen.
    """
    import psutil

    try:
        me = psutil.Process()
        parent = me.parent()
        if parent is None:
            raise GpuaffError(
                "the process that called gpuaff cannot be seen (it may be outside of this "
                "container): name one with --pid"
            )
        mine = {me.pid, *(child.pid for child in me.children(recursive=True))}
        children = parent.children(recursive=True)
    except psutil.Error as error:
        raise GpuaffError(
            f"the processes around this one cannot be seen ({error}): name one with --pid"
        ) from None
    return sorted({parent.pid, *(child.pid for child in children)} - mine)


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """What a process tells of itself. Whoever started it has chosen the command.

    Attributes:
        pid: its id.
        command: its program, without the folder, and its arguments; its name where those are not
            told.
        user: whose it is, by name; None where that is not told.
        started: when it started, in seconds since 1970.
        exiting: whether it is exiting.
    """

    pid: int
    command: str
    user: str | None
    started: float
    exiting: bool = False


def look_up(pid: int) -> Process | None:
    """What a process tells; None when there is no such process, or it is not shown."""
    import psutil

    try:
        process = psutil.Process(pid)
        with process.oneshot():
            return Process(
                pid=pid,
                started=process.create_time(),
                command=_command(process),
                user=_told(process.username),
                exiting=kernel.is_exiting(pid),
            )
    except (psutil.Error, OSError, OverflowError, ValueError):
        return None


def user_name(uid: int) -> str:
    """A user's name; the number where it has none."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)


def _command(process: psutil.Process) -> str:
    """The command without the folder of its program; its name where it is not told."""
    line = _told(process.cmdline) or []
    if not line:  # a zombie's is empty
        return _told(process.name) or "a process"
    return " ".join((line[0].rpartition("/")[2], *line[1:]))


def _told(ask: Callable[[], _T]) -> _T | None:
    """What a process tells of itself; None when not to this user."""
    import psutil

    try:
        return ask()
    except (psutil.AccessDenied, psutil.ZombieProcess):
        return None
