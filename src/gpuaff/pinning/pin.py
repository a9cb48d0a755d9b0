"""A call of ``set_affinity``: arguments, observation, plan, and the change of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from gpuaff._system import env, kernel
from gpuaff._system.interrupts import interruptible
from gpuaff.allocator.model import Options, Partition, Plan, Share, check_rank
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.launch import inherited
from gpuaff.launch.gpus import own_gpus
from gpuaff.launch.inherited import PINNED_VARIABLE, Pinned, classify_pinned
from gpuaff.launch.masks import Masks, classify_masks, consistency, observe_ancestry
from gpuaff.launch.ranks import ALONE, Ranks, from_environment, narrows_nothing
from gpuaff.notices import Notice, one_reason
from gpuaff.options import count
from gpuaff.pinning.effective import EffectiveMasks, effective_masks
from gpuaff.pinning.openmp import binding_notices, set_thread_count
from gpuaff.pinning.rank_plan import plan_for_rank, plan_inside_share
from gpuaff.pinning.report import concerning, refuse_if_broken, say, say_where
from gpuaff.pinning.restore import current, put_extras_back, refusal, refused, rewind, settle_for
from gpuaff.pinning.state import NOTHING, Extras, Process, State, this_process, transaction
from gpuaff.pinning.threads import alive, move, move_all, put_again, threads_with
from gpuaff.settings import flag, pinning_is_off, plan_options, value_of
from gpuaff.topology.live import gpus_of_the_machine, observe
from gpuaff.topology.model import Topology
from gpuaff.topology.sysfs import cpuset_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuaff.pinning.memory import MemoryOption


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a call has done: the attributes of :class:`gpuaff.Affinity`, and what undoes it.

    Attributes:
        cpus: the calling thread's CPUs afterwards.
        before: the state before the call; None when it has changed nothing.
        extras: what is set besides CPUs, after it.
    """

    cpus: CpuSet
    rank: int | None = None
    plan: Plan | None = None
    pinned: bool = False
    before: State | None = None
    extras: Extras = NOTHING
    memory: str | None = None
    warnings: tuple[Notice, ...] = ()


class UnknownRankError(Exception):
    """The rank is unknown, and several GPUs are visible: nothing is narrowed."""

    def __init__(self, warnings: Iterable[Notice]) -> None:
        super().__init__(warnings)
        self.warnings = tuple(warnings)


class RefusedError(Exception):
    """The kernel refused the share of a plan; the last warning is about that."""

    def __init__(self, plan: Plan, warnings: Iterable[Notice]) -> None:
        super().__init__(plan, warnings)
        self.plan = plan
        self.warnings = tuple(warnings)


def pin(
    local_rank: int | None,
    nproc_per_node: int | None,
    *,
    strict: bool | None,
    memory: str | None,
    openmp: bool | None,
    arguments: Mapping[str, object],
    driver_may_rest: Callable[[], None],
) -> Outcome:
    """See :func:`gpuaff.set_affinity`; ``arguments`` are the options of the plan by name.

    ``driver_may_rest`` is called when the driver will not be asked any more.
    """
    strict = flag("strict", strict)
    ranks, remarks = _ranks(local_rank, nproc_per_node)
    options = plan_options((ranks or ALONE).local_size, arguments)
    memory_option, openmp = _memory_option(memory), flag("openmp", openmp)
    why = unsupported_reason()
    if why is not None and (ranks is not None or why.code == "off"):
        return _unpinned(ranks, (why,), strict=strict)
    if ranks is None:
        return _unpinned(ranks, remarks, strict=strict)
    try:
        process = this_process()
    except OSError as error:  # a seccomp filter
        return _unpinned(ranks, (refusal(error),), strict=strict)
    claim, unreadable = inherited.parent_claim()
    if claim is not None and options.partition is Partition.AUTO:
        # Other jobs' claims have other GPUs, and so other CPUs.
        options = replace(options, partition=Partition.MACHINE)
    attempt = Attempt(
        process=process,
        ranks=ranks,
        options=options,
        memory=memory_option,
        openmp=openmp,
        strict=strict,
        driver_may_rest=driver_may_rest,
        in_claim=claim is not None,
        no_rank=next((notice for notice in remarks if notice.code == "no-rank"), None),
    )
    if claim is not None and claim.pid == kernel.process_id():
        remarks = _without_no_rank(remarks)  # it is alone on its GPUs
    if _ABOUT_RANKS.isdisjoint(notice.code for notice in remarks):
        remarks = (*remarks, *consistency(ranks))
    if unreadable is not None:
        remarks = (*remarks, unreadable)
    try:
        return _run_twice(attempt, remarks)
    except UnknownRankError as error:
        warnings = (*_without_no_rank(remarks), *error.warnings)
        return _unpinned(None, warnings, strict=strict)


