"""Plan, and put the plan into force."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from gpuaff._system import kernel
from gpuaff.allocator.model import Options, Partition, Plan, Share
from gpuaff.allocator.plan import plan_with
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.errors import GPUAffinityError
from gpuaff.launch import allocation, inherited, masks
from gpuaff.launch.allocation import OwnGpus
from gpuaff.launch.inherited import Pinned
from gpuaff.launch.masks import Masks, Whose
from gpuaff.launch.ranks import Ranks, narrows_nothing
from gpuaff.notices import Notice, one_reason
from gpuaff.pinning import extras
from gpuaff.pinning.extras import Asked
from gpuaff.pinning.report import concerning, refuse_if_broken
from gpuaff.pinning.restore import rewind
from gpuaff.pinning.state import NOTHING, Before, EffectiveMasks, Extras, Process, observe_masks
from gpuaff.pinning.threads import move, move_all, move_caller, put_again, threads_with
from gpuaff.settings import pinning_is_off
from gpuaff.topology.live import gpus_of_the_machine, observe
from gpuaff.topology.model import Gpu, Topology
from gpuaff.topology.pci import address_key

# A rank that sees GPUs of its own only: which GPUs the CPUs are cut for. Pure.
#
# All ranks must cut alike though each sees another GPU. What they have in common are the machine's
# GPUs by PCI address, and the scheduler's list of those that the job has.


def among_those_of_the_job(
    topology: Topology, gpus: OwnGpus, on_the_bus: Sequence[Gpu]
) -> tuple[Topology, int] | None:
    """The machine with all of the job's GPUs visible, and the place of this rank's among them.

    Args:
        topology: the machine as this rank sees it.
        gpus: what the launcher says.
        on_the_bus: every GPU of the machine, by sysfs.

    Returns:
        None when they are not told, or what is told does not fit what is here.
    """
    machine = _all_gpus(topology, on_the_bus)
    if len(machine) < len(topology.gpus):
        return None  # a lost GPU that sysfs has lost too: the others' numbers do not count it
    named = gpus.named
    if named is None and gpus.on_node == len(machine):
        named = tuple(range(len(machine)))
    own = _index_of(topology.gpu_by_index.get(topology.visible[0]), machine)
    if named is None or own not in named or named[-1] >= len(machine):
        return None
    if gpus.own is not None and own not in gpus.own:
        return None  # the scheduler counts otherwise, e.g. without a display card
    return replace(topology, gpus=machine, visible=named), named.index(own)


def _all_gpus(topology: Topology, on_the_bus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """The machine's GPUs in PCI order.

    A device cgroup may hide the others' GPUs from the driver, in each rank other ones: then all
    are taken as sysfs describes them, so that every rank has the same description.
    """
    shown = {gpu.pci_bus_id: gpu for gpu in topology.gpus if gpu.pci_bus_id}
    bus = {gpu.pci_bus_id: gpu for gpu in on_the_bus if gpu.pci_bus_id}
    known = shown if bus.keys() <= shown.keys() else bus
    ordered = sorted(known, key=address_key)
    return tuple(replace(known[address], index=i) for i, address in enumerate(ordered))


def _index_of(gpu: Gpu | None, machine: Sequence[Gpu]) -> int | None:
    address = gpu and gpu.pci_bus_id
    return next((one.index for one in machine if one.pci_bus_id == address), None)


def not_told(share: Share, gpus: OwnGpus) -> Notice:
    """The rank keeps what is near its GPU."""
    remedy = (
        "claim once for all ranks, before the launcher (gpuaff run -n 2 -- torchrun ...)"
        if gpus.claimed
        else "show every rank all GPUs of the job (srun --gpus-per-node instead of "
        "--gpus-per-task), or let srun bind the ranks to CPUs"
    )
    return Notice(
        "gpus-unknown",
        f"GPU {share.gpu} is this rank's own, and which GPUs the other ranks have is not told: it "
        f"keeps all of the CPUs near it that it may use, {format_cpulist(share.cpus)}, and others "
        f"may get them too; {remedy}",
        rank=share.rank,
    )


def one_for_all(ranks: Ranks) -> Notice:
    """The driver knows other GPUs: a wrapper may show each rank another one."""
    return Notice(
        "one-gpu",
        f"{ranks.local_size} ranks see one GPU and share its cores; if a wrapper gave each rank a "
        "GPU of its own through CUDA_VISIBLE_DEVICES, the shares are too small and may overlap: "
        "show all of the job's GPUs to every rank",
    )


def not_one_each(ranks: Ranks, visible: Sequence[int]) -> Notice:
    """Several ranks, and not as many GPUs: mostly one number of the job is not as it was meant."""
    size, count = ranks.local_size, len(visible)
    what = (
        f"ranks that are {count} apart are on one GPU and cut its share again"
        if size > count
        else f"no rank is on GPU {format_cpulist(frozenset(visible[size:]))}"
    )
    return Notice(
        "ranks-gpus",
        f"{size} ranks are on this node and {count} GPUs visible to them: {what}; if that is not "
        "meant, start as many ranks a node as it has GPUs, or look at CUDA_VISIBLE_DEVICES",
    )


def shared(share: Share, ranks: Ranks, gpus: int) -> Notice:
    """Several ranks on each GPU, or perhaps on this one."""
    return Notice(
        "gpus-unknown",
        f"{ranks.local_size} ranks have {gpus} GPUs, and which of them are on GPU {share.gpu} too "
        f"is not told: this rank keeps all of the GPU's part, CPUs {format_cpulist(share.cpus)}, "
        "and shares it with them; show every rank all GPUs of the job (srun --gpus-per-node)",
        rank=share.rank,
    )


# Which plan a rank can make, by what is known of the others' masks and GPUs. Pure.
#
# Ranks don't talk to each other. Each makes the plan for all of them where all have the same
# inputs. Where they have not, it plans for itself alone, stays in its own mask and says so.


def decide(
    topology: Topology,
    options: Options,
    ranks: Ranks,
    masks: Masks,
    gpus: OwnGpus | None = None,
    on_the_bus: Sequence[Gpu] = (),
) -> Plan:
    """A plan that holds this rank's share.

    Args:
        topology: the machine as this rank sees it; ``allowed`` is its own mask.
        options: what is asked for; ``rank_allowed`` goes before ``masks``.
        ranks: this rank, and how many there are.
        masks: what is known of the ranks' masks.
        gpus: the GPUs that are this rank's own; None where all ranks see the same ones.
        on_the_bus: every GPU of the machine, by sysfs; only needed with ``gpus``.

    Raises:
        GPUAffinityError: as :func:`gpuaff.plan` does; or ``rank_allowed`` gives this rank nothing
            that it may use.
    """
    if not topology.visible:
        return plan_with(topology, options)  # nothing is cut, so nobody's mask matters
    sets = options.rank_allowed or masks.named
    if sets is not None:
        return _each_in_its_own(topology, options, ranks, gpus, sets)
    if options.partition is Partition.MACHINE and (masks.whose is Whose.UNKNOWN or gpus):
        plan = _inside_its_border(topology, options, ranks, gpus)
        if plan.partition is Partition.MACHINE:
            return plan
    if masks.whose is Whose.UNKNOWN:
        plan = _alone(topology, options, ranks, gpus)
        return _with(plan, _masks_unknown(plan.shares[0], masks))
    if gpus is None:
        return _of_all(topology, options, ranks)
    return _by_own_gpu(topology, options, ranks, gpus, on_the_bus)


def keep(
    topology: Topology, options: Options, ranks: Ranks, gpus: OwnGpus | None, share: Pinned
) -> Plan:
    """The plan for a rank whose mask is its share already: an ancestor has cut it, for all ranks.

    Args:
        topology: the machine as this rank sees it, with a visible GPU; ``allowed`` is the share.
        options: what is asked for, inside the share.
        ranks: this rank, and how many there are.
        gpus: the GPUs that are this rank's own; None where all ranks see the same ones.
        share: what the ancestor has set.
    """
    cpus = options.cpus and (options.cpus & topology.allowed or options.cpus)
    reserve = 0 if share.reserved else options.reserve
    inside = replace(options, partition=Partition.JOB, cpus=cpus, reserve=reserve)
    plan = _alone(topology, inside, ranks, gpus)
    if not share.reserved:
        return plan
    return replace(plan, shares=(replace(plan.shares[0], reserved=share.reserved),))


def inputs_of_all(
    topology: Topology, options: Options, rank: int, sets: Sequence[CpuSet]
) -> tuple[Topology, Options]:
    """What every rank plans from when each has a mask of its own.

    ``allowed`` holds what any rank may use; this rank's set is cut to its own mask, as the kernel
    would cut it.

    Raises:
        GPUAffinityError: nothing of this rank's set is left.
    """
    own = sets[rank] & topology.allowed
    if not own:
        raise GPUAffinityError(
            f"rank_allowed gives rank {rank} the CPUs {format_cpulist(sets[rank])}, but it may use "
            f"{format_cpulist(topology.allowed) or 'none'} only, which its launcher, taskset or a "
            "cpuset has set; name CPUs that it may use"
        )
    cut = (*sets[:rank], own, *sets[rank + 1 :])
    return topology.with_allowed(frozenset().union(*cut)), replace(options, rank_allowed=cut)


def _of_all(topology: Topology, options: Options, ranks: Ranks) -> Plan:
    plan = plan_with(topology, options)
    if len(topology.visible) == 1 < min(ranks.local_size, len(topology.gpus)):
        return _with(plan, one_for_all(ranks))
    if 1 < ranks.local_size != len(topology.visible):
        return _with(plan, not_one_each(ranks, topology.visible))
    return plan


def _each_in_its_own(
    topology: Topology,
    options: Options,
    ranks: Ranks,
    gpus: OwnGpus | None,
    sets: Sequence[CpuSet],
) -> Plan:
    rank = ranks.local_rank
    for_all, all_options = inputs_of_all(topology, options, rank, sets)
    own = sets[rank] & topology.allowed
    if gpus is None:
        plan = _of_all(for_all, all_options, ranks)
    else:
        # Only the rank itself knows which GPU it has: nobody can plan for the others.
        plan = _alone(topology.with_allowed(own), options, ranks, gpus)
        if not all(own.isdisjoint(cpus) for place, cpus in enumerate(sets) if place != rank):
            plan = _with(plan, not_told(plan.shares[0], gpus))
    beyond = options.rank_allowed is not None and sets[rank] & topology.cpus - own
    return _with(plan, _mask_cut(rank, own, beyond)) if beyond else plan


def _by_own_gpu(
    topology: Topology,
    options: Options,
    ranks: Ranks,
    gpus: OwnGpus,
    on_the_bus: Sequence[Gpu],
) -> Plan:
    """The part of its own GPU, cut for all GPUs of the job: the same cut in every rank."""
    found = among_those_of_the_job(topology, gpus, on_the_bus)
    if found is None:
        plan = _alone(topology, options, ranks, gpus)
        return _with(plan, not_told(plan.shares[0], gpus))
    machine, place = found
    plan = plan_with(machine, replace(options, nproc=len(machine.visible)))
    plan = _only(plan, place, ranks.local_rank, gpu=topology.visible[0])
    if gpus.shared or ranks.local_size > len(machine.visible):
        return _with(plan, shared(plan.shares[0], ranks, len(machine.visible)))
    return plan


def _alone(topology: Topology, options: Options, ranks: Ranks, gpus: OwnGpus | None) -> Plan:
    """The plan for this rank as if there were no other, near its GPU and inside its mask."""
    place = ranks.local_rank % len(topology.visible) if gpus is None else 0
    gpu = topology.visible[place]
    mine = replace(options, nproc=1, rank_allowed=None)
    plan = plan_with(replace(topology, visible=(gpu,)), mine, numbers=(ranks.local_rank,))
    return _only(plan, 0, ranks.local_rank, gpu=gpu)


def _inside_its_border(
    topology: Topology, options: Options, ranks: Ranks, gpus: OwnGpus | None
) -> Plan:
    """The plan for the ranks on this rank's GPU: what others may use does not matter inside.

    Where each rank sees GPUs of its own, nobody tells who else is on them: one rank a GPU then,
    unless there are more ranks than GPUs, or the launcher may have put several on one. Those that
    this rank has claimed are nobody else's.
    """
    if gpus is not None and gpus.claimed:
        return _alone(topology, options, ranks, gpus)
    count = len(topology.visible) if gpus is None else gpus.on_node or len(gpus.named or ())
    if gpus is not None and (gpus.shared or ranks.local_size > count):
        return _alone(topology, replace(options, partition=Partition.JOB), ranks, gpus)
    turn, place = divmod(ranks.local_rank, count)
    gpu = topology.visible[place if gpus is None else 0]
    numbers = range(place, ranks.local_size, count)
    there = replace(options, nproc=len(numbers))
    plan = plan_with(replace(topology, visible=(gpu,)), there, numbers=numbers)
    return _only(plan, turn, ranks.local_rank, gpu=gpu)


def _only(plan: Plan, place: int, rank: int, *, gpu: int) -> Plan:
    """One share of a plan that was made for other places than ranks, as this rank's."""
    warnings = [
        notice if notice.rank is None else replace(notice, rank=rank)
        for notice in plan.warnings
        if notice.rank in (None, place)
    ]
    share = replace(plan.share_of(place), rank=rank, gpu=gpu)
    return replace(plan, shares=(share,), warnings=tuple(warnings))


