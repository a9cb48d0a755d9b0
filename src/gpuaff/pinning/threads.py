"""Move the threads of this process from one set of CPUs to another.

``sched_setaffinity`` acts on one thread, and a new thread starts with its maker's mask. So the
caller moves first, and then passes over ``/proc/self/task`` are repeated until one finds nothing
to do: a thread made meanwhile by one that had not moved yet is moved as well (case A13).
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from gpuaff._system import kernel
from gpuaff.cpuset import CpuSet
from gpuaff.notices import Notice

MOST_PASSES = 20


@dataclass(slots=True, kw_only=True)
class Moved:
    """What :func:`move_all` has found.

    Attributes:
        settled: whether the last pass found nothing to do.
        seen: whether /proc shows the threads; else only the main thread and the caller moved.
        moved_any: whether a thread was moved.
        refused: the ids of threads that the kernel refused to move.
        left: the masks of the threads that the program has bound itself, which stayed; by id.
    """

    settled: bool = False
    seen: bool = True
    moved_any: bool = False
    refused: set[int] = field(default_factory=set)
    left: dict[int, CpuSet] = field(default_factory=dict)

    @property
    def none(self) -> bool:
        """Whether the kernel refused to move every single one."""
        return bool(self.refused) and not self.moved_any

    def notices(self) -> Iterator[Notice]:
        """The warnings about it."""
        if self.refused:
            ids = ", ".join(map(str, sorted(self.refused)))
            yield Notice("threads-refused", f"the kernel refused to move threads {ids}")
        if not self.seen:
            text = (
                "/proc does not show this process's threads: only the main thread and the calling "
                "one were moved; mount /proc of this PID namespace, or call before threads start"
            )
            yield Notice("threads-unseen", text)
        if not self.settled:
            text = "threads start faster than they can be moved: call again later"
            yield Notice("threads-unsettled", text)


def own_threads() -> list[int]:
    """The ids of this process's threads; the main one and the caller where /proc shows none."""
    return kernel.thread_ids() or sorted({kernel.process_id(), kernel.thread_id()})


def alive(masks: Mapping[int, CpuSet]) -> dict[int, CpuSet]:
    """Without the threads that have ended: the kernel uses their ids again."""
    ids = set(kernel.thread_ids() or masks)
    return {tid: mask for tid, mask in masks.items() if tid in ids}


@dataclass(frozen=True, slots=True)
class MasksThat:
    """All masks that meet a condition, as a container."""

    meets: Callable[[CpuSet], bool]

    def __contains__(self, mask: object) -> bool:
        return isinstance(mask, frozenset) and self.meets(mask)


def move_caller(cpus: CpuSet) -> CpuSet:
    """Move the calling thread only; its CPUs as read back, without those that a cpuset denies (G4).

    Raises:
        OSError: EINVAL when it may use none of these CPUs; it stays where it was then.
    """
    kernel.set_affinity(cpus)
    return kernel.get_affinity()


def threads_with(mask: CpuSet) -> list[int]:
    """The ids of the threads that have just this mask."""
    found = []
    for tid in kernel.thread_ids() or ():
        with suppress(OSError):
            if kernel.get_affinity(tid) == mask:
                found.append(tid)
    return found


def move(cpus: CpuSet, tid: int, mask: CpuSet, moved: dict[int, CpuSet]) -> None:
    """Move a thread, and remember in ``moved`` that it had this mask.

    Raises:
        OSError: the kernel refuses it, or the thread has ended.
    """
    kernel.set_affinity(cpus, tid)
    moved.setdefault(tid, mask)


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


def move_all(
    cpus: CpuSet,
    *,
    ours: Container[CpuSet],
    spare: Collection[int] = (),
    moved: dict[int, CpuSet] | None = None,
) -> Moved:
    """Move every thread that has one of the masks in ``ours``.

    A thread with another mask was bound by the program itself, and stays.

    Args:
        cpus: where they go.
        ours: the masks of those that go.
        spare: the ids of threads that stay, whatever mask they have.
        moved: where to remember the mask of each thread that is moved.
    """
    sweep = _Sweep(cpus, ours, set(spare), {} if moved is None else moved)
    sweep.found.settled = any(sweep.is_quiet() for _ in range(MOST_PASSES))
    sweep.found.seen = kernel.thread_ids() is not None
    return sweep.found


@dataclass(slots=True)
class _Sweep:
    """Passes over the threads of this process, and what they have found so far."""

    cpus: CpuSet
    ours: Container[CpuSet]
    done: set[int]
    moved: dict[int, CpuSet]
    found: Moved = field(default_factory=Moved)

    def is_quiet(self) -> bool:
        """Go over all threads once; whether there was nothing to do, and none can be missing."""
        found = [self._was_done(tid) for tid in own_threads()]
        return all(found)

    def _was_done(self, tid: int) -> bool:
        if tid in self.done:
            return True
        try:
            mask = kernel.get_affinity(tid)
            # Also where it is there already: a cpuset may have cut it to just this, and when that
            # grows the kernel gives back what was requested last.
            if mask == self.cpus or mask in self.ours:
                move(self.cpus, tid, mask, self.moved)
                self.found.moved_any = True
        except OSError as error:
            if error.errno == errno.ESRCH:
                return False  # it has ended, and may have started one that is not moved either
            self.found.refused.add(tid)
            mask = self.cpus
        self.done.add(tid)
        is_ours = mask in self.ours
        if mask != self.cpus and not is_ours:
            self.found.left[tid] = mask
        return mask == self.cpus or not is_ours
