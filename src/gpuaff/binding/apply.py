"""Put a plan into force, all or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from gpuaff.allocator.modes import Partition
from gpuaff.allocator.options import Options
from gpuaff.allocator.plan import Plan
from gpuaff.binding import extras, suspicion
from gpuaff.binding.decide import decide
from gpuaff.binding.extras import Asked
from gpuaff.binding.process import NOTHING, Extras, Process
from gpuaff.binding.report import concerning, refuse_if_broken
from gpuaff.binding.threads import move_all, move_caller, threads_with
from gpuaff.binding.undo import Before, rewind
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.launch import above, gpus, masks
from gpuaff.launch.ranks import Ranks
from gpuaff.notices import Notice, one_reason
from gpuaff.records import dataclass
from gpuaff.system import kernel
from gpuaff.topology.live import gpus_of_the_machine, observe
from gpuaff.topology.model import Topology


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a call.

    Attributes:
        cpus: the calling thread's CPUs afterwards.
        plan: the plan, which holds this rank's share.
        pinned: whether this rank's share is in force.
        before: how the process was before the call.
        extras: what is set besides, after it.
        warnings: what concerns this rank.
    """

    cpus: CpuSet
    plan: Plan
    pinned: bool
    before: Before
    extras: Extras
    warnings: tuple[Notice, ...]


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One call of :func:`gpuaff.set_affinity`, its arguments checked.

    Attributes:
        process: what is remembered of this process; the caller holds its lock.
        ranks: this rank, and how many there are.
        options: the options of the plan.
        asked: what is to be set besides.
        strict: whether best effort is not enough.
        caller: the calling thread's CPUs before the call.
        let_rest: called when the driver has been asked everything.
    """

    process: Process
    ranks: Ranks
    options: Options
    asked: Asked
    strict: bool
    caller: CpuSet
    let_rest: Callable[[], None]

    @property
    def rank(self) -> int:
        """The local rank."""
        return self.ranks.local_rank

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
            extras.put_back(process, before.extras)
            self._put_caller_back()
            raise

    def _put_caller_back(self) -> None:
        with suppress(OSError):  # a cpuset may deny it by now
            if kernel.get_affinity() != self.caller:
                move_caller(self.caller)

    def _granted(self) -> CpuSet:
        """What the kernel grants of the original mask; unless the caller has all of it, ask."""
        original = self.process.original
        return original if self.caller == original else self._set_back()

    def _set_back(self) -> CpuSet:
        """Give the caller the original mask; what it gets of it."""
        try:
            return move_caller(self.process.original)
        except OSError:  # a cpuset has taken all of it away, and put other CPUs in its place
            return kernel.get_affinity()

    def _try(self, granted: CpuSet) -> Outcome:
        over = above.observe(self.ranks)
        machine_wide = self.options.partition is Partition.MACHINE
        topology = observe(links=False, accelerators=machine_wide, allowed=granted)
        self.let_rest()
        whose = masks.observe(self.ranks, own=granted, above=over, online=topology.cpus)
        plan = self._plan(topology, whose)
        warnings = one_reason(
            [
                *suspicion.of_observation(topology),
                *concerning(plan.warnings, self.rank),
                *([] if whose.bound else suspicion.of_mask(topology, over.parent)),
            ]
        )
        if self.strict:
            refuse_if_broken(warnings)
        share, before = plan.share_of(self.rank), Before.of(self.process)
        ours = self.process.ours(granted)
        if share.gpu is None or not share.cpus:
            warnings += self._leave(before, ours)
            return self._unpinned(plan, before, warnings)
        bound = self._bound(share.cpus, ours)
        warnings += extras.put(self.process, self.asked, share, topology)
        try:
            got = move_caller(share.cpus)
        except OSError as error:
            extras.put_back(self.process, before.extras)
            raise _RefusedError(plan, share.cpus, warnings, error) from error
        self.process.reserved = share.reserved
        warnings += self._move_others(share.cpus, got, ours, bound)
        return self._outcome(got, plan, before, warnings, pinned=True)

    def _outcome(
        self, cpus: CpuSet, plan: Plan, before: Before, warnings: list[Notice], *, pinned: bool
    ) -> Outcome:
        return Outcome(
            cpus=cpus,
            plan=plan,
            pinned=pinned,
            before=before,
            extras=self.process.extras,
            warnings=tuple(warnings),
        )

    def _unpinned(self, plan: Plan, before: Before, warnings: list[Notice]) -> Outcome:
        return self._outcome(kernel.get_affinity(), plan, before, warnings, pinned=False)

    def _plan(self, topology: Topology, whose: masks.Masks) -> Plan:
        own = gpus.observe(self.ranks, visible=len(topology.visible))
        on_the_bus = () if own is None else gpus_of_the_machine()
        return decide(topology, self.options, self.ranks, whose, own, on_the_bus)

    def _last_try(self, granted: CpuSet) -> Outcome:
        try:
            return self._try(granted)
        except _RefusedError as refused:
            self._put_caller_back()
            warnings = [*refused.warnings, refused.notice]
            return self._unpinned(refused.plan, Before.of(self.process), warnings)

    def _bound(self, cpus: CpuSet, ours: set[CpuSet]) -> dict[int, CpuSet]:
        """Threads that somebody has bound, and that can't be told from ours when we are through.

        That is the caller, which moves wherever it is, and whoever is just where we go.
        """
        is_ours = self.caller in ours or self._was_narrowed()
        caller = {} if is_ours else {kernel.thread_id(): self.caller}
        return caller if cpus in ours else {**dict.fromkeys(threads_with(cpus), cpus), **caller}

    def _was_narrowed(self) -> bool:
        """Whether the main thread calls, from a part of its share: a runtime did that (case C4)."""
        share = self.process.share
        return kernel.thread_id() == self.process.pid and share is not None and self.caller < share

    def _move_others(
        self, asked: CpuSet, got: CpuSet, ours: set[CpuSet], bound: dict[int, CpuSet]
    ) -> list[Notice]:
        alive = set(kernel.thread_ids() or self.process.bound)  # ids are used again
        kept = {tid: mask for tid, mask in self.process.bound.items() if tid in alive}
        self.process.share, self.process.bound = got, {**bound, **kept}
        # When a cpuset grows the kernel gives back what was asked for last: what the others have.
        cut = [] if got == asked else [_cut(asked, move_caller(got))]
        moved = move_all(got, ours=ours)
        self.process.apart = moved.left
        return [*cut, *moved.notices()]

    def _leave(self, before: Before, ours: set[CpuSet]) -> list[Notice]:
        """Nothing to pin to: what earlier calls had set is taken back."""
        if self.process.share is not None:
            rewind(self.process, {self.process.share}, before.first)
        if self.caller not in ours:
            self._put_caller_back()
        return extras.put_back(self.process, NOTHING)


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
