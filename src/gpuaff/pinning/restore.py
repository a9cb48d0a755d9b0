"""What ``set_affinity`` returns: it undoes the call, or puts the share into force again."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress

from gpuaff._system import env, kernel
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.notices import Notice
from gpuaff.pinning import threads
from gpuaff.pinning.state import (
    VARIABLES,
    Process,
    State,
    known_process,
    place,
    refusal,
    say,
    this_process,
    transaction,
    way_back,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from typing_extensions import Self

    from gpuaff.allocator.model import Plan


class Affinity(frozenset[int]):
    """The CPUs of this process after a call of :func:`set_affinity`, as the kernel grants them.

    A frozenset of logical CPU ids, and a context manager that restores at its end.

    Attributes:
        rank: the local rank that it was made for; None when the launcher's variables name none, or
            the rank is unknown and several GPUs are visible.
        plan: the plan for all ranks, or for this one alone where the CPUs of the others are
            unknown; None when none was made (switched off, no Linux, no rank).
        gpu: the physical index of this rank's GPU; None when no GPU is known.
        pinned: whether the mask was set.
        reserved: the CPUs that ``reserve=`` has kept out of the share, for helpers.
        memory: the memory policy that was set for the calling thread (``bind:0-1``), else None.
        warnings: what was not as hoped.
    """

    rank: int | None
    plan: Plan | None
    gpu: int | None
    pinned: bool
    reserved: CpuSet
    memory: str | None
    warnings: tuple[Notice, ...]
    _states: tuple[State, State] | None

    def __new__(
        cls,
        cpus: CpuSet,
        *,
        rank: int | None = None,
        plan: Plan | None = None,
        pinned: bool = False,
        states: tuple[State, State] | None = None,
        memory: str | None = None,
        warnings: Iterable[Notice] = (),
    ) -> Self:
        """``states`` are those before and after a call that may have changed anything."""
        self = super().__new__(cls, cpus)
        self.rank, self.plan, self.pinned, self.memory = rank, plan, pinned, memory
        share = plan.share_of(rank) if plan is not None and rank is not None else None
        self.gpu = None if share is None else share.gpu
        self.reserved = share.reserved if share is not None and pinned else frozenset()
        self.warnings, self._states = tuple(warnings), states
        return self

    def restore(self) -> CpuSet:
        """Give the process the CPUs back that it had before gpuaff was first called.

        Every thread that still has what gpuaff has set goes back, also when a later call has set
        it, and the main thread from a part of that: a runtime has narrowed it. Threads that the
        program has bound elsewhere since stay. A memory policy goes back in the calling thread
        only: the thread that called :func:`set_affinity` should restore. OMP_NUM_THREADS goes back
        if it is still what was set here.

        May be called again, from any thread, and in a forked child (a DataLoader worker) for the
        child's threads, also after calls of its own. While a cpuset denies all of the CPUs that the
        process had, nothing is given back; call it again when that has changed.

        Returns:
            The calling thread's CPUs afterwards; none while the interpreter shuts down.

        Raises:
            GPUAffinityError: a signal handler called it during another call.
        """
        if sys.is_finalizing():
            return frozenset()
        if self.pinned and self._states is not None:
            before, after = self._states
            undo_call(before.first, after)
        return threads.current()

    def reapply(self) -> CpuSet:
        """Put this share into force again: after an import or a framework has moved threads.

        The calling thread goes there, the main thread, those that it has started since it was
        narrowed, and every thread that is not inside. Threads that are bound to a part of the
        share, or to reserved CPUs, stay; so do those that were bound elsewhere when
        :func:`set_affinity` was called. What a cpuset denies by now is cut, with a warning. Only
        CPUs are set. May be called again, from any thread, after ``restore()``, and in a forked
        child, such as a DataLoader worker (cases C8, C10).

        Returns:
            The calling thread's CPUs afterwards; none while the interpreter shuts down.

        Raises:
            GPUAffinityError: a signal handler called it during another call.
        """
        if sys.is_finalizing():
            return frozenset()
        if self.pinned:
            reapply_share(frozenset(self), reserved=self.reserved, rank=self.rank)
        return threads.current()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Put back what was in force before: an outer block's share, or the first mask."""
        if self._states is not None and not sys.is_finalizing():
            undo_call(*self._states)

    def __repr__(self) -> str:
        state = f"gpu={self.gpu}" if self.pinned else "not pinned"
        return f"<Affinity rank={self.rank} {state} cpus={format_cpulist(self) or 'unknown'}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Elsewhere it is only a set: another process cannot restore this one."""
        return frozenset, (tuple(self),)


# Undo a call.


