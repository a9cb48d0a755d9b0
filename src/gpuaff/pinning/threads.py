"""Move the threads of this process from one set of CPUs to another.

``sched_setaffinity`` acts on one thread; a thread that is born starts with its maker's mask. So
the caller moves first, and then pass after pass goes over ``/proc/self/task`` until one finds
nothing to do: whoever was made meanwhile by a thread that had not moved yet is caught (case A13).
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Container, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from gpuaff._system import kernel
from gpuaff.cpuset import CpuSet
from gpuaff.notices import Notice

MOST_PASSES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What came of it.

    Attributes:
        settled: whether the last pass found nothing to do.
        refused: the ids of threads that the kernel would not move.
        seen: whether /proc shows the threads; else only the main thread and the caller moved.
        left: the masks of the threads that somebody has bound, and that stayed, by id.
        none: whether the kernel would not move a single one.
    """

    settled: bool
    refused: frozenset[int]
    seen: bool = True
    none: bool = False
    left: Mapping[int, CpuSet] = field(default_factory=dict)

    def notices(self) -> Iterator[Notice]:
        """What is to be said about it."""
        if self.refused:
            ids = ", ".join(map(str, sorted(self.refused)))
            yield Notice("threads-refused", f"the kernel would not move threads {ids}")
        if not self.seen:
            text = (
                "/proc does not show this process's threads: only the main thread and the one that "
                "called were moved; mount /proc of this PID namespace, or call before threads start"
            )
            yield Notice("threads-unseen", text)
        if not self.settled:
            text = "threads are made faster than they can be moved: call again when it is calm"
            yield Notice("threads-unsettled", text)


def move_caller(cpus: CpuSet) -> CpuSet:
    """Move the calling thread only.

    Returns:
        Its CPUs as read back; the kernel drops those that a cpuset denies (case G4).

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
    """Move a thread, and note before that it had this mask.

    Raises:
        OSError: the kernel refuses it, or it has ended.
    """
    first = tid not in moved
    moved.setdefault(tid, mask)
    try:
        kernel.set_affinity(cpus, tid)
    except OSError:
        if first:
            del moved[tid]
        raise


def put_again(tid: int, mask: CpuSet, likely: Collection[CpuSet]) -> None:
    """Give a thread back the mask that it had.

    When a cpuset grows the kernel gives a thread what it has asked for last. So that is asked for,
    and not what a cpuset had left of it.

    Args:
        tid: the thread.
        mask: what it had.
        likely: what it may have asked for.
    """
    for asked in (mask,) if mask in likely else (*likely, mask):
        with suppress(OSError):  # it has ended, or a cpuset denies all of that
            kernel.set_affinity(asked, tid)
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

    Threads with another mask were bound by somebody on purpose, and stay.

    Args:
        cpus: where they go.
        ours: the masks of those that go.
        spare: the ids of threads that stay, whatever mask they have.
        moved: where to note what each had, before it is moved.
    """
    sweep = _Sweep(cpus, ours, spare, {} if moved is None else moved)
    settled = any(sweep.is_quiet() for _ in range(MOST_PASSES))
    seen = kernel.thread_ids() is not None
    return Moved(
        settled=settled,
        refused=frozenset(sweep.refused),
        seen=seen,
        none=bool(sweep.refused) and not sweep.any,
        left=sweep.left,
    )


class _Sweep:
    """Passes over the threads of this process, and what they have found so far."""

    def __init__(
        self,
        cpus: CpuSet,
        ours: Container[CpuSet],
        spare: Collection[int],
        moved: dict[int, CpuSet],
    ) -> None:
        self._cpus = cpus
        self._ours = ours
        self._done = set(spare)
        self._moved = moved
        self.any = False
        self.refused: set[int] = set()
        self.left: dict[int, CpuSet] = {}

    def is_quiet(self) -> bool:
        """Go over all threads once; whether none had to be moved, or may have been missed."""
        quiet = [self._is_done(tid) for tid in kernel.thread_ids() or self._known()]
        return all(quiet)

    @staticmethod
    def _known() -> tuple[int, int]:
        """The threads that are there for sure: the main one and the caller."""
        return kernel.process_id(), kernel.thread_id()

    def _is_done(self, tid: int) -> bool:
        """Look after a thread; whether there was nothing to do."""
        if tid in self._done:
            return True
        try:
            mask = kernel.get_affinity(tid)
            # Also where it is there already: a cpuset may have cut it to just this, and when that
            # grows again the kernel gives back what was asked for last.
            if mask == self._cpus or mask in self._ours:
                move(self._cpus, tid, mask, self._moved)
                self.any = True
        except OSError as error:
            if error.errno == errno.ESRCH:
                return False  # it has ended, and may have left a child that is not moved either
            self.refused.add(tid)
            mask = self._cpus
        self._done.add(tid)
        if mask == self._cpus:
            return True
        if mask not in self._ours:
            self.left[tid] = mask
        return mask not in self._ours
