"""Which processes ``gpuaff check`` looks at."""

from __future__ import annotations

from gpuaff.checking.check import Check
from gpuaff.checking.judge import judge
from gpuaff.checking.seen import process_seen
from gpuaff.errors import GpuaffError
from gpuaff.system import kernel
from gpuaff.system.processes import caller_and_descendants


def one(pid: int) -> list[Check]:
    """The process of this id; a thread's id means the process that it belongs to.

    Raises:
        GpuaffError: there is none, or it cannot be seen.
    """
    _refuse_blindness()
    process = kernel.process_of(pid)
    if process is None:
        raise GpuaffError(
            f"--pid {pid}: no such process: it has ended, or /proc does not show it to this user"
        )
    seen = process_seen(process)
    if seen is None:
        raise GpuaffError(f"--pid {pid}: the process has ended")
    return [judge(seen)]


def family() -> list[Check]:
    """The process that has called this command, and all that it has started, but this one.

    Raises:
        GpuaffError: it cannot be seen.
    """
    _refuse_blindness()
    found = (process_seen(pid) for pid in caller_and_descendants())
    return [judge(seen) for seen in found if seen is not None]  # None has ended meanwhile


def _refuse_blindness() -> None:
    if not kernel.can_pin():
        raise GpuaffError("this system does not tell which CPUs a process may use (Linux does)")
    if kernel.thread_ids() is None:
        raise GpuaffError("/proc is not mounted, or is another PID namespace's: mount this one's")
