"""On which NUMA nodes a share's memory may lie. Pure."""

from __future__ import annotations

from gpuaff.allocator.plan import Share
from gpuaff.binding.memory_option import Wanted
from gpuaff.cpuset import format_cpulist
from gpuaff.errors import GPUAffinityError
from gpuaff.notices import Notice
from gpuaff.topology.model import Topology


def asked_for(wanted: Wanted, share: Share, topology: Topology) -> frozenset[int]:
    """The nodes that are meant: those that were named, or those of the share's CPUs.

    Raises:
        GPUAffinityError: a node was named that this machine does not have. That was spelled out
            for a machine of another kind, and something near it would not be what was meant.
    """
    if not wanted.named:
        return frozenset(share.numa_nodes)
    nodes = wanted.nodes | ({_own_memory(wanted, share, topology)} if wanted.own else set())
    there = {node.id for node in topology.numa_nodes or ()}
    if there and nodes - there:
        raise GPUAffinityError(
            f"{wanted.text}: this machine has no NUMA node {format_cpulist(nodes - there)}; "
            f"it has {format_cpulist(there)}"
        )
    return nodes


def _own_memory(wanted: Wanted, share: Share, topology: Topology) -> int:
    gpu = None if share.gpu is None else topology.gpu_by_index.get(share.gpu)
    if gpu is None or gpu.memory_node is None:
        raise GPUAffinityError(
            f"{wanted.text}: the memory of GPU {share.gpu} is not a NUMA node, as far as the "
            "driver tells (on a GH200 it is); name nodes, or none for those of the share"
        )
    return gpu.memory_node


def granted(
    asked: frozenset[int],
    topology: Topology,
    *,
    named: bool,
    allowed: frozenset[int],
    normal: frozenset[int] | None,
) -> frozenset[int]:
    """Those of the nodes that memory may come from.

    Args:
        asked: the nodes that are meant.
        topology: the machine.
        named: whether they were named. Otherwise the memory of a GPU, and other memory that the
            kernel may take only for what it can move away again, is left out.
        allowed: the nodes that the cpuset grants (cases A16, G10).
        normal: the nodes with memory of the ordinary kind; None when unknown.
    """
    empty = {node.id for node in topology.numa_nodes or () if node.has_memory is False}
    usable = (asked & allowed) - empty
    return usable if named or normal is None else usable & normal


def remarks(
    wanted: Wanted, asked: frozenset[int], usable: frozenset[int], allowed: frozenset[int]
) -> list[Notice]:
    """What is said where not all nodes can be had."""
    if not asked:
        text = f"{wanted.text}: the NUMA nodes of this rank's CPUs are not known"
        return [Notice("memory-none", f"{text}: the memory policy stays")]
    if usable == asked:
        return []
    lost = f"no memory for this process on NUMA node {format_cpulist(asked - usable)}"
    why = f"allowed are {format_cpulist(allowed) or 'none'}: cpuset.mems, docker --cpuset-mems"
    if not usable:
        text = f"{wanted.text}: {lost} ({why}): the memory policy stays"
        return [Notice("memory-none", text)]
    text = f"{wanted.text}: {lost} ({why}): node {format_cpulist(usable)} only"
    return [Notice("memory-cut", text)]
