"""Undo what gpuaff has set in this process, and put a share into force again."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from contextlib import suppress
from dataclasses import replace

from gpuaff._system import env, kernel
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.notices import Notice
from gpuaff.pinning.effective import masks_now
from gpuaff.pinning.report import say
from gpuaff.pinning.state import (
    NOTHING,
    VARIABLES,
    Extras,
    Process,
    State,
    VariableChange,
    grant_around,
    inherit,
    known_process,
    this_process,
    transaction,
)
from gpuaff.pinning.threads import MasksThat, Moved, move, move_all, move_caller, own_threads


def undo_call(share: CpuSet | None, before: State, extras: Extras) -> None:
    """Undo a call and all later ones; nothing where that is done already.

    Args:
        share: what the call has set; None when it has taken back what was set.
        before: the state before it.
        extras: what the call has set besides CPUs.
    """
    known = known_process()
    is_child = known is None or known.state.pid != before.pid
    if is_child and before.grant is not grant_around()[0]:
        return  # a call from outside the grant that this child is in
    own = State(pid=kernel.process_id(), original=before.original, share=share)
    process = known or Process(own)
    undo = _undo_in_child if is_child else _undo
    memory = bool(extras.memory or (is_child and before.extras.memory))
    try:
        with transaction(process, memory=memory, undoes=True):
            notices = undo(process, share, before, extras)
    except OSError as error:
        notices = [refusal(error)]
    say(notices)


def _undo(process: Process, share: CpuSet | None, before: State, extras: Extras) -> list[Notice]:
    state = process.state
    if before.grant is not state.grant:
        return _undo_across_grant(process, share, before, extras)
    notices: list[Notice] = []
    # Undone by a restore() already: what other threads have left undone goes back as well.
    is_undone = share is not None and state.share is None
    if not is_undone and (share is not None or state.share != before.share):
        notices += _rewind_share(process, share, before).notices()
    notices += put_extras_back(process, NOTHING if is_undone else before.extras)
    return notices + _shed_policy(process, extras)


def _undo_across_grant(
    process: Process, share: CpuSet | None, before: State, extras: Extras
) -> list[Notice]:
    """Undo a call from before the grant in force, or from a grant that was given back.

    A grant is a border, so no thread moves: in the first case the grant's end brings back another
    mask than it would have; in the second the end has undone the call.
    """
    grant, notices = process.state.grant, list[Notice]()
    if grant is not None and before.grant is grant.before.grant:
        then = grant.before
        is_undone = share is not None and then.share is None
        if process.state.share is None:  # else what is set besides is that call's
            notices += put_extras_back(process, NOTHING if is_undone else before.extras)
        if not is_undone and (share is not None or then.share != before.share):
            grant.before = before
    return notices + _shed_policy(process, extras)


def _undo_in_child(
    process: Process, share: CpuSet | None, before: State, extras: Extras
) -> list[Notice]:
    """In a forked child: its threads have its parent's mask, or what it has set itself since."""
    notices: list[Notice] = []
    if not share == process.state.share == before.share:
        to = replace(before, bound={}, apart={})  # by the ids of the parent's threads
        notices += _rewind_share(process, share, to).notices()
        process.update(given=before.mask)
    _put_variables_back(extras.variables, before.extras.variables)
    inherit(before.in_force)
    return notices + _put_policy_back_in_child(extras, before)


def _rewind_share(process: Process, share: CpuSet | None, before: State) -> Moved:
    masks = {mask for mask in (share, process.state.share) if mask is not None}
    return rewind(process, masks_now(process, masks or {process.state.original}), before)


def rewind(process: Process, masks: Collection[CpuSet], before: State) -> Moved:
    """Move the threads that have one of these masks to where they were before."""
    bound = {tid: mask for tid, mask in process.state.bound.items() if tid not in before.bound}
    for tid, mask in bound.items():
        move_if(process, tid, masks, mask)
    for tid in before.bound.keys() - process.state.bound.keys():  # it was taken back meanwhile
        move_if(process, tid, {before.bound[tid]}, before.mask)
    # The main thread also goes from a part of the share: a runtime has cut it.
    if process.state.pid not in bound:
        parts = MasksThat(lambda mask: any(mask < whole for whole in masks))
        move_if(process, process.state.pid, parts, before.mask)
    moved = move_all(before.mask, ours=masks, spare=bound, moved=process.moved)
    if not moved.none:
        process.recall(before)
    return moved


def move_if(process: Process, tid: int, masks: Container[CpuSet], to: CpuSet) -> None:
    """Move a thread if it has one of these masks."""
    with suppress(OSError):  # it has ended, or a cpuset denies the mask by now
        mask = kernel.get_affinity(tid)
        if mask in masks:
            move(to, tid, mask, process.moved)


def current() -> CpuSet:
    """The calling thread's CPUs; empty where the system does not tell."""
    with suppress(OSError):
        return kernel.get_affinity()
    return frozenset()


def refusal(error: OSError) -> Notice:
    """The kernel refuses to tell masks, or to set them."""
    return Notice(
        "pin-failed",
        f"the system does not tell this process's CPUs, or moves no threads ({error.strerror}): "
        "nothing was changed; a seccomp filter may forbid it",
    )


# What is set besides CPUs: memory policies, and environment variables.


