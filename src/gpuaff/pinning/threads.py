"""Move the threads of this process, and see which CPUs the kernel grants them.

``sched_setaffinity`` acts on one thread, and a new thread starts with its maker's mask. So the
caller moves first, and then passes over ``/proc/self/task`` are repeated until one finds nothing
to do: a thread made meanwhile by one that had not moved yet is moved as well (case A13).

A cpuset may change meanwhile (cases A17, G4). One that loses CPUs cuts every thread's mask; where
nothing is left of a mask, the kernel shows all of the cpuset instead. It remembers what each thread
has requested last, and gives that back when the cpuset grows.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import NamedTuple

from gpuaff._system import kernel
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.notices import Notice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuaff.pinning.state import Process

MOST_PASSES = 20


def current() -> CpuSet:
    """The calling thread's CPUs; empty where the system does not report them."""
    return kernel.affinity_or_none(0) or frozenset()


def own_threads() -> list[int]:
    """The ids of this process's threads; the main one and the caller where /proc shows none."""
    return kernel.thread_ids() or sorted({os.getpid(), threading.get_native_id()})


def masks() -> dict[int, CpuSet]:
    """The CPUs of each thread, as far as they can be seen."""
    seen = {tid: kernel.affinity_or_none(tid) for tid in own_threads()}
    return {tid: mask for tid, mask in seen.items() if mask is not None}


def having(cpus: CpuSet) -> dict[int, CpuSet]:
    """The threads that have just these CPUs, with them."""
    return {tid: mask for tid, mask in masks().items() if mask == cpus}


def bound_caller(process: Process, caller: CpuSet, ours: Collection[CpuSet]) -> dict[int, CpuSet]:
    """The calling thread and its mask, where the program has bound it; else nothing."""
    state, own = process.state, threading.get_native_id()
    # The main thread may have been narrowed to a part of its share by a runtime (case C4).
    narrowed = own == state.pid and state.share is not None and caller < state.share
    return {} if narrowed or caller in ours else {own: caller}


def alive(found: Mapping[int, CpuSet]) -> dict[int, CpuSet]:
    """Without the threads that have ended: the kernel uses their ids again."""
    ids = set(kernel.thread_ids() or found)
    return {tid: mask for tid, mask in found.items() if tid in ids}


def move(cpus: CpuSet, tid: int, mask: CpuSet, moved: dict[int, CpuSet]) -> None:
    """Move a thread, and remember in ``moved`` that it had this mask."""
    kernel.set_affinity(cpus, tid)
    moved.setdefault(tid, mask)


def take(process: Process, cpus: CpuSet, caller: CpuSet) -> tuple[CpuSet, list[Notice]]:
    """Move the calling thread; what the kernel grants, and a warning where that is not all."""
    move(cpus, threading.get_native_id(), caller, process.moved)
    got = kernel.get_affinity()
    if got == cpus:
        return got, []
    # When a cpuset grows, the kernel gives back what was requested last: the same to all threads.
    kernel.set_affinity(got)
    text = (
        f"requested CPUs {format_cpulist(cpus)}; the kernel granted "
        f"{format_cpulist(kernel.get_affinity())}: a cpuset denies the others"
    )
    return got, [Notice("mask-cut", text)]


def put_again(tid: int, mask: CpuSet, likely: Collection[CpuSet]) -> None:
    """Give a thread back the mask that it had.

    When a cpuset grows, the kernel gives a thread the mask that it requested last. So that is
    requested (of the likely ones), and not what a cpuset had left of it.
    """
    for requested in (mask,) if mask in likely else (*likely, mask):
        with suppress(OSError):  # it has ended, or a cpuset denies all of that
            kernel.set_affinity(requested, tid)
            if kernel.get_affinity(tid) == mask:
                return


class Moved:
    """What :func:`move_all` has found: the ids of threads, and what could not be done.

    Attributes:
        settled: whether the last pass found nothing to do.
        seen: whether /proc shows the threads; else only the main thread and the caller moved.
        arrived: the threads that were moved.
        refused: those that the kernel refused to move.
        left: those that the program has bound itself, which stayed, with their masks.
    """

    def __init__(self) -> None:
        self.settled, self.seen = False, kernel.thread_ids() is not None
        self.arrived: set[int] = set()
        self.refused: set[int] = set()
        self.left: dict[int, CpuSet] = {}

    def notices(self) -> list[Notice]:
        """The warnings about it."""
        ids = ", ".join(map(str, sorted(self.refused)))
        refused = Notice("threads-refused", f"the kernel refused to move threads {ids}")
        found = [refused] if self.refused else []
        found += [] if self.seen else [_UNSEEN]
        return found + ([] if self.settled else [_UNSETTLED])


