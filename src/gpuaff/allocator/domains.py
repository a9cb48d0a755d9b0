"""The border of a GPU: its part of the machine, by one rule on which strangers agree.

With ``partition="machine"`` a rank stays inside the border of its GPU. Jobs that know nothing of
each other must find the same borders, so the rule reads nothing but what sysfs tells everybody:
the online CPUs, their cores, packages and NUMA nodes, which cores are slow, and the accelerators.
No mask, no visible devices, no driver, no option and no variable plays a part.

The rule, version 1:

1. The *home* of an accelerator are the online CPUs next to its PCI device; else those of its NUMA
   node; else those of the nodes nearest to that; else all.
2. Cores in a home are shared among the accelerators at home there.
3. Cores in nobody's home are shared among the accelerators whose home is nearest: by the distance
   from the core's NUMA node, or where that is not known, on the core's package; else all of them.
4. Shares are max-min fair, and count what an accelerator has already; fast cores are shared before
   slow ones. Cores that the same accelerators may have are cut into consecutive blocks, cores by
   their lowest CPU and accelerators by their PCI address; the lower address gets the odd core.

Every online CPU is in exactly one border.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from gpuaff.allocator.fair import fair_shares
from gpuaff.allocator.placement import Seat, union
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.errors import GPUAffinityError
from gpuaff.notices import Notice
from gpuaff.topology.model import Topology

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    Beside: TypeAlias = tuple[CpuSet | None, int | None]  # a device's CPUs and node, if told
    Claims: TypeAlias = Sequence[frozenset[int]]

BORDER_RULE = 1
"""The version of the rule; it grows whenever any machine's borders change."""

_NONE: CpuSet = frozenset()


def borders(topology: Topology) -> Mapping[int, CpuSet]:
    """The CPUs of each GPU's border, by the GPU's physical index.

    A border is empty where more accelerators share a home than it has cores, and none are left
    for it elsewhere. A GPU that is not among ``topology.accelerators`` (sysfs does not show it)
    has no entry. Where the source does not tell the accelerators (None: pasted and shipped
    descriptions) the described GPUs count as such; the live machine must have been observed
    with them, or strangers would go by what each one's driver shows it.
    """
    if topology.accelerators is None:
        homes = _homes(topology, _described(topology))
        indices: Iterable[int | None] = sorted(topology.gpu_by_index)
    else:
        beside = ((device.local_cpus, device.numa_node) for device in topology.accelerators)
        homes = _homes(topology, beside)
        index_at = {gpu.pci_bus_id: gpu.index for gpu in topology.gpus if gpu.pci_bus_id}
        indices = (index_at.get(device.pci_bus_id) for device in topology.accelerators)
    pairs = zip(indices, _cut(topology, homes), strict=True)
    return {index: cpus for index, cpus in pairs if index is not None}


def _described(topology: Topology) -> list[Beside]:
    """What is told of the GPUs, by their indices: those are in the order of PCI addresses."""
    gpus = sorted(topology.gpu_by_index.items())
    return [(gpu.local_cpus or gpu.node_cpus, gpu.numa_node) for _, gpu in gpus]


def _homes(topology: Topology, told: Iterable[Beside]) -> list[CpuSet]:
    node_cpus: dict[int | None, CpuSet] = {
        node.id: node.cpus & topology.cpus for node in topology.numa_nodes or ()
    }
    return [
        (near or _NONE) & topology.cpus
        or node_cpus.get(node)
        or _nearest(topology, node)
        or topology.cpus
        for near, node in told
    ]


def _nearest(topology: Topology, number: int | None) -> CpuSet:
    """The CPUs of the nodes nearest to a node without CPUs; all of those equally near."""
    nodes = topology.numa_nodes or ()
    reach: dict[int, list[CpuSet]] = {}
    for origin in (node for node in nodes if node.id == number):
        for node, distance in zip(nodes, origin.distances or (), strict=False):
            if online := node.cpus & topology.cpus:
                reach.setdefault(distance, []).append(online)
    return _NONE.union(*reach[min(reach)]) if reach else _NONE


def _cut(topology: Topology, homes: Sequence[CpuSet]) -> list[CpuSet]:
    """The borders, by home."""
    if not homes:
        return []
    cores = _cores(topology)
    at_home = _places(cores, homes)
    free = frozenset(range(len(cores))).difference(*at_home)
    wanted = _claims(free, len(homes), _Neighbours(topology, homes).of, cores)
    (slow,) = _places(cores, [topology.efficiency_cpus])
    shares: Claims = [_NONE] * len(homes)
    for kind in (frozenset(range(len(cores))) - slow, slow):
        for claims in (at_home, wanted):
            # What one has already nobody else wants now: it keeps that, and it counts.
            more = [have | (claim & kind) for have, claim in zip(shares, claims, strict=True)]
            shares = shares if more == shares else _shared(more)
    return [_NONE.union(*(cores[place] for place in share)) for share in shares]


def _shared(claims: Claims) -> Claims:
    return [frozenset(share) for share in fair_shares(claims, contiguous=True)]


def _cores(topology: Topology) -> list[CpuSet]:
    """The online cores by their lowest CPU; a CPU that is in none counts as one."""
    known = [core & topology.cpus for core in topology.cores or ()]
    rest = topology.cpus.difference(*known)
    return sorted([*filter(None, known), *(frozenset((cpu,)) for cpu in rest)], key=min)


def _places(cores: Sequence[CpuSet], sets: Iterable[CpuSet]) -> list[frozenset[int]]:
    """For each set of CPUs the places of the cores that hold any of them."""
    place_of = {cpu: place for place, core in enumerate(cores) for cpu in core}
    return [frozenset(place_of[cpu] for cpu in cpus if cpu in place_of) for cpus in sets]


