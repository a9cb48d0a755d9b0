"""What tests ask of a topology that was read, as short texts."""

from __future__ import annotations

from collections.abc import Collection

from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.topology.model import Topology


def lists(groups: Collection[CpuSet] | None) -> list[str] | None:
    return None if groups is None else [format_cpulist(group) for group in groups]


def cores(topology: Topology) -> list[str] | None:
    return lists(topology.cores)


def nodes(topology: Topology) -> dict[int, str]:
    return {node.id: format_cpulist(node.cpus) for node in topology.numa_nodes or ()}


def packages(topology: Topology) -> dict[int, str] | None:
    if topology.packages is None:
        return None
    return {package.id: format_cpulist(package.cpus) for package in topology.packages}


def codes(topology: Topology) -> set[str]:
    return {note.code for note in topology.notes}


def message(topology: Topology, code: str) -> str:
    return next(note.message for note in topology.notes if note.code == code)


def pairs(first: int, last: int, distance: int) -> list[str]:
    """Cores of two CPUs each, at one distance."""
    return [f"{cpu},{cpu + distance}" for cpu in range(first, last + 1)]