_UNSEEN = Notice(
    "threads-unseen",
    "/proc does not show this process's threads: only the main thread and the calling one were "
    "moved; mount /proc of this PID namespace, or call before threads start",
)

_UNSETTLED = Notice(
    "threads-unsettled", "threads start faster than they can be moved: call again later"
)


def move_all(
    cpus: CpuSet,
    *,
    ours: Callable[[CpuSet], bool],
    spare: Collection[int] = (),
    moved: dict[int, CpuSet] | None = None,
) -> Moved:
    """Move every thread whose mask is one of gpuaff's.

    A thread with another mask was bound by the program itself, and stays; so do those in ``spare``.
    ``moved`` remembers the mask of each thread that is moved.
    """
    found, done = Moved(), set(spare)
    before: dict[int, CpuSet] = {} if moved is None else moved

    def settle(tid: int) -> bool:
        """Move a thread; whether there was nothing to do, and it has started none elsewhere."""
        if tid in done:
            return True
        is_in_place = True
        try:
            mask = kernel.get_affinity(tid)
            # Also where it is there already: a cpuset may have cut it to just this, and when that
            # grows the kernel gives back what was requested last.
            if mask == cpus or ours(mask):
                move(cpus, tid, mask, before)
                found.arrived.add(tid)
                is_in_place = mask == cpus
            else:
                found.left[tid] = mask
        except OSError as error:
            if error.errno == errno.ESRCH:
                return False  # it has ended, and may have started one that is not moved either
            found.refused.add(tid)
        done.add(tid)
        return is_in_place

    for _ in range(MOST_PASSES):
        in_place = [settle(tid) for tid in own_threads()]
        found.settled = all(in_place)
        if found.settled:
            break
    return found


class EffectiveMasks(NamedTuple):
    """What the kernel grants.

    Attributes:
        cpus: what it grants of the original mask; where that is nothing, what it grants instead.
        cpuset: all that it grants, as far as can be seen.
    """

    cpus: CpuSet
    cpuset: CpuSet

    def of(self, requested: Collection[CpuSet]) -> set[CpuSet]:
        """The masks that threads have by now that have requested one of these.

        That is nothing for a thread that sleeps while all of its CPUs are offline.
        """
        cut = {mask & self.cpuset for mask in requested}
        return {*requested, *cut, *([] if all(cut) else [self.cpuset])}


def request_original_mask(process: Process, caller: CpuSet) -> EffectiveMasks:
    """Request the original mask for the calling thread, and see what it gets; it keeps that.

    Not where it has requested a share of which nothing is left: that could not be requested again,
    if the call fails. ``caller`` is what the calling thread has.
    """
    original = process.state.original
    if caller == original:
        return EffectiveMasks(original, cpuset=original)
    if _has_no_cpu_of_its_share(process, caller):
        return EffectiveMasks(caller & original or caller, cpuset=caller)
    got = request(process, original, caller)
    return EffectiveMasks(got, cpuset=caller if caller.issuperset(got) else got)


def masks_now(process: Process, requested: set[CpuSet]) -> set[CpuSet]:
    """The masks that threads have by now that have requested one of these; no thread moves."""
    caller = kernel.get_affinity()
    if caller in requested or caller == process.state.original:
        return requested
    found = request_original_mask(process, caller)
    put_again(threading.get_native_id(), caller, process.state.requested)
    return found.of(requested)


def request(process: Process, cpus: CpuSet, caller: CpuSet) -> CpuSet:
    """Request CPUs for the calling thread; what it then has, which may be other ones."""
    _request_is_denied(process, cpus, caller)
    return kernel.get_affinity()


def _request_is_denied(process: Process, cpus: CpuSet, caller: CpuSet) -> bool:
    """Request CPUs for the calling thread; whether a cpuset denies all of them."""
    try:
        move(cpus, threading.get_native_id(), caller, process.moved)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return True
    return False


def _has_no_cpu_of_its_share(process: Process, caller: CpuSet) -> bool:
    """Whether a cpuset has taken the whole share away; else the program has moved this thread.

    Only a new request shows it.
    """
    share = process.state.share
    if share is None or caller & share or caller != kernel.get_affinity(process.state.pid):
        return False
    return _request_is_denied(process, share, caller)


def refusal(error: OSError) -> Notice:
    """The kernel refuses to report masks, or to set them."""
    return Notice(
        "pin-failed",
        f"the system does not report this process's CPUs, or moves no threads ({error.strerror}): "
        "nothing was changed; a seccomp filter may forbid it",
    )


def refused(cpus: CpuSet, error: OSError) -> Notice:
    """The kernel refuses these CPUs."""
    return Notice(
        "pin-failed",
        f"the kernel refused CPUs {format_cpulist(cpus)} ({error.strerror}): no thread was moved; "
        "a cpuset or a seccomp filter may forbid it; call set_affinity() to plan anew",
    )