def _claims(
    free: Iterable[int],
    claimants: int,
    nearest_to: Callable[[int], frozenset[int]],
    cores: Sequence[CpuSet],
) -> Claims:
    """The cores in nobody's home that each claimant may have."""
    claims: list[set[int]] = [set() for _ in range(claimants)]
    for place in free:
        for claimant in nearest_to(min(cores[place])):
            claims[claimant].add(place)
    return [frozenset(claim) for claim in claims]


class _Neighbours:
    """Which homes are nearest to a CPU that is in none."""

    def __init__(self, topology: Topology, homes: Sequence[CpuSet]) -> None:
        self._all = frozenset(range(len(homes)))
        nodes = topology.numa_nodes or ()
        self._node_of, at_nodes = _touching([node.cpus for node in nodes], homes)
        self._of_node = [_closest(node.distances or (), at_nodes) for node in nodes]
        packages = [package.cpus for package in topology.packages or ()]
        self._package_of, self._of_package = _touching(packages, homes)

    def of(self, cpu: int) -> frozenset[int]:
        """The homes' numbers."""
        near = self._of_node[self._node_of[cpu]] if cpu in self._node_of else _NONE
        if not near and cpu in self._package_of:
            near = self._of_package[self._package_of[cpu]]
        return near or self._all


def _touching(
    parts: Sequence[CpuSet], homes: Sequence[CpuSet]
) -> tuple[Mapping[int, int], list[frozenset[int]]]:
    """The part that each CPU is in, and for each part the numbers of the homes that reach in."""
    part_of = {cpu: at for at, part in enumerate(parts) for cpu in part}
    reached = [{part_of[cpu] for cpu in home if cpu in part_of} for home in homes]
    return part_of, [
        frozenset(number for number, some in enumerate(reached) if at in some)
        for at in range(len(parts))
    ]


def _closest(distances: Sequence[int], at_nodes: Sequence[frozenset[int]]) -> frozenset[int]:
    """The homes on the nearest nodes that have any; none where distances are unknown."""
    reach: dict[int, frozenset[int]] = {}
    for distance, homes in zip(distances, at_nodes, strict=False):
        if homes:
            reach[distance] = reach.get(distance, _NONE) | homes
    return reach[min(reach)] if reach else _NONE


# ``partition="machine"``: each rank stays inside the border of its GPU, where that can be had.


def confined(
    topology: Topology, seats: Sequence[Seat], granted: Sequence[CpuSet]
) -> tuple[tuple[Seat, ...], int | None, list[Notice]]:
    """The same seats, each inside the border of its GPU; for all of them or for none.

    A border counts only where a rank was granted the whole of it: in a part of it that somebody
    else has chosen, strangers can't tell who keeps to it.

    Args:
        topology: the machine.
        seats: where each rank sits; what it may use is what it was granted, or less (``cpus=``).
        granted: what each rank was granted, by rank.

    Returns:
        The seats, the version of the rule that their borders are from (None where they are as
        they were), and what to say then.

    Raises:
        GPUAffinityError: ``cpus=`` leaves a rank nothing of its GPU's border.
    """
    found = borders(topology)
    for seat in seats:
        why = lacking(found, seat.gpu, granted[seat.rank])
        if why is not None:
            return tuple(seats), None, [_border_unused(why, granted)]
    inside = tuple(replace(seat, allowed=seat.allowed & found[seat.gpu]) for seat in seats)
    for seat, whole in zip(inside, seats, strict=True):
        if not seat.allowed:
            raise GPUAffinityError(
                f'partition="machine" puts rank {seat.rank} inside the border of GPU {seat.gpu}, '
                f"CPUs {format_cpulist(found[seat.gpu])}, but cpus= names only "
                f"{format_cpulist(whole.allowed)}; name some of it, leave cpus= out, or ask for "
                'partition="job"'
            )
    return inside, BORDER_RULE, shared_borders(topology, (seat.gpu for seat in seats))


def shared_borders(topology: Topology, gpus: Iterable[int]) -> list[Notice]:
    """MIG instances of a GPU sit where it sits: whoever has another one has the same border."""
    cut = next((gpu for gpu in gpus if topology.gpu_by_index[gpu].mig), None)
    if cut is None:
        return []
    text = (
        f"GPU {cut} has MIG instances, which share its border: a job on another instance gets the "
        "same CPUs; give each job CPUs of its own (cpus=)"
    )
    return [Notice("border-shared", text)]


def lacking(found: Mapping[int, CpuSet], gpu: int, granted: CpuSet) -> str | None:
    """Why nobody can stay inside the border of a GPU, in words; None when one can.

    Args:
        found: the borders, by GPU.
        gpu: the GPU's index.
        granted: what may be used.
    """
    if gpu not in found:
        return f"GPU {gpu} is not among the accelerators that sysfs shows"
    if not found[gpu]:
        return f"GPU {gpu} has none: there are more accelerators than cores near them"
    if denied := found[gpu] - granted:
        return (
            f"the one of GPU {gpu}, CPUs {format_cpulist(found[gpu])}, is not allowed whole here "
            f"(not {format_cpulist(denied)})"
        )
    return None


def _border_unused(why: str, granted: Sequence[CpuSet]) -> Notice:
    allowed = format_cpulist(union(granted))
    return Notice(
        "border-unused",
        f'partition="machine" cuts by the borders of GPUs, but {why}: the CPUs {allowed} are cut '
        "among the ranks of this job, which may meet another job there",
    )
