"""Remarks about how a process was found, whatever is planned. Pure."""

from __future__ import annotations

from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.notices import Notice
from gpuaff.topology.model import Topology


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
