"""From what was seen of a process to what is off, who did it and what helps. Pure."""

from __future__ import annotations

from collections import Counter
from functools import cached_property

from gpuaff.checking.check import Check, State, ThreadCheck
from gpuaff.checking.seen import Seen, Thread
from gpuaff.cpuset import CpuSet, format_cpulist

_NONE: CpuSet = frozenset()

_REAPPLY = "affinity.reapply(), on what set_affinity returned"


def judge(seen: Seen) -> Check:
    """Judge every thread of a process."""
    verdict = _Judge(seen)
    return Check(
        pid=seen.pid,
        name=next((thread.name for thread in seen.threads if thread.tid == seen.pid), ""),
        expected=seen.expected,
        usual=verdict.usual,
        threads=tuple(verdict.of(thread) for thread in seen.threads),
        warnings=seen.warnings,
    )


def usual(masks: list[CpuSet]) -> CpuSet:
    """The CPUs that most threads have; of several such sets the larger one.

    Where that is not one set either (an OpenMP runtime has given each thread a CPU of its own), all
    of them together.
    """
    counts = Counter(masks)
    most = [mask for mask in counts if counts[mask] == max(counts.values())]
    size = max(map(len, most), default=0)
    return _NONE.union(*(mask for mask in most if len(mask) == size))


class _Judge:
    def __init__(self, seen: Seen) -> None:
        self._seen = seen

    @cached_property
    def usual(self) -> CpuSet:
        """What most threads have; those that nobody can move have no say."""
        movable = [thread.cpus for thread in self._seen.threads if thread.movable]
        return usual(movable or [thread.cpus for thread in self._seen.threads])

    @cached_property
    def _should(self) -> CpuSet:
        """What every thread should have."""
        return self.usual if self._seen.expected is None else self._seen.expected

    def of(self, thread: Thread) -> ThreadCheck:
        """The verdict on one thread."""
        state = self._state(thread)
        made = ThreadCheck(tid=thread.tid, name=thread.name, cpus=thread.cpus, state=state)
        if made.ok:
            return made
        return ThreadCheck(
            tid=thread.tid,
            name=thread.name,
            cpus=thread.cpus,
            state=state,
            reason=self._reason(thread, state),
            remedy=self._remedy(state),
        )

    def _state(self, thread: Thread) -> State:
        if thread.cpus == self._should:
            return State.OK
        if not thread.movable:
            return State.FIXED
        if self._is_a_helper(thread):
            return State.BOUND
        if thread.cpus == self._left:
            return State.CUT
        if thread.cpus < self._should:
            return State.NARROWED if thread.cpus == self._narrowed else State.BOUND
        return State.WIDENED if thread.cpus > self._should else State.MOVED

    def _is_a_helper(self, thread: Thread) -> bool:
        """Whether it is on reserved CPUs, or where it was bound before gpuaff was called."""
        seen = self._seen
        if seen.expected is None:
            return False
        return thread.cpus <= seen.reserved or seen.apart.get(thread.tid) == thread.cpus

    @cached_property
    def _left(self) -> CpuSet | None:
        """What a cpuset leaves of what should be; None where it leaves everything.

        The kernel gives a process that would have nothing left all of the cpuset.
        """
        cpuset, should = self._seen.cpuset, self._should
        if cpuset is not None:
            return None if should <= cpuset else should & cpuset or cpuset
        masks = {thread.cpus for thread in self._seen.threads}
        same = masks.pop() if len(masks) == 1 and len(self._seen.threads) > 1 else None
        return same if same is not None and same < should else None

    @cached_property
    def _narrowed(self) -> CpuSet | None:
        """What is left to the main thread, if it is a part of what it should have.

        Where every thread has CPUs of its own nobody has what they have together: so an OpenMP
        runtime does it on purpose.
        """
        masks = {thread.tid: thread.cpus for thread in self._seen.threads}
        main = masks.get(self._seen.pid)
        real = self._seen.expected is not None or self._should in masks.values()
        return main if main is not None and main < self._should and real else None

    def _reason(self, thread: Thread, state: State) -> str:
        found = f"CPUs {_listed(thread.cpus)}, {self._instead}"
        why = {
            State.NARROWED: self._why_narrowed,
            State.CUT: lambda _: "its cpuset (container, scheduler) has lost CPUs since",
            State.MOVED: lambda _: self._why_elsewhere,
            State.WIDENED: self._why_widened,
        }
        return f"{found}: {why[state](thread)}"

    @property
    def _instead(self) -> str:
        if self._seen.expected is None:
            return f"most threads have {_listed(self._should)}"
        return f"gpuaff had set {_listed(self._should)}"

    def _why_narrowed(self, thread: Thread) -> str:
        if thread.tid != self._seen.pid:
            return "the main thread has the same; a thread that it starts inherits that"
        if self._seen.culprits:
            return "; ".join(culprit.reason for culprit in self._seen.culprits)
        return "some import or framework has bound the main thread"

    @property
    def _why_elsewhere(self) -> str:
        if self._seen.expected is None:
            return "somebody has bound it (taskset, psutil, a framework)"
        return "somebody has moved it (taskset, psutil, os.sched_setaffinity, a framework)"

    def _why_widened(self, thread: Thread) -> str:
        if thread.cpus == self._seen.original:
            return "what the process had before: somebody has set that back, or it was never moved"
        return self._why_elsewhere

    def _remedy(self, state: State) -> str:
        if state is State.CUT:
            again = "; set_affinity() again plans from those that are left"
            return f"ask for the CPUs back{again if self._seen.expected is not None else ''}"
        if not self._seen.ours:
            back = f"taskset -p -c {_listed(self._should)} TID, or reapply() in the program"
        elif self._seen.expected is None:
            back = "set_affinity() before imports"
        else:
            back = _REAPPLY
        if state is not State.NARROWED:
            return back
        return "; ".join([back, *(culprit.remedy for culprit in self._seen.culprits)])


def _listed(cpus: CpuSet) -> str:
    return format_cpulist(cpus) or "none"
