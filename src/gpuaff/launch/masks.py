"""Whose masks: whether all ranks of this node may use the same CPUs.

Each rank plans for all of them. It can do so when all have the same mask, or when the launcher
names the mask of every rank; else it can only plan for itself.
"""

from __future__ import annotations

from enum import Enum

from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.launch import slurm
from gpuaff.launch.launchers import Launcher, innermost
from gpuaff.launch.ranks import Ranks
from gpuaff.launch.variables import Get, number
from gpuaff.records import dataclass
from gpuaff.system import environ, kernel

_DAEMONS = frozenset({"mpirun", "prte", "prted", "prterun"})
"""The programs of PRRTE that start ranks."""


class Whose(str, Enum):
    """What is known of the ranks' masks."""

    COMMON = "common"
    """All are the same."""
    NAMED = "named"
    """Each has its own, and the launcher tells them."""
    UNKNOWN = "unknown"
    """They may differ, and nobody tells how."""


@dataclass(frozen=True, kw_only=True)
class Masks:
    """The masks of this node's ranks.

    Attributes:
        whose: what is known of them.
        source: who says so, or why nobody does, in words.
        named: each rank's CPUs, by local rank, where they are named; else None.
        bound: whether the launcher says that it has bound each rank.
    """

    whose: Whose
    source: str
    named: tuple[CpuSet, ...] | None = None
    bound: bool = False


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What this process sees of masks.

    Attributes:
        own: the CPUs that it may use.
        parent: those that its parent may use; None when that cannot be seen.
        parent_name: the name of the parent's program.
        online: the CPUs of the machine.
    """

    own: CpuSet
    parent: CpuSet | None
    parent_name: str | None
    online: CpuSet


def observe(ranks: Ranks, *, own: CpuSet, parent: CpuSet | None, online: CpuSet) -> Masks:
    """The masks of the ranks of this process's job on this node.

    Args:
        ranks: the ranks in use.
        own: the CPUs that this process may use, before anything is pinned.
        parent: those of its parent, read at the same moment: a cpuset that changes, or a CPU that
            goes offline, changes both.
        online: the CPUs of the machine.
    """
    seen = Seen(
        own=own,
        parent=parent,
        parent_name=kernel.parent_name(),
        online=online,
    )
    return classify(environ.get, ranks, seen)


def classify(get: Get, ranks: Ranks, seen: Seen) -> Masks:
    """:func:`observe`, of what was read already.

    Args:
        get: the environment.
        ranks: the ranks in use.
        seen: the masks that can be seen from here.
    """
    if ranks.local_size == 1:
        return Masks(whose=Whose.COMMON, source="there is one rank")
    launcher = innermost(get, ranks)
    if launcher is Launcher.OPEN_MPI:
        return _of_open_mpi(get, seen)
    if launcher is Launcher.SLURM:
        return _of_slurm(get, ranks, seen)
    return _by_parent(seen)


def _by_parent(seen: Seen) -> Masks:
    """A launcher that binds nobody hands its own mask down.

    Where the parent is out of sight (the first process of a container, whose launcher is outside),
    each rank may be in a cpuset of its own. A mask of the whole machine is no cpuset's.
    """
    if seen.parent is None:
        if seen.own == seen.online:
            return Masks(whose=Whose.COMMON, source="it may use the whole machine")
        return _unknown("its parent's mask cannot be seen")
    if seen.own == seen.parent:
        return Masks(whose=Whose.COMMON, source="its parent has the same mask")
    return _unknown(f"its parent may use CPUs {format_cpulist(seen.parent)}")


def _of_open_mpi(get: Get, seen: Seen) -> Masks:
    """Up to Open MPI 4 mpirun says when it has bound the ranks.

    Then the parent's mask proves nothing: a shell between mpirun and Python is bound as well.
    Open MPI 5 (PRRTE) never says, so there only the mask of mpirun itself, or of its daemon, does.
    """
    if get("OMPI_MCA_orte_bound_at_launch") is not None:
        return _unknown("mpirun has bound each rank to CPUs of its own", bound=True)
    is_told = get("PRTE_LAUNCHED") is None or seen.parent_name in _DAEMONS
    if is_told or seen.own == seen.online:
        return _by_parent(seen)
    return _unknown("mpirun does not tell whether it has bound the ranks")


def _of_slurm(get: Get, ranks: Ranks, seen: Seen) -> Masks:
    kind = slurm.binding(get)
    if kind is None:  # no plugin that binds
        return _by_parent(seen)
    if kind == "none":
        return Masks(whose=Whose.COMMON, source="srun says that it has bound nobody")
    if kind not in ("mask_cpu", "map_cpu"):
        return _unknown(f"srun has bound the ranks by {kind}", bound=True)
    if number(get("SLURM_LOCALID")) != ranks.local_rank:
        return _unknown("srun counts the ranks otherwise (SLURM_LOCALID)", bound=True)
    named = slurm.named_masks(get, ranks.local_size)
    if named is None:
        return _unknown("SLURM_CPU_BIND_LIST cannot be read", bound=True)
    return _named(named, ranks.local_rank, seen)


def _named(named: tuple[CpuSet, ...], rank: int, seen: Seen) -> Masks:
    """The launcher's list, as far as this rank's own mask bears it out.

    Less than the list says is all right where nobody else may use the rest: the others' plans do
    not hang on it.
    """
    told, own = named[rank], seen.own
    if any(map(seen.online.isdisjoint, named)):
        return _unknown("SLURM_CPU_BIND_LIST names CPUs that are not there")
    alone = all(told.isdisjoint(mask) for place, mask in enumerate(named) if place != rank)
    if not own <= told or not (own == told or alone):
        return _unknown(f"SLURM_CPU_BIND_LIST says {format_cpulist(told)}")
    if all(mask == told for mask in named):
        return Masks(whose=Whose.COMMON, source="SLURM_CPU_BIND_LIST", bound=True)
    return Masks(whose=Whose.NAMED, source="SLURM_CPU_BIND_LIST", named=named, bound=True)


def _unknown(why: str, *, bound: bool = False) -> Masks:
    return Masks(whose=Whose.UNKNOWN, source=why, bound=bound)
