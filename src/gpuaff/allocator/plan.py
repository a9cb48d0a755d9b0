"""What a plan is. :func:`gpuaff.plan` makes one."""

from __future__ import annotations

from gpuaff.allocator.modes import Mode, Multithreading, Scope
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.notices import Notice
from gpuaff.records import dataclass
from gpuaff.topology.model import Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PLAN_SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one rank gets.

    Attributes:
        rank: its local rank, 0 … nproc − 1.
        gpu: the physical index of its GPU; None when no GPU is known.
        cpus: its logical CPUs.
        cores: the number of physical cores that they belong to.
        numa_nodes: the ids of the NUMA nodes that they belong to.
        source: how the CPUs near its GPU were found.
    """

    rank: int
    gpu: int | None
    cpus: CpuSet
    cores: int
    numa_nodes: tuple[int, ...]
    source: Source

    def to_dict(self) -> dict[str, Any]:
        """The share as JSON has it."""
        return {
            "rank": self.rank,
            "gpu": self.gpu,
            "cpus": format_cpulist(self.cpus),
            "cores": self.cores,
            "numa_nodes": list(self.numa_nodes),
            "source": str(self.source),
        }


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Who gets which CPUs.

    Attributes:
        mode: how the near cores are cut.
        scope: what counts as near.
        multithreading: which CPUs of a core are used.
        balanced: whether all shares have the same number of cores (unique modes).
        shares: one share per rank, by rank.
        warnings: what was not as hoped.
    """

    mode: Mode
    scope: Scope
    multithreading: Multithreading
    balanced: bool
    shares: tuple[Share, ...]
    warnings: tuple[Notice, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON has it; ``docs/plan-json.md`` tells the schema."""
        return {
            "schema_version": PLAN_SCHEMA_VERSION,
            "mode": str(self.mode),
            "scope": str(self.scope),
            "ranks": [share.to_dict() for share in self.shares],
            "warnings": [warning.to_dict() for warning in self.warnings],
        }