_ABOUT_RANKS = frozenset({"no-rank", "ranks-contradict", "ranks-stale"})
"""They say already that other ranks may be on this node."""


def _without_no_rank(notices: tuple[Notice, ...]) -> tuple[Notice, ...]:
    return tuple(notice for notice in notices if notice.code != "no-rank")


def _ranks(
    local_rank: int | None, nproc_per_node: int | None
) -> tuple[Ranks | None, tuple[Notice, ...]]:
    if local_rank is None and nproc_per_node is None:
        return from_environment()
    if local_rank is None or nproc_per_node is None:
        missing = "local_rank" if local_rank is None else "nproc_per_node"
        raise TypeError(
            f"set_affinity() needs {missing} too: give both numbers, or neither to take "
            "the launcher's (gpuaff.ranks())"
        )
    size = count("nproc_per_node", nproc_per_node)
    return Ranks(local_rank=check_rank(local_rank, size), local_size=size), ()


def _memory_option(argument: object) -> MemoryOption | None:
    name, value = value_of("memory", argument)
    if value is None:
        return None
    from gpuaff.pinning.memory import parse_memory  # only where it is requested

    return parse_memory(name, value)


_OFF = Notice("off", "GPUAFF=off: the mask stays")

_OTHER_MACHINE = Notice(
    "other-machine",
    "GPUAFF_FSROOT describes another machine, which this process is not on: unset it to pin",
)

_NOT_LINUX = Notice(
    "not-linux", "this system has no sched_setaffinity (Linux has): the CPUs stay as they are"
)


def unsupported_reason() -> Notice | None:
    """Why pinning is unavailable here; None where it is available.

    Raises:
        InvalidOptionError: the variable GPUAFF is neither a yes nor a no.
    """
    if pinning_is_off():
        return _OFF
    if not kernel.can_pin():
        return _NOT_LINUX
    return None if kernel.machine_tree().is_live else _OTHER_MACHINE


def _run_twice(attempt: Attempt, remarks: tuple[Notice, ...]) -> Outcome:
    with suppress(RefusedError, OSError):  # a cpuset changed meanwhile: plan from what is left
        return _in_transaction(attempt, remarks)
    try:
        return _in_transaction(attempt, remarks)
    except RefusedError as error:
        plan, warnings = error.plan, error.warnings
    except OSError as error:
        plan, warnings = None, (refusal(error),)
    return _unpinned(attempt.ranks, warnings + remarks, strict=attempt.strict, plan=plan)


def _in_transaction(attempt: Attempt, remarks: tuple[Notice, ...]) -> Outcome:
    with transaction(attempt.process, memory=attempt.memory is not None):
        return attempt.run(remarks)


