"""Whether all ranks of this node may use the same CPUs.

Each rank plans for all of them. It can where all have the same mask, or where the launcher lists
the mask of every rank; else it plans for itself only.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from gpuaff._system import env, kernel
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.launch import slurm
from gpuaff.launch.launchers import Get, Launcher, number
from gpuaff.launch.ranks import Ranks, active_row, local_size, present
from gpuaff.notices import Notice


class Ancestry(NamedTuple):
    """The masks of processes above this one, observed at one moment; None: unreadable.

    A launcher that does not bind hands its own mask down. A wrapper between it and Python (a shell,
    ``timeout``, a profiler) may be bound for this rank alone.
    """

    parent: CpuSet | None
    starter: CpuSet | None  # what started the rank and its wrappers, else the parent
    starter_name: str | None


def observe_ancestry(ranks: Ranks) -> Ancestry:
    """Observe the processes above this one."""
    parent = starter = os.getppid() or None
    own = own_variables(env.get, ranks) if ranks.local_size > 1 else {}
    if own:  # wrappers have them
        starter = next((pid for pid in kernel.ancestors() if not carries(pid, own)), None)
    masks = kernel.affinity_or_none(parent), kernel.affinity_or_none(starter)
    return Ancestry(*masks, kernel.name_of(starter))


def own_variables(get: Get, ranks: Ranks) -> dict[str, str | None]:
    """The variables that only this rank of this run has; none where its launcher is unknown."""
    row = active_row(get, ranks)
    names = (row.local_rank, row.rank, *row.run) if row.launcher is not Launcher.UNKNOWN else ()
    return {name: get(name) for name in names if name}


def carries(pid: int, own: dict[str, str | None]) -> bool:
    """Whether a process was started with a rank's variables; False when it is unreadable."""
    variables = kernel.variables_of(pid)
    return all(variables.get(name) == value for name, value in own.items())


class Whose(str, Enum):
    """What is known about the ranks' masks."""

    COMMON = "common"
    NAMED = "named"  # they differ, and the launcher lists them
    UNKNOWN = "unknown"


class Masks(NamedTuple):
    """The masks of this node's ranks."""

    whose: Whose
    source: str = ""  # why they are unknown, in words
    named: tuple[CpuSet, ...] | None = None  # by local rank, where they are listed
    bound: bool = False  # whether the launcher says that it bound each rank
    unbound: str = ""  # how to start ranks without masks of their own


# Up to Open MPI 4 this says that mpirun bound the ranks. In Open MPI 5 (PRRTE) only the mask of
# mpirun itself, or of its daemon, shows it; not that of a shell whose variables are unreadable.
_MPIRUN_BOUND = "OMPI_MCA_orte_bound_at_launch"
_PRRTE = frozenset({"mpirun", "prte", "prted", "prterun"})


def classify_masks(
    ranks: Ranks,
    *,
    own: CpuSet,
    above: Ancestry,
    online: CpuSet,
    cpuset: Callable[[], CpuSet | None],
    get: Get = env.get,
) -> Masks:
    """What is known about the masks of the ranks of this process's job on this node.

    ``own`` are the CPUs that this process may use, before anything is pinned, and ``above`` was
    observed at the same moment: a change of a cpuset changes the masks of both. ``cpuset`` observes
    the CPUs of this process's cpuset; it is called only where they matter.
    """
    if ranks.local_size == 1:
        listed = slurm.task_masks(get)  # of a launcher that may have started other ranks
        is_bound = listed is not None and listed[0] & online == own
        return Masks(Whose.COMMON, bound=is_bound or get(_MPIRUN_BOUND) is not None)
    row = active_row(get, ranks)
    kind = slurm.binding(get) if row.launcher is Launcher.SLURM else None
    is_of_mpirun = row.launcher is Launcher.OPEN_MPI
    is_of_wrapper = above.starter_name not in _PRRTE and own != online
    if kind == "none":
        masks = _of_unbound_task(own, above, online, cpuset)
    elif kind is not None:
        masks = _of_bound_task(get, ranks, kind, own, online)
    elif is_of_mpirun and get(_MPIRUN_BOUND) is not None:
        masks = Masks(Whose.UNKNOWN, "mpirun bound each rank to CPUs of its own", bound=True)
    elif is_of_mpirun and get("PRTE_LAUNCHED") is not None and is_of_wrapper:
        masks = Masks(Whose.UNKNOWN, "mpirun does not say whether it bound the ranks")
    # A launcher that does not bind hands its own mask down. Where its process is unreadable (in a
    # container), each rank may be in a cpuset of its own; the whole machine is no cpuset's.
    elif own == (online if above.starter is None else above.starter):
        masks = Masks(Whose.COMMON)
    elif above.starter is None:
        masks = Masks(Whose.UNKNOWN, "the mask of the process that started it is unreadable")
    else:
        cpus = format_cpulist(above.starter)
        masks = Masks(Whose.UNKNOWN, f"the process that started this rank may use CPUs {cpus}")
    return masks._replace(unbound=row.unbound)