def _with(plan: Plan, notice: Notice) -> Plan:
    return replace(plan, warnings=(*plan.warnings, notice))


def _masks_unknown(share: Share, masks: Masks) -> Notice:
    return Notice(
        "masks-unknown",
        f"which CPUs the other ranks may use is not known ({masks.source}), so nothing is cut: "
        f"this rank keeps all of the CPUs near its GPU that it may use, "
        f"{format_cpulist(share.cpus)}; start the ranks unbound ({masks.unbound}), or give "
        "rank_allowed=",
        rank=share.rank,
    )


def _mask_cut(rank: int, own: CpuSet, beyond: CpuSet) -> Notice:
    return Notice(
        "mask-cut",
        f"rank_allowed also names the CPUs {format_cpulist(beyond)}, which this rank may not use: "
        f"it stays inside {format_cpulist(own)}",
        rank=rank,
    )


# Remarks about how a process was found, whatever is planned. Pure.


def of_observation(topology: Topology) -> list[Notice]:
    """How the machine was read; the planner passes on what concerns visible devices."""
    return [note for note in topology.notes if not note.code.startswith("visible-")]


def of_mask(topology: Topology, parent: CpuSet | None) -> list[Notice]:
    """A mask of one core that the parent has not: a border, or an OpenMP runtime's doing.

    They look the same (cases C5, C7), so it is said, and the mask is not widened.

    Args:
        topology: the machine, and what this process may use of it.
        parent: the CPUs that its parent may use; None when unknown.
    """
    allowed = topology.allowed
    one_core = len(allowed) == 1 or any(allowed <= core for core in topology.cores or ())
    if parent is None or parent <= allowed or not one_core:
        return []
    text = (
        f"this process may use CPUs {format_cpulist(allowed)} only, its parent "
        f"{format_cpulist(parent)}. If no launcher meant that, an OpenMP runtime or a BLAS did it "
        "on import (OMP_PROC_BIND, KMP_AFFINITY, GOMP_CPU_AFFINITY; OPENBLAS_MAIN_FREE=1 and "
        "KMP_AFFINITY=disabled stop it): call gpuaff before importing it"
    )
    return [Notice("mask-shrunk", text)]


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