def _unpinned(
    ranks: Ranks | None, warnings: tuple[Notice, ...], *, strict: bool, plan: Plan | None = None
) -> Outcome:
    if strict:
        refuse_if_broken(warnings)
    rank = None if ranks is None else ranks.local_rank
    cpus = current()
    say(warnings, rank=rank)
    say_where(rank, None, cpus)
    return Outcome(cpus=cpus, rank=rank, plan=plan, warnings=warnings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What an attempt has found.

    Attributes:
        caller: the calling thread's CPUs.
        effective: what the kernel grants of the original mask.
        topology: the machine, with that mask allowed.
        masks: what is known of the other ranks' masks.
        parent: the CPUs that the parent may use; None when unknown.
        started_with: the share of the process that started this one, where it has no other CPUs.
        is_own: whether that is this very rank's share.
    """

    caller: CpuSet
    effective: EffectiveMasks
    topology: Topology
    masks: Masks
    parent: CpuSet | None
    started_with: Pinned | None
    is_own: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """An attempt to pin this process, the arguments of the call checked.

    Attributes:
        process: this process.
        ranks: this rank, and how many there are.
        options: the options of the plan.
        memory: the memory policy requested; None: leave it.
        openmp: whether to set OMP_NUM_THREADS.
        strict: whether best effort is not enough.
        driver_may_rest: called when the driver will not be asked any more.
        in_claim: whether a claim is around this process, which may have narrowed its mask.
        no_rank: the warning where the rank is unknown; else None.
    """

    process: Process
    ranks: Ranks
    options: Options
    memory: MemoryOption | None
    openmp: bool
    strict: bool
    driver_may_rest: Callable[[], None]
    in_claim: bool
    no_rank: Notice | None

    def run(self, remarks: tuple[Notice, ...]) -> Outcome:
        """Observe, plan for all ranks, put this one's share into force, and log it.

        Raises:
            UnknownRankError: nothing may be narrowed.
            RefusedError: the kernel refused the share.
            OSError: it refused anything else.
            GPUAffinityError: as :func:`gpuaff.set_affinity` has it.
        """
        before, rank = self.process.state, self.ranks.local_rank
        seen = self._observe()
        plan = self._plan(seen)
        warnings = self._strictly(self._warnings(seen, plan))
        share = plan.share_of(rank)
        pinned = share.gpu is not None and bool(share.cpus)
        if pinned:
            warnings += self._strictly(self._set_extras(share, seen.topology))
            self._move(seen, plan, share, warnings)
        else:
            warnings += self._unset(seen, before)
        self._strictly(warnings)
        cpus, extras = kernel.get_affinity(), self.process.state.extras
        policy = extras.memory.get(kernel.thread_id())
        outcome = Outcome(
            cpus=cpus,
            rank=rank,
            plan=plan,
            pinned=pinned,
            before=before,
            extras=extras,
            memory=None if policy is None else str(policy.ours),
            warnings=(*remarks, *warnings),
        )
        say(outcome.warnings, rank=rank)
        say_where(rank, share if pinned else None, cpus, memory=outcome.memory)
        return outcome

    def _strictly(self, warnings: list[Notice]) -> list[Notice]:
        if self.strict:
            refuse_if_broken(warnings)
        return warnings

    def _observe(self) -> Observation:
        caller = kernel.get_affinity()
        effective = effective_masks(self.process, caller)
        above = observe_ancestry(self.ranks)
        machine_wide = self.options.partition is Partition.MACHINE
        with interruptible():  # the driver may hang
            topology = observe(links=False, accelerators=machine_wide, allowed=effective.cpus)
        self.driver_may_rest()
        visible = len(topology.visible)
        if self.no_rank is not None and visible > 1:
            unnarrowed = narrows_nothing(self.no_rank, visible)
            raise UnknownRankError([*_of_topology(topology), unnarrowed])
        share = self._started_with(effective.cpus)
        return Observation(
            caller=caller,
            effective=effective,
            topology=topology,
            masks=classify_masks(
                self.ranks,
                own=effective.cpus,
                above=above,
                online=topology.cpus,
                cpuset=lambda: cpuset_of(kernel.machine_tree()),
            ),
            parent=above.parent,
            started_with=share,
            is_own=share is not None and share.is_of(self.ranks.local_rank, self.ranks.local_size),
        )

    def _started_with(self, own: CpuSet) -> Pinned | None:
        ours = self.process.state.extras.variables.get(PINNED_VARIABLE)
        return classify_pinned(env.get if ours is None else {PINNED_VARIABLE: ours.first}.get, own)

    def _plan(self, seen: Observation) -> Plan:
        share = seen.started_with if seen.is_own else None
        gpus = own_gpus(self.ranks, visible=len(seen.topology.visible), is_rank=share is not None)
        if share is not None and seen.topology.visible:
            return plan_inside_share(seen.topology, self.options, self.ranks, gpus, share)
        all_gpus = () if gpus is None else gpus_of_the_machine()
        return plan_for_rank(seen.topology, self.options, self.ranks, seen.masks, gpus, all_gpus)

    def _warnings(self, seen: Observation, plan: Plan) -> list[Notice]:
        warnings = one_reason(
            [
                *_of_topology(seen.topology),
                *concerning(plan.warnings, self.ranks.local_rank),
                *([] if seen.masks.bound else _mask_shrunk(seen.topology, seen.parent)),
            ]
        )
        explained: frozenset[str] = frozenset()
        if self.in_claim or self.process.state.grant is not None:  # it has narrowed the mask
            explained = frozenset({"mask-narrow", "mask-shrunk"})
        share = seen.started_with
        if share is not None and seen.is_own and seen.effective.cpus == share.cpus:
            explained |= inherited.EXPLAINED
        warnings = [notice for notice in warnings if notice.code not in explained]
        # One rank on the only GPU has all of its CPUs: the ranks that share the GPU share these.
        only_one = share is not None and (share.local_size, len(seen.topology.visible)) == (1, 1)
        if share is not None and not seen.is_own and not only_one:
            cause = inherited.share_inherited(share, self.ranks.local_rank, self.ranks.local_size)
            warnings.insert(0, cause)  # of what follows
        return warnings

    def _set_extras(self, share: Share, topology: Topology) -> list[Notice]:
        """Memory and OMP_NUM_THREADS, before the CPUs: binding memory may move threads (C11).

        What an earlier call has set is put back first, so that twice is the same as once.
        """
        process = self.process
        notices = put_extras_back(process, NOTHING)
        if self.memory is not None:
            from gpuaff.pinning.memory import set_memory  # only where it is requested

            change, found = set_memory(self.memory, share, topology)
            notices += found
            if change is not None:
                extras = process.state.extras
                policies = {**extras.memory, kernel.thread_id(): change}
                process.update(extras=replace(extras, memory=policies))
        if self.openmp:
            notices += set_thread_count(process, share.cores, self.ranks.local_size)
        return notices + binding_notices()

    def _move(self, seen: Observation, plan: Plan, share: Share, warnings: list[Notice]) -> None:
        """Move all threads to the share, and add to the warnings."""
        process, state = self.process, self.process.state
        ours = seen.effective.of(state.requested)
        bound = self._bound(share.cpus, seen.caller, ours)
        try:
            move(share.cpus, kernel.thread_id(), seen.caller, process.moved)
        except OSError as error:
            raise RefusedError(plan, [*warnings, refused(share.cpus, error)]) from error
        got = kernel.get_affinity()
        if got != share.cpus:
            warnings.append(settle_for(share.cpus, got))
        process.update(
            share=got,
            bound={**bound, **alive(state.bound)},
            reserved=share.reserved,
            whole=None,
        )
        moved = move_all(got, ours=ours, moved=process.moved)
        process.update(apart=moved.left)
        warnings += moved.notices()
        own = Pinned(
            local_rank=self.ranks.local_rank,
            local_size=self.ranks.local_size,
            cpus=got,
            reserved=share.reserved,
        )
        process.set_variable(PINNED_VARIABLE, str(own))

    def _bound(self, cpus: CpuSet, caller: CpuSet, ours: set[CpuSet]) -> dict[int, CpuSet]:
        """Threads that the program has bound and that afterwards look like those moved here.

        That is the caller, which moves wherever it is, and those that have just the new mask.
        """
        state, own = self.process.state, kernel.thread_id()
        # The main thread may have been narrowed to a part of its share by a runtime (case C4).
        narrowed = own == state.pid and state.share is not None and caller < state.share
        found = {} if caller in ours or narrowed else {own: caller}
        return found if cpus in ours else {**dict.fromkeys(threads_with(cpus), cpus), **found}

    def _unset(self, seen: Observation, before: State) -> list[Notice]:
        """Nothing to pin to: take back what earlier calls have set."""
        requested = before.requested
        if seen.caller not in seen.effective.of(requested):
            put_again(kernel.thread_id(), seen.caller, requested)
        if before.share is not None:
            rewind(self.process, seen.effective.of([before.share]), before.first)
        return put_extras_back(self.process, NOTHING)


def _of_topology(topology: Topology) -> list[Notice]:
    """How the machine was read; the planner passes on what concerns visible devices."""
    return [note for note in topology.notes if not note.code.startswith("visible-")]


def _mask_shrunk(topology: Topology, parent: CpuSet | None) -> list[Notice]:
    """A mask of one core that the parent has not: a border, or an OpenMP runtime's doing.

    They look the same (cases C5, C7), so there is a warning, and the mask is not widened.
    """
    allowed = topology.allowed
    one_core = len(allowed) == 1 or any(allowed <= core for core in topology.cores or ())
    if parent is None or parent <= allowed or not one_core:
        return []
    text = (
        f"this process may use CPUs {format_cpulist(allowed)} only, its parent "
        f"{format_cpulist(parent)}. If no launcher has set that, an OpenMP runtime or a BLAS did "
        "on import (OMP_PROC_BIND, KMP_AFFINITY, GOMP_CPU_AFFINITY; OPENBLAS_MAIN_FREE=1 and "
        "KMP_AFFINITY=disabled prevent it): call gpuaff before importing it"
    )
    return [Notice("mask-shrunk", text)]
