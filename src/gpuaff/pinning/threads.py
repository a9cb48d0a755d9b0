"""Move the threads of this process, and see which CPUs the kernel grants them.

``sched_setaffinity`` acts on one thread, and a new thread starts with its maker's mask. So the
caller moves first, and then passes over ``/proc/self/task`` are repeated until one finds nothing
to do: a thread made meanwhile by one that had not moved yet is moved as well (case A13).
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import NamedTuple

from gpuaff._system import kernel
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.notices import Notice

MOST_PASSES = 20
_MOST_CPUS = 8192  # CONFIG_NR_CPUS of the largest kernels


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


# What a cpuset grants. It may change at any time (cases A17, G4): one that loses CPUs cuts every
# thread's mask, and where nothing is left of a mask, the kernel shows all of the cpuset instead. It
# remembers what each thread has requested last, and gives that back when the cpuset grows.


class Granted(NamedTuple):
    """What the kernel grants."""

    cpus: CpuSet  # of the original mask; where that is nothing, what it grants instead
    cpuset: CpuSet  # all, as far as it was asked

    def of(self, requested: Iterable[CpuSet]) -> set[CpuSet]:
        """The masks that threads have by now that have requested one of these.

        That is nothing for a thread that sleeps while all of its CPUs are offline.
        """
        wanted = set(requested)
        cut = {mask & self.cpuset for mask in wanted}
        return {*wanted, *cut, *([] if all(cut) else [self.cpuset])}


def granted(original: CpuSet) -> Granted:
    """What a cpuset leaves of the original mask; a thread made for that requests all CPUs."""
    found = [original]

    def ask() -> None:
        with suppress(OSError):  # a seccomp filter
            own = kernel.get_affinity()
            kernel.set_affinity(frozenset(range(_MOST_CPUS)))
            found.append(kernel.get_affinity())
            kernel.set_affinity(own)  # it may be seen for a moment longer

    if kernel.get_affinity() != original:
        asking = threading.Thread(target=ask)
        with suppress(RuntimeError):  # no more threads: then the kernel will cut what is requested
            asking.start()
            asking.join()
    return Granted(original & found[-1] or found[-1], cpuset=found[-1])


# Move. ``earlier`` remembers the mask that each thread had before, by id.


def move(cpus: CpuSet, tid: int, mask: CpuSet, earlier: dict[int, CpuSet]) -> None:
    """Move a thread that has this mask."""
    kernel.set_affinity(cpus, tid)
    earlier.setdefault(tid, mask)


def move_caller(
    cpus: CpuSet, mask: CpuSet, earlier: dict[int, CpuSet]
) -> tuple[CpuSet, list[Notice]]:
    """Move the calling thread; what the kernel grants, and a warning where that is not all."""
    move(cpus, threading.get_native_id(), mask, earlier)
    got = kernel.get_affinity()
    if got == cpus:
        return got, []
    kernel.set_affinity(got)  # all threads request the same, and get it back when a cpuset grows
    text = (
        f"requested CPUs {format_cpulist(cpus)}; the kernel granted {format_cpulist(got)}: "
        "a cpuset denies the others"
    )
    return got, [Notice("mask-cut", text)]


class Passes:
    """What :func:`move_all` has done with threads, by id."""

    def __init__(self) -> None:
        self.settled = False  # whether the last pass found nothing to do
        self.arrived: set[int] = set()
        self.refused: set[int] = set()  # by the kernel

    def notices(self) -> list[Notice]:
        """The warnings about it."""
        found = []
        if self.refused:
            ids = ", ".join(map(str, sorted(self.refused)))
            found.append(Notice("threads-refused", f"the kernel refused to move threads {ids}"))
        if kernel.thread_ids() is None:
            found.append(unseen("moved"))
        if not self.settled:
            text = "threads start faster than they can be moved: call again later"
            found.append(Notice("threads-unsettled", text))
        return found


def unseen(what: str) -> Notice:
    """The warning where only some threads were moved, or checked."""
    text = (
        f"/proc does not show this process's threads: only the main thread and the calling one "
        f"were {what}; mount /proc of this PID namespace, or call before threads start"
    )
    return Notice("threads-unseen", text)


def move_all(
    cpus: CpuSet,
    is_free: Callable[[int, CpuSet], bool],
    earlier: dict[int, CpuSet],
    *,
    spare: Collection[int] = (),
) -> Passes:
    """Move every thread that is free, by its id and mask, but for those to be spared."""
    found, done = Passes(), set(spare)

    def settle(tid: int) -> bool:
        """Move a thread; whether there was nothing to do, and it has started none elsewhere."""
        if tid in done:
            return True
        is_in_place = True
        try:
            mask = kernel.get_affinity(tid)
            # Also where it is there already: a cpuset may have cut it to just this, and the kernel
            # gives back what was requested last.
            if mask == cpus or is_free(tid, mask):
                move(cpus, tid, mask, earlier)
                found.arrived.add(tid)
                is_in_place = mask == cpus
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
