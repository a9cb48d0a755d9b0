"""Which processes ``gpuaff check`` looks at. The only module that imports psutil, late."""

from __future__ import annotations

from gpuaff.binding.check import Check
from gpuaff.binding.judge import judge
from gpuaff.binding.seen import process_seen
from gpuaff.errors import GpuaffError
from gpuaff.system import kernel


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
    found = (process_seen(pid) for pid in _family())
    return [judge(seen) for seen in found if seen is not None]  # None has ended meanwhile


def _refuse_blindness() -> None:
    if not kernel.can_pin():
        raise GpuaffError("this system does not tell which CPUs a process may use (Linux does)")
    if kernel.thread_ids() is None:
        raise GpuaffError("/proc is not mounted, or is another PID namespace's: mount this one's")


def _family() -> list[int]:
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
