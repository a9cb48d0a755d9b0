"""Machines described in a few numbers, for the tests of the planner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from gpuaff.allocator.model import Plan
from gpuaff.cpuset import CpuSet, format_cpulist, parse_cpulist
from gpuaff.topology.model import Accelerator, Gpu, NumaNode, Package, Source, Topology


def cpus(text: str) -> CpuSet:
    return parse_cpulist(text)


def shown(plan: Plan) -> list[str]:
    """Every rank's CPUs as a cpulist, by rank."""
    return [format_cpulist(share.cpus) for share in plan.shares]


def codes(plan: Plan) -> list[str]:
    return [warning.code for warning in plan.warnings]


def spread_cores(count: int, smt: int = 2) -> tuple[CpuSet, ...]:
    """Cores whose siblings are i, i + count, … as on most x86 servers."""
    return tuple(frozenset(range(core, count * smt, count)) for core in range(count))


def packed_cores(count: int, smt: int = 2) -> tuple[CpuSet, ...]:
    """Cores whose siblings are neighbours, as on POWER and in many VMs."""
    return tuple(frozenset(range(core * smt, (core + 1) * smt)) for core in range(count))


def box(
    cores: Sequence[CpuSet],
    *,
    nodes: Sequence[Iterable[int]],
    sockets: Sequence[Iterable[int]],
    gpus: Sequence[int],
    visible: Sequence[int] | None = None,
    allowed: str | None = None,
) -> Topology:
    """A machine whose driver tells everything: the cores of each node, by their positions, the
    nodes of each socket, and the node next to each GPU."""
    node_cpus = [union(cores[core] for core in node) for node in nodes]
    socket_of = {node: place for place, socket in enumerate(sockets) for node in socket}
    socket_cpus = [union(node_cpus[node] for node in socket) for socket in sockets]
    online = union(cores)
    return Topology(
        cpus=online,
        allowed=online if allowed is None else cpus(allowed),
        cores=tuple(sorted(cores, key=min)),
        packages=tuple(Package(id=place, cpus=held) for place, held in enumerate(socket_cpus)),
        numa_nodes=tuple(
            NumaNode(id=node, cpus=held, distances=_distances(node, len(node_cpus), socket_of))
            for node, held in enumerate(node_cpus)
        ),
        gpus=tuple(
            Gpu(
                index=index,
                node_cpus=node_cpus[node],
                socket_cpus=socket_cpus[socket_of[node]],
                numa_node=node,
                source=Source.NVML,
            )
            for index, node in enumerate(gpus)
        ),
        visible=tuple(range(len(gpus)) if visible is None else visible),
    )


def dgx_a100(*, visible: Sequence[int] | None = None, allowed: str | None = None) -> Topology:
    """A DGX A100: cores (i, i + 128), nodes of 16 cores, four nodes a socket; the GPUs are in
    pairs next to the nodes 3, 1, 7 and 5."""
    return box(
        spread_cores(128),
        nodes=[range(16 * node, 16 * node + 16) for node in range(8)],
        sockets=[range(4), range(4, 8)],
        gpus=[3, 3, 1, 1, 7, 7, 5, 5],
        visible=visible,
        allowed=allowed,
    )


def one_node(
    cores: Sequence[CpuSet],
    gpus: int,
    *,
    visible: Sequence[int] | None = None,
    allowed: str | None = None,
) -> Topology:
    """A machine with one node, one socket and some GPUs."""
    return box(
        cores,
        nodes=[range(len(cores))],
        sockets=[[0]],
        gpus=[0] * gpus,
        visible=visible,
        allowed=allowed,
    )


def bare(text: str, *gpus: Gpu, allowed: str | None = None) -> Topology:
    """A machine of which only the CPUs are known; one CPU a core."""
    online = cpus(text)
    return Topology(
        cpus=online,
        allowed=online if allowed is None else cpus(allowed),
        cores=tuple(frozenset((cpu,)) for cpu in sorted(online)),
        gpus=gpus,
        visible=tuple(gpu.index for gpu in gpus),
    )


def on_the_bus(machine: Topology) -> Topology:
    """The machine with each GPU as a PCI device, on bus 1, 2, …"""
    places = [f"0000:{number + 1:02x}:00.0" for number in range(len(machine.gpus))]
    pairs = list(zip(machine.gpus, places, strict=True))
    return replace(
        machine,
        gpus=tuple(replace(gpu, pci_bus_id=place) for gpu, place in pairs),
        accelerators=tuple(
            Accelerator(
                pci_bus_id=place,
                vendor="10de",
                local_cpus=gpu.node_cpus,
                numa_node=gpu.numa_node,
            )
            for gpu, place in pairs
        ),
    )


def union(sets: Iterable[CpuSet]) -> CpuSet:
    return frozenset().union(*sets)


def _distances(node: int, nodes: int, socket_of: dict[int, int]) -> tuple[int, ...]:
    return tuple(
        10 if node == other else 12 if socket_of[node] == socket_of[other] else 32
        for other in range(nodes)
    )
