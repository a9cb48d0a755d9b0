"""A rank that sees GPUs of its own only: which GPUs the CPUs are cut for. Pure.

All ranks must cut alike though each sees another GPU. What they have in common are the machine's
GPUs by PCI address, and the scheduler's list of those that the job has.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpuaff.allocator.plan import Share
from gpuaff.cpuset import format_cpulist
from gpuaff.launch.gpus import OwnGpus
from gpuaff.launch.ranks import Ranks
from gpuaff.notices import Notice
from gpuaff.records import replace
from gpuaff.topology.model import Gpu, Topology
from gpuaff.topology.pci import address_key


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