def put_extras_back(process: Process, to: Extras) -> list[Notice]:
    """Put back what was set then; warnings about what only other threads can put back."""
    notices: list[Notice] = []
    now = process.state.extras
    memory = now.memory
    if now.memory or to.memory:
        from gpuaff.pinning.memory import rewind_policies

        memory, notices = rewind_policies(now.memory, to.memory)
    _put_variables_back(now.variables, to.variables)
    process.update(extras=Extras(memory=memory, variables=to.variables))
    return notices


def _shed_policy(process: Process, extras: Extras) -> list[Notice]:
    """Put back a policy that this thread inherited, where its maker has put it back already."""
    if not extras.memory or kernel.thread_id() in process.state.extras.memory:
        return []
    from gpuaff.pinning.memory import shed_policy

    return shed_policy(extras.memory, {})


def _put_policy_back_in_child(now: Extras, before: State) -> list[Notice]:
    then = before.extras.memory
    if not now.memory and not then:
        return []
    from gpuaff.pinning.memory import put_policy_back, shed_policy

    if before.pid in now.memory or before.pid not in then:
        return shed_policy(now.memory, then)
    return put_policy_back(None, then[before.pid])  # most probably the main thread has forked


def _put_variables_back(
    now: Mapping[str, VariableChange], then: Mapping[str, VariableChange]
) -> None:
    """Put variables back to what they were then, except those that the program has set since."""
    for name in VARIABLES:
        ours, theirs = now.get(name), then.get(name)
        if ours is not None and ours != theirs:
            _replace_variable(name, ours.ours, ours.first if theirs is None else theirs.ours)
        elif theirs is not None and ours is None:  # a call that set none had taken it away
            _replace_variable(name, theirs.first, theirs.ours)


def _replace_variable(name: str, expected: str | None, wanted: str | None) -> None:
    if env.get(name) == expected:
        env.put(name, wanted)


# Put a share into force again that threads have left since.


def reapply_share(share: CpuSet, *, reserved: CpuSet, rank: int | None) -> None:
    """See :meth:`gpuaff.Affinity.reapply`: helpers may be on the reserved CPUs."""
    granted = grant_around()[1]
    inside = share if granted is None else share & granted
    notices = [] if granted is None or inside == share else [_outside(share, granted, inside)]
    if inside:
        try:
            # A forked child that has called nothing yet started with its parent's share.
            process = this_process(border=inside)
            with transaction(process):
                notices += put_threads(process, inside, reserved)
        except OSError as error:
            notices.append(refused(inside, error))
    say(notices, rank=rank)


def put_threads(process: Process, share: CpuSet, reserved: CpuSet) -> list[Notice]:
    """Move the threads that are not where they should be; in a transaction.

    Raises:
        OSError: the kernel refuses the share's CPUs.
    """
    state, own = process.state, kernel.thread_id()
    before, caller = _masks(), kernel.get_affinity()
    move(share, own, caller, process.moved)
    got = kernel.get_affinity()
    notices = [] if got == share else [settle_for(share, got)]
    main = before.get(state.pid, got)
    # Threads that have the main thread's mask were started after it was narrowed.
    ours = {state.original, state.share, main}
    strays = MasksThat(lambda mask: mask in ours or not (mask <= got or mask <= reserved))
    apart = {tid: mask for tid, mask in state.apart.items() if before.get(tid) == mask}
    moving = {tid: mask for tid, mask in before.items() if mask in strays or mask == got}
    bound = {tid: mask for tid, mask in moving.items() if tid not in apart} | {own: caller}
    process.update(
        share=got,
        bound={tid: mask for tid, mask in bound.items() if mask not in ours}
        | {tid: mask for tid, mask in state.bound.items() if tid in before},
        reserved=reserved,
        whole=state.whole if share == state.share else None,
    )
    moved = move_all(got, ours=strays, spare=apart, moved=process.moved)
    return [*notices, *moved.notices()]


def settle_for(requested: CpuSet, got: CpuSet) -> Notice:
    """Request what a cpuset has left of the requested CPUs.

    When it grows, the kernel gives back what was requested last: the same as of other threads.
    """
    return Notice(
        "mask-cut",
        f"requested CPUs {format_cpulist(requested)}; the kernel granted "
        f"{format_cpulist(move_caller(got))}: a cpuset denies the others",
    )


def _masks() -> dict[int, CpuSet]:
    """The CPUs of each thread, as far as they can be seen."""
    found = {}
    for tid in own_threads():
        with suppress(OSError):  # it has ended
            found[tid] = kernel.get_affinity(tid)
    return found


def _outside(share: CpuSet, granted: CpuSet, inside: CpuSet) -> Notice:
    instead = f"only {format_cpulist(inside)} are used" if inside else "no thread was moved"
    return Notice(
        "mask-cut",
        f"some of the CPUs {format_cpulist(share)} are outside the claim's, "
        f"{format_cpulist(granted)}: {instead}; call set_affinity to plan from the claim's",
    )


def refused(cpus: CpuSet, error: OSError) -> Notice:
    """The kernel refuses these CPUs."""
    return Notice(
        "pin-failed",
        f"the kernel refused CPUs {format_cpulist(cpus)} ({error.strerror}): no thread was moved; "
        "a cpuset or a seccomp filter may forbid it; call set_affinity() to plan anew",
    )
