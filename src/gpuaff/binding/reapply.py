"""Put a share into force again that threads have left since."""

from __future__ import annotations

from contextlib import suppress

from gpuaff.binding.process import Process, enclosing, this_process
from gpuaff.binding.report import say
from gpuaff.binding.threads import move, move_all, move_caller
from gpuaff.binding.whole import whole
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.notices import Notice
from gpuaff.system import kernel


def put_into_force(share: CpuSet, *, reserved: CpuSet, rank: int | None) -> None:
    """Move the threads of this process that are not where they should be.

    Args:
        share: where they go.
        reserved: where helpers may be.
        rank: whose share it is, for what is said.

    Raises:
        GPUAffinityError: another call is at work in this thread.
    """
    grant = enclosing()[1]
    inside = share if grant is None else share & grant
    notices = [] if grant is None or inside == share else [_outside(share, grant, inside)]
    if inside:
        # A forked child that has called nothing yet started with its parent's share.
        process = this_process(border=inside)
        try:
            notices += whole(process, lambda: put_threads(process, inside, reserved))
        except OSError as error:
            notices.append(_refused(inside, error))
    say(notices, rank=rank)


def put_threads(process: Process, share: CpuSet, reserved: CpuSet) -> list[Notice]:
    """Move the threads that are not where they should be; called by ``whole``.

    Args:
        process: what is remembered of this process.
        share: where they go.
        reserved: where helpers may be.

    Returns:
        What was not as hoped.

    Raises:
        OSError: the kernel refuses these CPUs.
    """
    before = _masks()
    caller = kernel.get_affinity()
    move(share, kernel.thread_id(), caller, process.moved)
    got = kernel.get_affinity()
    notices = []
    if got != share:
        # When a cpuset grows the kernel gives back what was asked for last: what the others have.
        notices.append(_cut(share, move_caller(got)))
    strays = _Strays(process, got, before.get(process.pid, got), reserved=reserved)
    apart = {tid for tid, mask in process.apart.items() if before.get(tid) == mask}
    bound = strays.bound({tid: before[tid] for tid in before if tid not in apart}, caller)
    process.bound = {**bound, **_alive(process.bound, before)}
    if share != process.share:
        process.whole = None
    process.share, process.reserved = got, reserved
    moved = move_all(got, ours=strays, spare=apart, moved=process.moved)
    return [*notices, *moved.notices()]


def _masks() -> dict[int, CpuSet]:
    """The CPUs of each thread, as far as they can be seen."""
    found = {}
    for tid in kernel.thread_ids() or (kernel.process_id(), kernel.thread_id()):
        with suppress(OSError):  # it has ended
            found[tid] = kernel.get_affinity(tid)
    return found


def _alive(bound: dict[int, CpuSet], now: dict[int, CpuSet]) -> dict[int, CpuSet]:
    """Without the threads that have ended: their ids are used again."""
    return {tid: mask for tid, mask in bound.items() if tid in now}


class _Strays:
    """The masks of threads that are to be moved to a share.

    Those that are not inside it, those that gpuaff has set before, and the main thread's with all
    who have the same: they were born after it was narrowed, and inherited that.
    """

    def __init__(self, process: Process, share: CpuSet, main: CpuSet, *, reserved: CpuSet) -> None:
        self._helpers = reserved
        self._share = share
        self._main = main
        self._ours = {process.original, process.share}

    def __contains__(self, mask: object) -> bool:
        return mask == self._main or mask in self._ours or not self._is_inside(mask)

    def _is_inside(self, mask: object) -> bool:
        inside = (self._share, self._helpers)
        return isinstance(mask, frozenset) and any(mask <= cpus for cpus in inside)

    def bound(self, masks: dict[int, CpuSet], caller: CpuSet) -> dict[int, CpuSet]:
        """Where threads were that somebody had bound and that move all the same.

        Not the main thread, nor its heirs: what has happened to them is to be undone, not kept.
        """
        found = {tid: mask for tid, mask in masks.items() if mask in self or mask == self._share}
        found[kernel.thread_id()] = caller
        ours = self._ours | {self._main}
        return {tid: mask for tid, mask in found.items() if mask not in ours}


def _cut(asked: CpuSet, got: CpuSet) -> Notice:
    text = (
        f"of CPUs {format_cpulist(asked)} the kernel granted {format_cpulist(got)} again: a cpuset "
        "denies the others"
    )
    return Notice("mask-cut", text)


def _outside(share: CpuSet, grant: CpuSet, inside: CpuSet) -> Notice:
    instead = f"{format_cpulist(inside)} are taken" if inside else "every thread stays where it is"
    text = (
        f"of CPUs {format_cpulist(share)} not all are among those of the claim, "
        f"{format_cpulist(grant)}: {instead}; call set_affinity to plan from these"
    )
    return Notice("mask-cut", text)


def _refused(share: CpuSet, error: OSError) -> Notice:
    text = (
        f"the kernel refused CPUs {format_cpulist(share)} ({error.strerror}): every thread stays "
        "where it is; call set_affinity to plan from the CPUs that are left"
    )
    return Notice("pin-failed", text)