def undo_call(before: State, after: State) -> None:
    """Undo a call and all later ones, by the states around it, unless that is done already."""
    process = known_process()
    if process is None or process.state.grant is not before.grant:
        return  # a call from outside the grant that is in force, or inside one that has ended
    is_parents = before.pid != process.state.pid  # this is a forked child
    memory = after.memory is not None or (is_parents and before.memory is not None)
    try:
        with transaction(process, memory=memory, undoes=True):
            notices = _undo(process, before.in_child() if is_parents else before, after)
            if is_parents:
                _put_variables_back(after, before)
            now = process.state.memory
            if memory and (now is None or now.thread != threading.get_native_id()):
                from gpuaff.pinning.memory import put_policy_back

                # This thread, or this child, may have inherited it.
                notices += put_policy_back(after.memory, before.memory if is_parents else None)
    except OSError as error:
        notices = [refusal(error)]
    say(notices)


def _undo(process: Process, before: State, after: State) -> list[Notice]:
    # After a restore(), what it had to leave to other threads can still be put back.
    is_undone = after.share is not None and process.state.share is None
    notices = [] if is_undone else rewind(process, before)
    return notices + put_extras_back(process, process.state.first if is_undone else before)


def rewind(process: Process, before: State) -> list[Notice]:
    """Move the threads to where they were before, and make that the state if any arrived."""
    state = process.state
    # Inside the same border, the program has put a thread there that has the first mask.
    own = {*state.placed} or {state.original}
    masks = own if state.grant is before.grant else state.free_masks
    is_free = state.is_free(threads.granted(state.original), masks)
    spare = set()
    for tid, bound in state.bound.items():
        then, home = before.bound.get(tid), bound.mask
        if then is not None and then.mask == bound.mask:  # a grant may have cut it
            home = then.kept or before.mask
        with suppress(OSError):  # it has ended, or a cpuset denies the mask by now
            mask = kernel.get_affinity(tid)
            is_there = is_free(tid, mask) if bound.kept is None else mask == bound.kept
            if is_there:
                spare.add(tid)
                if mask != home:
                    threads.move(home, tid, mask, process.earlier)
    passes = threads.move_all(before.mask, is_free, process.earlier, spare=spare)
    if passes.arrived or not passes.refused:
        process.state = before._replace(
            start=before.first, memory=state.memory, variables=state.variables
        )
    return passes.notices()


def put_extras_back(process: Process, to: State) -> list[Notice]:
    """Put back what was set besides CPUs then; warnings of what only other threads can put back."""
    now, notices = process.state, list[Notice]()
    memory = now.memory
    if memory != to.memory:
        from gpuaff.pinning.memory import rewind_policy

        memory, notices = rewind_policy(memory, to.memory)
    _put_variables_back(now, to)
    process.update(memory=memory, variables=to.variables)
    return notices


def _put_variables_back(now: State, then: State) -> None:
    """Put variables back to what they were then, except those that the program has set since."""
    for name in VARIABLES:
        way = way_back(now.variables.get(name), then.variables.get(name))
        if way is not None and env.get(name) == way[0]:
            env.put(name, way[1])


# Put a share into force again that threads have left since.


def reapply_share(share: CpuSet, *, reserved: CpuSet, rank: int | None) -> None:
    """See :meth:`Affinity.reapply`: helpers may be on the reserved CPUs."""
    notices, inside = list[Notice](), share
    try:
        process = this_process()
        grant = process.state.grant
        if grant is not None and not share <= grant.cpus:
            inside = share & grant.cpus
            text = (
                f"the CPUs {format_cpulist(share - inside)} of {format_cpulist(share)} are outside "
                "the claim's, so they are not used; call set_affinity to plan from the claim's"
            )
            notices.append(Notice("mask-cut", text))
        if inside:
            with transaction(process):
                notices += put_threads(process, inside, reserved)
    except OSError as error:
        notices.append(refusal(error, inside))
    say(notices, rank=rank)


def put_threads(process: Process, share: CpuSet, reserved: CpuSet = frozenset()) -> list[Notice]:
    """Move the threads that are not where they should be; in a transaction."""
    state = process.state
    # Threads that have the main thread's mask were started after it was narrowed.
    free = state.free_masks | {kernel.affinity_or_none(state.pid)}

    def is_free(_: int, mask: CpuSet) -> bool:
        return mask in free

    def is_stray(_: int, mask: CpuSet) -> bool:
        return not (mask <= share or mask <= reserved)

    _, notices = place(process, share, is_free, is_stray)
    whole = state.whole if share == state.share else None
    process.update(reserved=reserved, whole=whole)
    return notices