def _of_unbound_task(
    own: CpuSet, above: Ancestry, online: CpuSet, cpuset: Callable[[], CpuSet | None]
) -> Masks:
    """A wrapper may have bound it since: then it lacks CPUs of the job.

    Tasks have the mask of the step's daemon, which is no narrower than its cpuset unless the
    system made it so (``CPUAffinity=`` of systemd).
    """
    granted = None if own == above.starter else cpuset()
    if granted is None or own == granted & online:
        return Masks(Whose.COMMON)
    cpus = format_cpulist(granted & online)
    return Masks(Whose.UNKNOWN, f"srun bound no rank, but its cpuset has the CPUs {cpus}")


def _of_bound_task(get: Get, ranks: Ranks, kind: str, own: CpuSet, online: CpuSet) -> Masks:
    """By srun's list, unless this rank's own mask contradicts it."""
    listed, why = slurm.named_masks(get, ranks.local_size), ""
    if kind not in slurm.LISTED:
        why = f"srun bound the ranks by {kind[:40]}"
    elif number(get("SLURM_LOCALID")) != ranks.local_rank:
        why = "srun numbers the ranks differently (SLURM_LOCALID)"
    elif listed is None:
        why = "SLURM_CPU_BIND_LIST is malformed"
    if why or listed is None:
        return Masks(Whose.UNKNOWN, why, bound=True)
    named = tuple(mask & online for mask in listed)
    mine = named[ranks.local_rank]
    others = (*named[: ranks.local_rank], *named[ranks.local_rank + 1 :])
    if not all(named):
        return Masks(Whose.UNKNOWN, "SLURM_CPU_BIND_LIST has CPUs that are not there")
    # A mask may be narrower than listed where no other rank may use the rest: no other plan
    # depends on it.
    if own != mine and not (own <= mine and all(map(mine.isdisjoint, others))):
        return Masks(Whose.UNKNOWN, f"SLURM_CPU_BIND_LIST gives it {format_cpulist(mine)}")
    if set(named) == {mine}:
        return Masks(Whose.COMMON, bound=True)
    return Masks(Whose.NAMED, named=named, bound=True)


def consistency(ranks: Ranks, get: Get = env.get) -> tuple[Notice, ...]:
    """Warnings where the ranks in use leave out others of this node, which may get the same CPUs.

    For ranks that were given as arguments, and for torchrun's. The default of an old
    ``--local_rank`` option makes every process rank 0.
    """
    rank, size = number(get("LOCAL_RANK")), number(get("LOCAL_WORLD_SIZE"))
    is_other = rank not in (None, ranks.local_rank) and size == ranks.local_size
    found: list[Notice | None] = [_ranks_beside(get, ranks)]
    if is_other and get("TORCHELASTIC_RUN_ID"):
        text = (
            f"set_affinity was called with local_rank {ranks.local_rank} of {size}, but torchrun "
            f"set LOCAL_RANK={rank}; the argument is used: processes that pass the same number get "
            "the same GPU and CPUs, so pass LOCAL_RANK"
        )
        found.insert(0, Notice("rank-differs", text, rank=ranks.local_rank))
    return tuple(notice for notice in found if notice is not None)


def _ranks_beside(get: Get, ranks: Ranks) -> Notice | None:
    """One rank, or one launcher's, plans for the whole node; another launcher has more there."""
    launcher = active_row(get, ranks).launcher
    around = launcher is Launcher.UNKNOWN  # the rows from here on are around these ranks
    if around and ranks.local_size != 1:
        return None  # the caller's own numbers may well count all processes
    for row in present(get):
        around = around or row.launcher is launcher
        count = local_size(get, row) or 1
        if not around or row.launcher in (launcher, Launcher.UNKNOWN) or count == 1:
            continue
        # Two that agree started the same processes, as jsrun does for Open MPI.
        same = (number(get(row.local_rank)), count) == (ranks.local_rank, ranks.local_size)
        agrees = same and launcher is not Launcher.TORCHRUN
        if not agrees and not _binds_apart(get, row.launcher):
            return Notice(
                "ranks-beside",
                f"this is rank {ranks.local_rank} of {ranks.local_size}, but {row.launcher.value} "
                f"started {count} processes of the job on this node, which may get the same CPUs; "
                "call set_affinity(local_rank, nproc_per_node) with the numbers of all ranks of "
                'this node, or with partition="machine"',
                rank=ranks.local_rank,
            )
    return None


def _binds_apart(get: Get, launcher: Launcher) -> bool:
    """Whether it says that each of its processes here has CPUs of its own."""
    if launcher is Launcher.OPEN_MPI:
        return get(_MPIRUN_BOUND) is not None
    listed = slurm.task_masks(get) if launcher is Launcher.SLURM else None
    return listed is not None and all(map(listed[0].isdisjoint, listed[1]))
