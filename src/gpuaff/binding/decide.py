"""Which plan a rank can make, by what is known of the others' masks and GPUs. Pure.

Ranks don't talk to each other. Each makes the plan for all of them where all have the same
inputs. Where they have not, it plans for itself alone, stays in its own mask and says so.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpuaff.allocator.modes import Partition
from gpuaff.allocator.options import Options
from gpuaff.allocator.plan import Plan, Share
from gpuaff.allocator.planner import plan_with
from gpuaff.binding import own_gpu
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.errors import GPUAffinityError
from gpuaff.launch.gpus import OwnGpus
from gpuaff.launch.masks import Masks, Whose
from gpuaff.launch.pinned import Pinned
from gpuaff.launch.ranks import Ranks
from gpuaff.notices import Notice
from gpuaff.records import replace
from gpuaff.topology.model import Gpu, Topology


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
        return _with(plan, own_gpu.one_for_all(ranks))
    if 1 < ranks.local_size != len(topology.visible):
        return _with(plan, own_gpu.not_one_each(ranks, topology.visible))
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
            plan = _with(plan, own_gpu.not_told(plan.shares[0], gpus))
    beyond = options.rank_allowed is not None and sets[rank] & topology.cpus - own
    return _with(plan, _cut(rank, own, beyond)) if beyond else plan


def _by_own_gpu(
    topology: Topology,
    options: Options,
    ranks: Ranks,
    gpus: OwnGpus,
    on_the_bus: Sequence[Gpu],
) -> Plan:
    """The part of its own GPU, cut for all GPUs of the job: the same cut in every rank."""
    found = own_gpu.among_those_of_the_job(topology, gpus, on_the_bus)
    if found is None:
        plan = _alone(topology, options, ranks, gpus)
        return _with(plan, own_gpu.not_told(plan.shares[0], gpus))
    machine, place = found
    plan = plan_with(machine, replace(options, nproc=len(machine.visible)))
    plan = _only(plan, place, ranks.local_rank, gpu=topology.visible[0])
    if gpus.shared or ranks.local_size > len(machine.visible):
        return _with(plan, own_gpu.shared(plan.shares[0], ranks, len(machine.visible)))
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


def _cut(rank: int, own: CpuSet, beyond: CpuSet) -> Notice:
    return Notice(
        "mask-cut",
        f"rank_allowed also names the CPUs {format_cpulist(beyond)}, which this rank may not use: "
        f"it stays inside {format_cpulist(own)}",
        rank=rank,
    )
