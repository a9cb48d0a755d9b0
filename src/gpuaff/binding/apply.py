"""Put a plan into force, all or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from gpuaff.allocator.modes import Partition
from gpuaff.allocator.options import Options
from gpuaff.allocator.plan import Plan
from gpuaff.allocator.planner import plan_with
from gpuaff.binding import suspicion
from gpuaff.binding.process import Process
from gpuaff.binding.report import concerning, refuse_if_broken
from gpuaff.binding.threads import move_all, move_caller, threads_with
from gpuaff.binding.undo import Before, rewind
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.notices import Notice, one_reason
from gpuaff.records import dataclass
from gpuaff.system import kernel
from gpuaff.topology.live import observe


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a call.

    Attributes:
        cpus: the calling thread's CPUs afterwards.
        plan: the plan for all ranks.
        pinned: whether this rank's share is in force.
        before: how the process was before the call.
        warnings: what concerns this rank.
    """

    cpus: CpuSet
    plan: Plan
    pinned: bool
    before: Before
    warnings: tuple[Notice, ...]


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One call of :func:`gpuaff.set_affinity`, its arguments checked.

    Attributes:
        process: what is remembered of this process; the caller holds its lock.
        rank: the local rank.
        options: the options of the plan.
        strict: whether best effort is not enough.
        caller: the calling thread's CPUs before the call.
        let_rest: called when the driver has been asked everything.
    """

    process: Process
    rank: int
    options: Options
    strict: bool
    caller: CpuSet
    let_rest: Callable[[], None]

    def pin(self) -> Outcome:
        """Plan for all ranks and put this one's share into force.

        Raises:
            GpuaffError: as :func:`gpuaff.set_affinity` has it; every thread is then where it was.
        """
        with self._all_or_nothing():
            try:
                outcome = self._try(self._granted())
            except _RefusedError:  # a cpuset changed meanwhile: plan from what is left
                outcome = self._last_try(self._set_back())
            if self.strict:
                refuse_if_broken(outcome.warnings)
            return outcome

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        process, before = self.process, Before.of(self.process)
        try:
            yield
        except BaseException:
            if process.share is not None and process.share != before.share:
                rewind(process, {process.share}, before)
            self._put_caller_back()
            raise

    def _put_caller_back(self) -> None:
        with suppress(OSError):  # a cpuset may deny it by now
            if kernel.get_affinity() != self.caller:
                move_caller(self.caller)

    def _granted(self) -> CpuSet:
        """What the kernel grants of the original mask; after an earlier call it is asked."""
        return self.process.original if self.process.share is None else self._set_back()

    def _set_back(self) -> CpuSet:
        """Give the caller the original mask; what it gets of it."""
        try:
            return move_caller(self.process.original)
        except OSError:  # a cpuset has taken all of it away, and put other CPUs in its place
            return kernel.get_affinity()

    def _try(self, granted: CpuSet) -> Outcome:
        machine_wide = self.options.partition is Partition.MACHINE
        topology = observe(links=False, accelerators=machine_wide, allowed=granted)
        self.let_rest()
        plan = plan_with(topology, self.options)
        warnings = one_reason(
            [
                *suspicion.of_observation(topology),
                *concerning(plan.warnings, self.rank),
                *suspicion.of_mask(topology, kernel.parent_affinity()),
            ]
        )
        if self.strict:
            refuse_if_broken(warnings)
        share, before = plan.share_of(self.rank), Before.of(self.process)
        ours = self.process.ours(granted)
        if share.gpu is None or not share.cpus:
            self._leave(before, ours)
            return _unpinned(plan, before, warnings)
        bound = self._bound(share.cpus, ours)
        try:
            got = move_caller(share.cpus)
        except OSError as error:
            raise _RefusedError(plan, share.cpus, warnings, error) from error
        warnings += self._move_others(share.cpus, got, ours, bound)
        return Outcome(cpus=got, plan=plan, pinned=True, before=before, warnings=tuple(warnings))

    def _last_try(self, granted: CpuSet) -> Outcome:
        try:
            return self._try(granted)
        except _RefusedError as refused:
            self._put_caller_back()
            warnings = [*refused.warnings, refused.notice]
            return _unpinned(refused.plan, Before.of(self.process), warnings)

    def _bound(self, cpus: CpuSet, ours: set[CpuSet]) -> dict[int, CpuSet]:
        """Threads that somebody has bound, and that can't be told from ours when we are through.

        That is the caller, which moves wherever it is, and whoever is just where we go.
        """
        caller = {} if self.caller in ours else {kernel.thread_id(): self.caller}
        return caller if cpus in ours else {**dict.fromkeys(threads_with(cpus), cpus), **caller}

    def _move_others(
        self, asked: CpuSet, got: CpuSet, ours: set[CpuSet], bound: dict[int, CpuSet]
    ) -> list[Notice]:
        alive = set(kernel.thread_ids() or self.process.bound)  # ids are used again
        kept = {tid: mask for tid, mask in self.process.bound.items() if tid in alive}
        self.process.share, self.process.bound = got, {**bound, **kept}
        # When a cpuset grows the kernel gives back what was asked for last: what the others have.
        cut = [] if got == asked else [_cut(asked, move_caller(got))]
        return [*cut, *move_all(got, ours=ours).notices()]

    def _leave(self, before: Before, ours: set[CpuSet]) -> None:
        """Nothing to pin to: what earlier calls had set is taken back."""
        if self.process.share is not None:
            rewind(self.process, {self.process.share}, before.first)
        if self.caller not in ours:
            self._put_caller_back()


def _unpinned(plan: Plan, before: Before, warnings: list[Notice]) -> Outcome:
    cpus = kernel.get_affinity()
    return Outcome(cpus=cpus, plan=plan, pinned=False, before=before, warnings=tuple(warnings))


def _cut(asked: CpuSet, got: CpuSet) -> Notice:
    return Notice(
        "mask-cut",
        f"asked for CPUs {format_cpulist(asked)}, the kernel granted {format_cpulist(got)}: "
        "a cpuset denies the others",
    )


class _RefusedError(Exception):
    """The kernel refused a share; nothing has been moved."""

    def __init__(self, plan: Plan, cpus: CpuSet, warnings: list[Notice], error: OSError) -> None:
        super().__init__(plan, cpus, warnings, error)
        self.plan = plan
        self.warnings = warnings
        self.notice = Notice(
            "pin-failed",
            f"the kernel refused CPUs {format_cpulist(cpus)} ({error.strerror}): the mask stays; "
            "a cpuset or a seccomp filter may forbid it",
        )
