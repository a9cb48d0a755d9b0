"""Plan, and put the plan into force."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gpuaff.allocator.modes import Partition
from gpuaff.allocator.options import Options
from gpuaff.allocator.plan import Plan
from gpuaff.binding import extras, suspicion
from gpuaff.binding.decide import decide, keep
from gpuaff.binding.extras import Asked
from gpuaff.binding.granted import Granted, ask
from gpuaff.binding.process import NOTHING, Before, Extras, Process
from gpuaff.binding.report import concerning, refuse_if_broken
from gpuaff.binding.threads import move, move_all, move_caller, put_again, threads_with
from gpuaff.binding.undo import rewind
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.launch import above, gpus, masks, pinned
from gpuaff.launch.pinned import Pinned
from gpuaff.launch.ranks import Ranks, narrows_nothing
from gpuaff.notices import Notice, one_reason
from gpuaff.records import dataclass
from gpuaff.system import kernel
from gpuaff.topology.live import gpus_of_the_machine, observe
from gpuaff.topology.model import Topology


class UnknownRankError(Exception):
    """Which rank this is is not known, and any of the visible GPUs may be its own.

    Attributes:
        warnings: what is to be said.
    """

    def __init__(self, warnings: Iterable[Notice]) -> None:
        super().__init__(warnings)
        self.warnings = tuple(warnings)


class RefusedError(Exception):
    """The kernel refused a share.

    Attributes:
        plan: the plan that it is from.
        warnings: what is to be said; the last one is what was refused.
    """

    def __init__(self, plan: Plan, warnings: Iterable[Notice]) -> None:
        super().__init__(plan, warnings)
        self.plan = plan
        self.warnings = tuple(warnings)


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
        let_rest: called when the driver has been asked everything.
        in_claim: whether a claim encloses this process, which may have made its mask narrow.
        no_rank: what is to be said where the rank is not known; None where it is.
    """

    process: Process
    ranks: Ranks
    options: Options
    asked: Asked
    strict: bool
    let_rest: Callable[[], None]
    in_claim: bool = False
    no_rank: Notice | None = None

    @property
    def rank(self) -> int:
        """The local rank."""
        return self.ranks.local_rank

    def pin(self) -> Outcome:
        """Plan for all ranks and put this one's share into force; called by ``whole``.

        Raises:
            UnknownRankError: nothing may be narrowed.
            RefusedError: the kernel refused the share.
            OSError: it refused anything else.
            GpuaffError: as :func:`gpuaff.set_affinity` has it.
        """
        caller = kernel.get_affinity()
        outcome = self._pin(caller, ask(self.process, caller))
        if self.strict:
            refuse_if_broken(outcome.warnings)
        return outcome

    def _pin(self, caller: CpuSet, granted: Granted) -> Outcome:
        over = above.observe(self.ranks)
        machine_wide = self.options.partition is Partition.MACHINE
        topology = observe(links=False, accelerators=machine_wide, allowed=granted.cpus)
        self.let_rest()
        visible = len(topology.visible)
        if self.no_rank is not None and visible > 1:
            said = suspicion.of_observation(topology)
            raise UnknownRankError([*said, narrows_nothing(self.no_rank, visible)])
        whose = masks.observe(self.ranks, own=granted.cpus, above=over, online=topology.cpus)
        had = extras.started_with(self.process, granted.cpus)
        is_own = had is not None and had.is_of(self.ranks)
        plan = self._plan(topology, whose, had if is_own else None)
        warnings = one_reason(
            [
                *suspicion.of_observation(topology),
                *concerning(plan.warnings, self.rank),
                *([] if whose.bound else suspicion.of_mask(topology, over.parent)),
            ]
        )
        if self.in_claim or self.process.taken is not None:  # a claim has made the mask narrow
            warnings = [w for w in warnings if w.code not in ("mask-narrow", "mask-shrunk")]
        if had is not None and is_own and granted.cpus == had.cpus:
            warnings = [w for w in warnings if w.code not in pinned.EXPLAINED]
        # One rank on the only GPU has all of its CPUs: those who share the GPU share these.
        if had is not None and not is_own and (had.local_size, visible) != (1, 1):
            warnings.insert(0, pinned.of_another(had, self.ranks))  # the cause of what follows
        if self.strict:
            refuse_if_broken(warnings)
        share, before = plan.share_of(self.rank), Before.of(self.process)
        if share.gpu is None or not share.cpus:
            warnings += self._leave(caller, before, granted)
            return self._outcome(kernel.get_affinity(), plan, before, warnings, pinned=False)
        ours = granted.shown(self.process.set_here)
        bound = self._bound(share.cpus, caller, ours)
        warnings += extras.put(
            self.process, self.asked, share, topology, ranks=self.ranks.local_size
        )
        if self.strict:
            refuse_if_broken(warnings)
        try:
            move(share.cpus, kernel.thread_id(), caller, self.process.moved)
        except OSError as error:
            raise RefusedError(plan, [*warnings, _refused(share.cpus, error)]) from error
        got = kernel.get_affinity()
        self.process.reserved = share.reserved
        warnings += self._move_others(share.cpus, got, ours, bound)
        extras.put_mark(
            self.process,
            Pinned(
                local_rank=self.rank,
                local_size=self.ranks.local_size,
                cpus=got,
                reserved=share.reserved,
            ),
        )
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

    def _plan(self, topology: Topology, whose: masks.Masks, had: Pinned | None) -> Plan:
        own = gpus.observe(self.ranks, visible=len(topology.visible), is_rank=had is not None)
        if had is not None and topology.visible:
            return keep(topology, self.options, self.ranks, own, had)
        on_the_bus = () if own is None else gpus_of_the_machine()
        return decide(topology, self.options, self.ranks, whose, own, on_the_bus)

    def _bound(self, cpus: CpuSet, caller: CpuSet, ours: set[CpuSet]) -> dict[int, CpuSet]:
        """Threads that somebody has bound, and that can't be told from ours when we are through.

        That is the caller, which moves wherever it is, and whoever is just where we go.
        """
        is_ours = caller in ours or self._was_narrowed(caller)
        found = {} if is_ours else {kernel.thread_id(): caller}
        return found if cpus in ours else {**dict.fromkeys(threads_with(cpus), cpus), **found}

    def _was_narrowed(self, caller: CpuSet) -> bool:
        """Whether the main thread calls, from a part of its share: a runtime did that (case C4)."""
        share = self.process.share
        return kernel.thread_id() == self.process.pid and share is not None and caller < share

    def _move_others(
        self, asked: CpuSet, got: CpuSet, ours: set[CpuSet], bound: dict[int, CpuSet]
    ) -> list[Notice]:
        alive = set(kernel.thread_ids() or self.process.bound)  # ids are used again
        kept = {tid: mask for tid, mask in self.process.bound.items() if tid in alive}
        self.process.share, self.process.bound = got, {**bound, **kept}
        self.process.whole = None
        # When a cpuset grows the kernel gives back what was asked for last: what the others have.
        cut = [] if got == asked else [_cut(asked, move_caller(got))]
        moved = move_all(got, ours=ours, moved=self.process.moved)
        self.process.apart = moved.left
        return [*cut, *moved.notices()]

    def _leave(self, caller: CpuSet, before: Before, granted: Granted) -> list[Notice]:
        """Nothing to pin to: what earlier calls had set is taken back."""
        share, set_here = self.process.share, self.process.set_here
        if caller not in granted.shown(set_here):
            put_again(kernel.thread_id(), caller, set_here)
        if share is not None:
            rewind(self.process, granted.shown([share]), before.first)
        return extras.put_back(self.process, NOTHING)


def _cut(asked: CpuSet, got: CpuSet) -> Notice:
    return Notice(
        "mask-cut",
        f"asked for CPUs {format_cpulist(asked)}, the kernel granted {format_cpulist(got)}: "
        "a cpuset denies the others",
    )


def _refused(cpus: CpuSet, error: OSError) -> Notice:
    return Notice(
        "pin-failed",
        f"the kernel refused CPUs {format_cpulist(cpus)} ({error.strerror}): the mask stays; "
        "a cpuset or a seccomp filter may forbid it",
    )
