"""The domain of a GPU: its part of the machine, by one rule on which all jobs agree.

``docs/concepts.md`` has the rule. Jobs that know nothing of each other must find the same domains,
so it reads only what sysfs shows to every process: the online CPUs, their cores, packages and NUMA
nodes, which cores are slow, and the accelerators. Every online CPU is in exactly one domain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from gpuaff.allocator.cores import allowed_cores, grow, in_blocks
from gpuaff.allocator.placement import nearest, union
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.errors import GPUAffinityError
from gpuaff.notices import Notice
from gpuaff.topology.model import NumaNode, Topology

DOMAIN_RULE = 1
"""The version of the rule; it grows whenever any machine's domains change."""

_NONE: CpuSet = frozenset()


def gpu_domains(topology: Topology) -> Mapping[int, CpuSet]:
    """The CPUs of each GPU's domain, by the GPU's physical index.

    It is empty where there are more accelerators than cores; a GPU that sysfs does not show has
    no entry. In pasted and shipped descriptions (accelerators None) the GPUs count as such; the
    live machine must have been observed with accelerators, or jobs would go by their drivers.
    """
    if topology.accelerators is None:  # the order of indices is the order of PCI addresses
        gpus = sorted(topology.gpu_by_index.items())
        beside = [(gpu.local_cpus or gpu.node_cpus, gpu.numa_node) for _, gpu in gpus]
        indices: list[int | None] = [index for index, _ in gpus]
    else:
        beside = [(device.local_cpus, device.numa_node) for device in topology.accelerators]
        index_at = {gpu.pci_bus_id: gpu.index for gpu in topology.gpus if gpu.pci_bus_id}
        indices = [index_at.get(device.pci_bus_id) for device in topology.accelerators]
    local = [_local_cpus(topology, cpus, node) for cpus, node in beside]
    pairs = zip(indices, _share_machine(topology, local), strict=True)
    return {index: cpus for index, cpus in pairs if index is not None}


def _local_cpus(topology: Topology, beside: CpuSet | None, node: int | None) -> CpuSet:
    """Step 1 of the rule."""
    online, nodes = topology.cpus, topology.numa_nodes or ()
    own = next((each for each in nodes if each.id == node), NumaNode(id=-1, cpus=_NONE))
    distances = zip(own.distances or (), (each.cpus & online for each in nodes), strict=False)
    return (beside or _NONE) & online or own.cpus & online or nearest(distances) or online


def _share_machine(topology: Topology, local: Sequence[CpuSet]) -> list[CpuSet]:
    """The domain of each accelerator, by its local CPUs: steps 2 to 4 of the rule."""
    cores = allowed_cores(topology._replace(efficiency_cpus=_NONE), topology.cpus)
    places = [frozenset(cores.places(cpus)) for cpus in local]
    claims: list[set[int]] = [set() for _ in local]
    nearest_to = _nearest_to(topology, local)
    for place in frozenset(cores.core_of).difference(*places):
        for claimant in nearest_to(min(cores.cpus[place])):
            claims[claimant].add(place)
    slow = frozenset(cores.places(topology.efficiency_cpus & topology.cpus))
    shares: Sequence[frozenset[int]] = [_NONE for _ in local]
    # Local cores come first: else a GPU could get far cores only, and its neighbour the whole node.
    for kind in (frozenset(cores.core_of) - slow, slow):
        for wanted in (places, claims):
            shares = grow(shares, [kind.intersection(claim) for claim in wanted], in_blocks)
    return [_NONE.union(*(cores.cpus[place] for place in share)) for share in shares]


def _nearest_to(topology: Topology, local: Sequence[CpuSet]) -> Callable[[int], Iterable[int]]:
    """For a CPU that is local to no accelerator, the numbers of the nearest accelerators."""
    nodes = topology.numa_nodes or ()
    at_nodes = [_touching(node.cpus, local) for node in nodes]
    parts = [
        (node.cpus, nearest(zip(node.distances or (), at_nodes, strict=False))) for node in nodes
    ]
    parts += [(pack.cpus, _touching(pack.cpus, local)) for pack in topology.packages or ()]
    everyone = range(len(local))
    return lambda cpu: next((found for cpus, found in parts if found and cpu in cpus), everyone)


def _touching(part: CpuSet, local: Iterable[CpuSet]) -> frozenset[int]:
    return frozenset(number for number, cpus in enumerate(local) if not cpus.isdisjoint(part))


def confine(
    topology: Topology,
    gpus: Sequence[int],
    allowed: Sequence[CpuSet],
    granted: Sequence[CpuSet],
) -> tuple[Sequence[CpuSet], int | None, list[Notice]]:
    """What each rank may use inside the domain of its GPU, the rule's version, and warnings.

    All ranks or none (version None): inside a part of a domain that another program has chosen,
    jobs can't tell which of them keep to it. ``allowed`` is what was granted, or less (``cpus=``).
    """
    found = gpu_domains(topology)
    reasons = (unusable_reason(found, *pair) for pair in zip(gpus, granted, strict=True))
    if why := next(filter(None, reasons), None):
        text = (
            f'partition="machine" has no effect: {why}; the CPUs {format_cpulist(union(granted))} '
            "are cut among the ranks of this job only, and another job may get the same ones"
        )
        return allowed, None, [Notice("border-unused", text)]
    inside = [mask & found[gpu] for gpu, mask in zip(gpus, allowed, strict=True)]
    for rank, gpu in enumerate(gpus):
        if not inside[rank]:
            raise GPUAffinityError(
                f'partition="machine" keeps rank {rank} in the domain of GPU {gpu}, CPUs '
                f"{format_cpulist(found[gpu])}, but cpus= names only "
                f"{format_cpulist(allowed[rank])}; add CPUs of the domain, leave cpus= out, or use "
                'partition="job"'
            )
    return inside, DOMAIN_RULE, mig_warnings(topology, gpus)


def mig_warnings(topology: Topology, gpus: Iterable[int]) -> list[Notice]:
    """MIG instances of a GPU have one domain: jobs on other instances have the same."""
    cut = next((gpu for gpu in gpus if topology.gpu_by_index[gpu].mig), None)
    if cut is None:
        return []
    text = (
        f"GPU {cut} has MIG instances, which share its domain: a job on another instance gets the "
        "same CPUs; give each job CPUs of its own (cpus=)"
    )
    return [Notice("border-shared", text)]


def unusable_reason(found: Mapping[int, CpuSet], gpu: int, granted: CpuSet) -> str | None:
    """Why a process with this mask can't stay inside the domain of a GPU; None when it can."""
    if gpu not in found:
        return f"GPU {gpu} is missing from sysfs, so its domain is unknown"
    if not found[gpu]:
        return f"GPU {gpu} has no domain, as there are more accelerators than cores near them"
    if denied := found[gpu] - granted:
        return (
            f"of the domain of GPU {gpu}, CPUs {format_cpulist(found[gpu])}, the CPUs "
            f"{format_cpulist(denied)} are not allowed here"
        )
    return None
