"""Give a process the CPUs back that it had."""

from __future__ import annotations

from collections.abc import Collection, Container
from contextlib import suppress

from gpuaff.binding import extras as besides
from gpuaff.binding.granted import shown
from gpuaff.binding.process import NOTHING, Before, Extras, Process, enclosing, expect, remembered
from gpuaff.binding.report import say
from gpuaff.binding.threads import Moved, move, move_all
from gpuaff.binding.whole import whole
from gpuaff.cpuset import CpuSet
from gpuaff.notices import Notice
from gpuaff.records import replace
from gpuaff.system import kernel


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
            whole(process, lambda: _here(process, share, before, now), memory=bool(now.memory))
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

    whole(child, work, memory=bool(now.memory or before.extras.memory))
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
