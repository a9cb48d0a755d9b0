"""Machines whose numbering or shape is special, written by hand from public facts.

Each is described as sysfs shows it: with the PCI devices of its GPUs. UUIDs and the like play no
part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from gpuaff.cpuset import CpuSet
from gpuaff.topology.model import Accelerator, NumaNode, Topology
from tests.allocator.described import (
    box,
    cpus,
    dgx_a100,
    one_node,
    packed_cores,
    spread_cores,
    union,
)


def on_the_bus(
    machine: Topology, addresses: Sequence[str] | None = None, *, vendor: str = "10de"
) -> Topology:
    """The machine with each GPU as a PCI device, at these addresses or on bus 1, 2, …"""
    places = addresses or [f"0000:{number + 1:02x}:00.0" for number in range(len(machine.gpus))]
    gpus = [replace(gpu, pci_bus_id=place) for gpu, place in zip(machine.gpus, places, strict=True)]
    devices = [
        Accelerator(
            pci_bus_id=place,
            vendor=vendor,
            local_cpus=gpu.node_cpus,
            numa_node=gpu.numa_node,
        )
        for gpu, place in zip(machine.gpus, places, strict=True)
    ]
    return replace(machine, gpus=tuple(gpus), accelerators=tuple(devices))


def runs(*sizes: int) -> list[range]:
    """Neighbours in groups of these sizes: 3, 2 makes 0-2, 3-4."""
    starts = [sum(sizes[:at]) for at in range(len(sizes))]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def frontier(allowed: str | None = None) -> Topology:
    """A Frontier or LUMI-G node: 64 cores (i, i + 64), four nodes, eight L3 of 8 cores.

    The eight GCDs of the MI250X are in pairs next to the nodes 3, 1, 0 and 2 (rocm-smi
    --showtoponuma), at the addresses c1, c6, c9, ….
    """
    cores = spread_cores(64)
    machine = box(
        cores,
        nodes=runs(16, 16, 16, 16),
        sockets=[range(4)],
        gpus=[3, 3, 1, 1, 0, 0, 2, 2],
        allowed=allowed,
    )
    l3 = tuple(union(cores[core] for core in run) for run in runs(*[8] * 8))
    buses = ("c1", "c6", "c9", "ce", "d1", "d6", "d9", "de")
    addresses = [f"0000:{bus}:00.0" for bus in buses]
    return on_the_bus(replace(machine, l3=l3), addresses, vendor="1002")


def low_noise() -> str:
    """What LUMI-G allows jobs: all but the first core of each L3."""
    return ",".join(f"{first + 1}-{first + 7}" for first in range(0, 128, 8))


def gb200(*, sysfs_names_memory: bool = False) -> Topology:
    """Two Grace, 0-71 and 72-143, with two Blackwell each; nodes 2-33 are GPU memory or empty.

    Args:
        sysfs_names_memory: whether the PCI devices have no CPU list, and the memory nodes 2, 10,
            18 and 26 as their NUMA nodes.
    """
    sides = (cpus("0-71"), cpus("72-143"))
    cores = tuple(frozenset((cpu,)) for cpu in range(144))
    machine = box(cores, nodes=runs(72, 72), sockets=[[0], [1]], gpus=[0, 0, 1, 1])
    nodes = [
        NumaNode(
            id=number,
            cpus=sides[number] if number < 2 else frozenset(),
            has_memory=number in (0, 1, 2, 10, 18, 26),
            distances=tuple(_grace(number, other) for other in range(34)),
        )
        for number in range(34)
    ]
    addresses = ["0008:01:00.0", "0009:01:00.0", "0018:01:00.0", "0019:01:00.0"]
    full = on_the_bus(replace(machine, numa_nodes=tuple(nodes)), addresses)
    if not sysfs_names_memory:
        return full
    devices = [
        replace(device, local_cpus=None, numa_node=2 + 8 * number)
        for number, device in enumerate(full.accelerators or ())
    ]
    return replace(full, accelerators=tuple(devices))


def _grace(one: int, other: int) -> int:
    """10 within itself, 40 between the two processors, 80 to GPU memory beside, 120 across."""
    sides = [number if number < 2 else int(number >= 18) for number in (one, other)]
    same, memory = sides[0] == sides[1], max(one, other) > 1
    if one == other:
        return 10
    return (80 if same else 120) if memory else 40


def xeon6_snc3(gpus: Sequence[int]) -> Topology:
    """Two Xeon 6 of 96 cores, three nodes each: cores (i, i + 192), 32 cores a node."""
    return on_the_bus(
        box(
            spread_cores(192),
            nodes=runs(*[32] * 6),
            sockets=[range(3), range(3, 6)],
            gpus=gpus,
        )
    )


def nps4_backwards() -> Topology:
    """Two EPYC of 64 cores, four nodes each, and a GPU at every node, but in another order."""
    return on_the_bus(
        box(
            spread_cores(128),
            nodes=runs(*[16] * 8),
            sockets=[range(4), range(4, 8)],
            gpus=[3, 2, 1, 0, 7, 6, 5, 4],
        )
    )


def core_i9(gpus: int) -> Topology:
    """An i9-13900H: six P cores (0,1) … (10,11) and the E cores 12 … 19."""
    fast = packed_cores(6)
    slow = [frozenset((cpu,)) for cpu in range(12, 20)]
    return on_the_bus(replace(one_node([*fast, *slow], gpus), efficiency_cpus=cpus("12-19")))


def power(cores: Sequence[CpuSet], gpus: Sequence[int], *, allowed: str | None = None) -> Topology:
    """Two sockets, the nodes 0 and 8; the GPUs' memory is the nodes 255, 254, …

    Args:
        cores: half of them in each socket.
        gpus: how many GPUs each socket has.
        allowed: the allowed CPUs; all.
    """
    half = len(cores) // 2
    machine = box(
        cores,
        nodes=runs(half, half),
        sockets=[[0], [1]],
        gpus=[0] * gpus[0] + [1] * gpus[1],
        allowed=allowed,
    )
    memory = range(256 - sum(gpus), 256)
    sides = [node.cpus for node in machine.numa_nodes or ()]
    nodes = [
        NumaNode(id=0, cpus=sides[0], distances=(10, 40, *(80 for _ in memory))),
        NumaNode(id=8, cpus=sides[1], distances=(40, 10, *(80 for _ in memory))),
        *(_memory_node(number, memory) for number in memory),
    ]
    own = tuple(
        replace(gpu, numa_node=0 if gpu.index < gpus[0] else 8, memory_node=255 - gpu.index)
        for gpu in machine.gpus
    )
    addresses = [f"0004:{at + 4:02x}:00.0" for at in range(gpus[0])]
    addresses += [f"0035:{at + 3:02x}:00.0" for at in range(gpus[1])]
    return on_the_bus(replace(machine, numa_nodes=tuple(nodes), gpus=own), addresses)


def _memory_node(number: int, memory: Iterable[int]) -> NumaNode:
    distances = (80, 80, *(10 if other == number else 80 for other in memory))
    return NumaNode(id=number, cpus=frozenset(), has_memory=True, distances=distances)


def dgx_a100_on_the_bus() -> Topology:
    """A DGX A100, as :func:`allocator.described.dgx_a100` tells it, with its PCI addresses."""
    buses = ("07", "0f", "47", "4e", "87", "90", "b7", "bd")
    return on_the_bus(dgx_a100(), [f"0000:{bus}:00.0" for bus in buses])


def dgx_h100() -> Topology:
    """A DGX H100: two sockets of 56 cores (i, i + 112), four GPUs each."""
    buses = ("1b", "43", "52", "61", "9d", "c3", "d1", "df")
    addresses = [f"0000:{bus}:00.0" for bus in buses]
    machine = box(
        spread_cores(112),
        nodes=runs(56, 56),
        sockets=[[0], [1]],
        gpus=[0, 0, 0, 0, 1, 1, 1, 1],
    )
    return on_the_bus(machine, addresses)


def four_and_two() -> Topology:
    """Two sockets of 24 cores (i, i + 48); four GPUs at the first, two at the second."""
    return on_the_bus(
        box(
            spread_cores(48),
            nodes=runs(24, 24),
            sockets=[[0], [1]],
            gpus=[0, 0, 0, 0, 1, 1],
        )
    )