@dataclass(frozen=True, slots=True, kw_only=True)
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


def _own_cpuset() -> CpuSet | None:
    from gpuaff.topology.cgroup import cpuset_of  # needed under srun --cpu-bind=none only

    return cpuset_of(kernel.machine_tree())


@dataclass(frozen=True, slots=True, kw_only=True)
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
        outcome = self._pin(caller, observe_masks(self.process, caller))
        if self.strict:
            refuse_if_broken(outcome.warnings)
        return outcome

    def _pin(self, caller: CpuSet, granted: EffectiveMasks) -> Outcome:
        over = masks.observe_ancestry(self.ranks)
        machine_wide = self.options.partition is Partition.MACHINE
        topology = observe(links=False, accelerators=machine_wide, allowed=granted.cpus)
        self.let_rest()
        visible = len(topology.visible)
        if self.no_rank is not None and visible > 1:
            said = of_observation(topology)
            raise UnknownRankError([*said, narrows_nothing(self.no_rank, visible)])
        whose = masks.observe_masks(
            self.ranks, own=granted.cpus, above=over, online=topology.cpus, cpuset=_own_cpuset
        )
        had = extras.started_with(self.process, granted.cpus)
        is_own = had is not None and had.is_of(self.rank, self.ranks.local_size)
        plan = self._plan(topology, whose, had if is_own else None)
        warnings = one_reason(
            [
                *of_observation(topology),
                *concerning(plan.warnings, self.rank),
                *([] if whose.bound else of_mask(topology, over.parent)),
            ]
        )
        if self.in_claim or self.process.taken is not None:  # a claim has made the mask narrow
            warnings = [w for w in warnings if w.code not in ("mask-narrow", "mask-shrunk")]
        if had is not None and is_own and granted.cpus == had.cpus:
            warnings = [w for w in warnings if w.code not in inherited.EXPLAINED]
        # One rank on the only GPU has all of its CPUs: those who share the GPU share these.
        if had is not None and not is_own and (had.local_size, visible) != (1, 1):
            warnings.insert(
                0, inherited.share_inherited(had, self.rank, self.ranks.local_size)
            )  # the cause of what follows
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
        own = allocation.observe_own_gpus(
            self.ranks, visible=len(topology.visible), is_rank=had is not None
        )
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

    def _leave(self, caller: CpuSet, before: Before, granted: EffectiveMasks) -> list[Notice]:
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


# Why nobody is pinned here, before anything is looked at.


_OFF = Notice("off", "GPUAFF=off: the mask stays")

_OTHER_MACHINE = Notice(
    "other-machine",
    "GPUAFF_FSROOT describes another machine, by which this process cannot be pinned: unset it",
)

_NOT_LINUX = Notice(
    "not-linux", "this system has no sched_setaffinity (Linux has): the CPUs stay as they are"
)


def reason() -> Notice | None:
    """What is to be said; None where a process can be pinned.

    Raises:
        InvalidOptionError: the variable GPUAFF is neither a yes nor a no.
    """
    if pinning_is_off():
        return _OFF
    if not kernel.can_pin():
        return _NOT_LINUX
    return None if kernel.machine_tree().is_live else _OTHER_MACHINE
