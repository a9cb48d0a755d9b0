"""Which plan a rank can make, by what it knows of the other ranks' masks and GPUs. Pure.

Ranks do not talk to each other. Each makes the plan for all of them where all have the same
inputs. Where they have not, it plans for itself alone, stays in its own mask and warns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from gpuaff.allocator.model import Options, Partition, Plan
from gpuaff.allocator.plan import plan_with
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.errors import GPUAffinityError
from gpuaff.launch.binding import Masks, OwnGpus
from gpuaff.launch.inherited import Pinned
from gpuaff.launch.ranks import Ranks
from gpuaff.notices import Notice
from gpuaff.topology.model import Gpu, Topology
from gpuaff.topology.sysfs import address_key


def plan_for_rank(
    topology: Topology,
    options: Options,
    ranks: Ranks,
    masks: Masks,
    gpus: OwnGpus | None = None,
    all_gpus: Sequence[Gpu] = (),
) -> Plan:
    """A plan that holds this rank's share.

    ``topology`` is the machine as this rank sees it. ``gpus`` are this rank's own, None where all
    ranks see the same ones; with them ``all_gpus`` has every GPU of the machine, by sysfs.
    """
    if not topology.visible:
        return plan_with(topology, options)  # nothing is divided, so no other mask matters
    rank = _Rank(topology, options, ranks, gpus)
    sets = options.rank_allowed or masks.named
    if sets is not None:
        return rank.with_named_masks(sets)
    if options.partition is Partition.MACHINE and (masks.unknown or gpus):
        plan = rank.inside_domain()
        if plan.partition is Partition.MACHINE:
            return plan
    if not masks.unknown:
        return rank.for_all() if gpus is None else rank.by_own_gpu(gpus, all_gpus)
    why = f"the CPUs that the other ranks may use are unknown ({masks.unknown})"
    remedy = f"start the ranks unbound ({masks.unbound}), or give rank_allowed="
    return _uncut(rank.alone(), "masks-unknown", why, remedy)


def plan_inside_share(
    topology: Topology, options: Options, ranks: Ranks, gpus: OwnGpus | None, share: Pinned
) -> Plan:
    """The plan for a rank that was started with its share, which is what it is allowed."""
    cpus = options.cpus and (options.cpus & topology.allowed or options.cpus)
    reserve = 0 if share.reserved else options.reserve
    inside = options._replace(partition=Partition.JOB, cpus=cpus, reserve=reserve)
    plan = _Rank(topology, inside, ranks, gpus).alone()
    if not share.reserved:
        return plan
    return replace(plan, shares=(replace(plan.shares[0], reserved=share.reserved),))


class _Rank(NamedTuple):
    """What a rank plans from."""

    topology: Topology
    options: Options
    ranks: Ranks
    gpus: OwnGpus | None

    def for_all(self) -> Plan:
        """The plan for all ranks."""
        plan, size = plan_with(self.topology, self.options), self.ranks.local_size
        visible = self.topology.visible
        if len(visible) == 1 < min(size, len(self.topology.gpus)):  # the driver knows other GPUs
            text = (
                f"{size} ranks see one GPU and share its cores; if a wrapper gave each rank a GPU "
                "of its own through CUDA_VISIBLE_DEVICES, the shares are too small and may "
                "overlap: show all of the job's GPUs to every rank"
            )
            return _warned(plan, Notice("one-gpu", text))
        if size in (1, len(visible)):
            return plan
        effect = f"ranks that are {len(visible)} apart are on one GPU and divide its share again"
        if size < len(visible):
            effect = f"no rank is on GPU {format_cpulist(frozenset(visible[size:]))}"
        text = (
            f"{size} ranks are on this node and {len(visible)} GPUs visible to them: {effect}; if "
            "that is not intended, start as many ranks per node as it has GPUs, or check "
            "CUDA_VISIBLE_DEVICES"
        )
        return _warned(plan, Notice("ranks-gpus", text))

    def alone(self) -> Plan:
        """The plan for this rank as if there were no other, near its GPU and inside its mask."""
        number, visible = self.ranks.local_rank, self.topology.visible
        gpu = visible[number % len(visible) if self.gpus is None else 0]
        mine = self.options._replace(nproc=1, rank_allowed=None)
        plan = plan_with(replace(self.topology, visible=(gpu,)), mine, numbers=(number,))
        return _share_at(plan, 0, number, gpu=gpu)

    def with_named_masks(self, sets: Sequence[CpuSet]) -> Plan:
        """The plan where the mask of each rank is known."""
        rank, topology = self.ranks.local_rank, self.topology
        own = sets[rank] & topology.allowed
        if not own:
            raise GPUAffinityError(
                f"rank_allowed gives rank {rank} the CPUs {format_cpulist(sets[rank])}, but it may "
                f"use {format_cpulist(topology.allowed) or 'none'} only (set by its launcher, "
                "taskset or a cpuset): name CPUs that it may use"
            )
        if self.gpus is None:
            cut = (*sets[:rank], own, *sets[rank + 1 :])  # as the kernel would cut it
            options = self.options._replace(rank_allowed=cut)
            everywhere = topology.with_allowed(frozenset().union(*cut))
            plan = self._replace(topology=everywhere, options=options).for_all()
        else:
            # Only the rank itself knows which GPU it has, so it cannot plan for the others.
            plan = self._replace(topology=topology.with_allowed(own)).alone()
            if not all(own.isdisjoint(cpus) for place, cpus in enumerate(sets) if place != rank):
                plan = self._gpus_unknown(plan, self.gpus)
        beyond = sets[rank] & topology.cpus - own
        if self.options.rank_allowed is None or not beyond:
            return plan
        text = (
            f"rank_allowed also names the CPUs {format_cpulist(beyond)}, which this rank may not "
            f"use: it stays inside {format_cpulist(own)}"
        )
        return _warned(plan, Notice("mask-cut", text, rank=rank))

    def by_own_gpu(self, gpus: OwnGpus, all_gpus: Sequence[Gpu]) -> Plan:
        """The part of its own GPU, divided among all GPUs of the job: the same in every rank."""
        found = _gpus_of_job(self.topology, gpus, all_gpus)
        if found is None:
            return self._gpus_unknown(self.alone(), gpus)
        machine, place = found
        ranks, count = self.ranks, len(machine.visible)
        plan = plan_with(machine, self.options._replace(nproc=count))
        plan = _share_at(plan, place, ranks.local_rank, gpu=self.topology.visible[0])
        if not gpus.shared and ranks.local_size <= count:
            return plan
        why = (
            f"{ranks.local_size} ranks have {count} GPUs, and it is unknown which of them are on "
            "the same GPU and share its CPUs"
        )
        return _uncut(plan, "gpus-unknown", why, "show every rank all GPUs (srun --gpus-per-node)")

    def inside_domain(self) -> Plan:
        """The plan for the ranks on this rank's GPU, inside the GPU's domain."""
        # Where each rank sees GPUs of its own, the other ranks on them are unknown: one rank a GPU
        # is assumed, unless there are more ranks than GPUs, or the launcher may have put several
        # on one. A GPU that this rank has claimed has no other rank.
        number, size = self.ranks.local_rank, self.ranks.local_size
        gpus, visible = self.gpus, self.topology.visible
        if gpus is not None and gpus.claimed:
            return self.alone()
        count = len(visible) if gpus is None else gpus.on_node or len(gpus.named or ())
        if gpus is not None and (gpus.shared or size > count):
            return self._replace(options=self.options._replace(partition=Partition.JOB)).alone()
        turn, place = divmod(number, count)
        gpu, numbers = visible[place if gpus is None else 0], range(place, size, count)
        there = self.options._replace(nproc=len(numbers))
        plan = plan_with(replace(self.topology, visible=(gpu,)), there, numbers=numbers)
        return _share_at(plan, turn, number, gpu=gpu)

    def _gpus_unknown(self, plan: Plan, gpus: OwnGpus) -> Plan:
        why = "each rank has GPUs of its own, and those of the other ranks are unknown"
        remedy = (
            "show every rank all GPUs of the job (srun --gpus-per-node instead of "
            "--gpus-per-task), or let srun bind the ranks to CPUs"
        )
        if gpus.claimed:
            why = "each rank claimed its own GPU, so the ranks cannot divide the cores"
            command = f"gpuaff run -n {self.ranks.local_size} -- torchrun ..."
            remedy = f"claim once, around the launcher: {command}"
        return _uncut(plan, "gpus-unknown", why, remedy)


def _gpus_of_job(
    topology: Topology, gpus: OwnGpus, all_gpus: Sequence[Gpu]
) -> tuple[Topology, int] | None:
    """The machine with all of the job's GPUs visible, and the place of this rank's among them."""
    # What ranks that see different GPUs have in common are the machine's GPUs by PCI address, and
    # the scheduler's list of those that the job has. None when that is missing, or does not fit.
    machine = _in_pci_order(topology, all_gpus)
    if len(machine) < len(topology.gpus):
        return None  # a lost GPU that sysfs has lost too: the others' numbers do not count it
    named = gpus.named
    if named is None and gpus.on_node == len(machine):
        named = tuple(range(len(machine)))
    address = topology.gpu_by_index[topology.visible[0]].pci_bus_id
    own = next((gpu.index for gpu in machine if gpu.pci_bus_id == address), None)
    if named is None or own not in named or named[-1] >= len(machine):
        return None
    if gpus.own is not None and own not in gpus.own:
        return None  # the scheduler counts otherwise, e.g. without a display card
    return replace(topology, gpus=machine, visible=named), named.index(own)


def _in_pci_order(topology: Topology, all_gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    # A device cgroup may hide the others' GPUs from the driver, in each rank other ones: then all
    # are taken as sysfs describes them, so that every rank has the same description.
    shown = {gpu.pci_bus_id: gpu for gpu in topology.gpus if gpu.pci_bus_id}
    bus = {gpu.pci_bus_id: gpu for gpu in all_gpus if gpu.pci_bus_id}
    known = shown if bus.keys() <= shown.keys() else bus
    ordered = sorted(known, key=address_key)
    return tuple(replace(known[address], index=i) for i, address in enumerate(ordered))


def _share_at(plan: Plan, place: int, rank: int, *, gpu: int) -> Plan:
    """One share of a plan that was made for other numbers than ranks, as this rank's."""
    found = [notice for notice in plan.warnings if notice.rank in (None, place)]
    warnings = (one if one.rank is None else replace(one, rank=rank) for one in found)
    share = replace(plan.share_of(place), rank=rank, gpu=gpu)
    return replace(plan, shares=(share,), warnings=tuple(warnings))


def _warned(plan: Plan, notice: Notice) -> Plan:
    return replace(plan, warnings=(*plan.warnings, notice))


def _uncut(plan: Plan, code: str, why: str, remedy: str) -> Plan:
    """The plan with a warning: what it gives this rank, others may get too."""
    share = plan.shares[0]
    kept = f"this rank keeps all that it may use near GPU {share.gpu}, {format_cpulist(share.cpus)}"
    return _warned(plan, Notice(code, f"{why}, so {kept}; {remedy}", rank=share.rank))
