"""What a plan is. :func:`gpuaff.plan` makes one."""

from __future__ import annotations

from gpuaff.allocator.modes import Mode, Multithreading, Partition, Scope
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
        reserved: the logical CPUs that were kept out of the share for helpers.
    """

    rank: int
    gpu: int | None
    cpus: CpuSet
    cores: int
    numa_nodes: tuple[int, ...]
    source: Source
    reserved: CpuSet = frozenset()

    def to_dict(self) -> dict[str, Any]:
        """The share as JSON has it."""
        return {
            "rank": self.rank,
            "gpu": self.gpu,
            "cpus": format_cpulist(self.cpus),
            "cores": self.cores,
            "numa_nodes": list(self.numa_nodes),
            "source": str(self.source),
            "reserved": format_cpulist(self.reserved),
        }


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Who gets which CPUs.

    Attributes:
        mode: how the near cores are cut.
        scope: what counts as near.
        multithreading: which CPUs of a core are used.
        balanced: whether all shares have the same number of cores (unique modes).
        partition: among whom the CPUs were cut in the end, ``job`` or ``machine``.
        border_rule: the version of the rule that the borders are from; None for ``job``.
        shares: one share per rank, by rank; only the own one where the others' cannot be known.
        warnings: what was not as hoped.
    """

    mode: Mode
    scope: Scope
    multithreading: Multithreading
    balanced: bool
    shares: tuple[Share, ...]
    partition: Partition = Partition.JOB
    border_rule: int | None = None
    warnings: tuple[Notice, ...] = ()

    def share_of(self, rank: int) -> Share:
        """The share of a rank.

        Raises:
            KeyError: the plan has none for it.
        """
        if rank < len(self.shares) and self.shares[rank].rank == rank:
            return self.shares[rank]
        found = {share.rank: share for share in self.shares}
        return found[rank]

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON has it; ``docs/plan-json.md`` tells the schema."""
        return {
            "schema_version": PLAN_SCHEMA_VERSION,
            "mode": str(self.mode),
            "scope": str(self.scope),
            "partition": str(self.partition),
            "border_rule": self.border_rule,
            "ranks": [share.to_dict() for share in self.shares],
            "warnings": [warning.to_dict() for warning in self.warnings],
        }
