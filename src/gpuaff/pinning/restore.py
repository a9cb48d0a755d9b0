"""Give a process the CPUs back that it had."""

from __future__ import annotations

from collections.abc import Collection, Container
from contextlib import suppress
from dataclasses import replace

from gpuaff._system import kernel
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.notices import Notice
from gpuaff.pinning import extras as besides
from gpuaff.pinning.report import say
from gpuaff.pinning.state import (
    NOTHING,
    Before,
    Extras,
    Process,
    enclosing,
    expect,
    remembered,
    shown,
    this_process,
)
from gpuaff.pinning.threads import Moved, move, move_all, move_caller
from gpuaff.pinning.transaction import transaction


def put_back(share: CpuSet | None, before: Before, extras: Extras | None) -> None:
    """Undo what a call has done, and all later calls; nothing where it is undone already.

    Args:
        share: what the call has set; None when it has taken back what was set.
        before: how it is to be.
        extras: what the call has set besides.

    Raises:
        GPUAffinityError: another call is at work in this thread.
    """
    process, now = remembered(), extras or NOTHING
    try:
        if process is None or process.pid != before.pid:
            _in_a_child(process, share, before, now)
        else:
            transaction(
                process, lambda: _here(process, share, before, now), memory=bool(now.memory)
            )
    except OSError as error:
        say([refused(error)], rank=None)


def _here(process: Process, share: CpuSet | None, before: Before, now: Extras) -> None:
    if before.taken is not process.taken:
        _across_a_grant(process, share, before, now)
        return
    # Undone by a restore() meanwhile: what other threads have left undone goes back as well.
    undone = share is not None and process.share is None
    if not undone and (share is not None or process.share != before.share):
        _say(_rewound(process, share, before))
    say(besides.put_back(process, NOTHING if undone else before.extras), rank=None)
    say(besides.shed(process, now), rank=None)


def _across_a_grant(process: Process, share: CpuSet | None, before: Before, now: Extras) -> None:
    """Undo a call from before the grant that is in force, or from a grant that was given back.

    A grant is a border, so no thread moves: in the first case the grant's end brings back another
    mask than it would have; in the second the end has undone the call.
    """
    taken = process.taken
    if taken is None or before.taken is not taken.before.taken:
        say(besides.shed(process, now), rank=None)
        return
    then = taken.before
    undone = share is not None and then.share is None
    if process.share is None:  # else what is set besides is that call's
        say(besides.put_back(process, NOTHING if undone else before.extras), rank=None)
    say(besides.shed(process, now), rank=None)
    if not undone and (share is not None or then.share != before.share):
        taken.before = before


def _in_a_child(process: Process | None, share: CpuSet | None, before: Before, now: Extras) -> None:
    """In a forked child: its threads have the mask, or what it has set itself since."""
    if before.taken is not enclosing()[0]:
        return  # of a call outside of the grant that the child is in
    child = process or Process(pid=kernel.process_id(), original=before.original, share=share)
    to = replace(before, bound={}, apart={})  # by the ids of the parent's threads

    def work() -> None:
        if not share == child.share == before.share:
            _say(_rewound(child, share, to))
            child.given = to.mask
        back = besides.put_back_in_a_child(now, before.extras, parent=before.pid)
        say(back, rank=None)

    transaction(child, work, memory=bool(now.memory or before.extras.memory))
    expect(before.in_force)


def _rewound(process: Process, share: CpuSet | None, before: Before) -> Moved:
    masks = {mask for mask in (share, process.share) if mask is not None}
    return rewind(process, shown(process, masks or {process.original}), before)


def rewind(process: Process, masks: Collection[CpuSet], before: Before) -> Moved:
    """Move the threads that have one of these masks to where they were before."""
    bound = {tid: mask for tid, mask in process.bound.items() if tid not in before.bound}
    for tid, mask in bound.items():
        _move(process, tid, masks, mask)
    for tid in before.bound.keys() - process.bound.keys():  # it was taken back meanwhile
        _move(process, tid, {before.bound[tid]}, before.mask)
    # The main thread also goes when only a part of the share is left to it: a runtime has cut it.
    if process.pid not in bound:
        _move(process, process.pid, _Parts(masks), before.mask)
    moved = move_all(before.mask, ours=masks, spare=bound, moved=process.moved)
    if not moved.none:
        before.recall(process)
    return moved


class _Parts:
    """The masks that are a part of others."""

    def __init__(self, masks: Collection[CpuSet]) -> None:
        self._masks = masks

    def __contains__(self, mask: object) -> bool:
        return isinstance(mask, frozenset) and any(mask < whole for whole in self._masks)


def _move(process: Process, tid: int, masks: Container[CpuSet], to: CpuSet) -> None:
    with suppress(OSError):  # it has ended, or a cpuset denies the mask by now
        mask = kernel.get_affinity(tid)
        if mask in masks:
            move(to, tid, mask, process.moved)


def current() -> CpuSet:
    """The calling thread's CPUs; empty where the system does not tell."""
    with suppress(OSError):
        return kernel.get_affinity()
    return frozenset()


def _say(moved: Moved) -> None:
    say(moved.notices(), rank=None)


def refused(error: OSError) -> Notice:
    """The kernel refuses questions about CPUs, or orders."""
    why = f"the system does not tell this process's CPUs, or moves no threads ({error.strerror})"
    return Notice("pin-failed", f"{why}: all stays as it is; a seccomp filter may forbid it")


# Put a share into force again that threads have left since.


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
            notices += transaction(process, lambda: put_threads(process, inside, reserved))
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
