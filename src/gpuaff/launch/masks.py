"""Whose masks: whether all ranks of this node may use the same CPUs.

Each rank plans for all of them. It can do so when all have the same mask, or when the launcher
names the mask of every rank; else it can only plan for itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from gpuaff._system import env, kernel
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.launch import slurm
from gpuaff.launch.launchers import ROWS, Launcher
from gpuaff.launch.ranks import Ranks, active_launcher
from gpuaff.launch.variables import Get, number

# What started this rank: the process that is above it and above its wrappers.
#
# A launcher that binds nobody hands its own mask down. A wrapper between it and Python (a shell,
# ``timeout``, a profiler) may have been bound for this rank alone, and then has the rank's mask. It
# is known by its variables: it was given the rank's own, which the launcher has not.


_MOST = 64
"""The most wrappers; a chain of processes that changes while it is read has no end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ancestry:
    """Processes above this one, read at one moment.

    Attributes:
        parent: the CPUs that its parent may use; None when that cannot be seen.
        starter: those of the process that started the rank; its parent's where nobody stands
            between, or it can't be told.
        starter_name: the name of that process's program.
    """

    parent: CpuSet | None
    starter: CpuSet | None
    starter_name: str | None


def observe_ancestry(ranks: Ranks) -> Ancestry:
    """Look at the processes above this one."""
    parent = kernel.parent_id()
    starter = parent if ranks.local_size == 1 else _starter(env.get, ranks, parent)
    mask = kernel.affinity_of(parent)
    return Ancestry(
        parent=mask,
        starter=mask if starter == parent else kernel.affinity_of(starter),
        starter_name=kernel.name_of(starter),
    )


def _starter(get: Get, ranks: Ranks, parent: int | None) -> int | None:
    own = own_variables(get, ranks)
    if parent is None or not own:
        return parent
    found: int | None = parent
    for _ in range(_MOST):
        if found is None or not carries(found, own):
            break
        found = kernel.parent_of(found)
    return found


def own_variables(get: Get, ranks: Ranks) -> dict[str, str | None]:
    """The variables that are this rank's own; none where its launcher is not known.

    They are its number, and what tells one run of the launcher from another: that may run inside
    another one's rank, and then has such variables itself.
    """
    launcher = active_launcher(get, ranks)
    for row in ROWS:
        if row.launcher is launcher is not Launcher.UNKNOWN and get(row.local_rank):
            names = (row.local_rank, row.rank, *row.run)
            return {name: get(name) for name in names if name}
    return {}


def carries(pid: int, own: dict[str, str | None]) -> bool:
    """Whether a process was started with a rank's variables; who can't be read was not."""
    variables = kernel.variables_of(pid)
    return all(variables.get(name) == value for name, value in own.items())


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Masks:
    """The masks of this node's ranks.

    Attributes:
        whose: what is known of them.
        source: who says so, or why nobody does, in words.
        named: each rank's CPUs, by local rank, where they are named; else None.
        bound: whether the launcher says that it has bound each rank.
        unbound: how ranks are started that have no masks of their own.
    """

    whose: Whose
    source: str
    named: tuple[CpuSet, ...] | None = None
    bound: bool = False
    unbound: str = "without taskset or numactl around each"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What this process sees of masks.

    Attributes:
        own: the CPUs that it may use.
        starter: those that what started it may use (:class:`Ancestry`); None when that
            cannot be seen.
        starter_name: the name of that program.
        online: the CPUs of the machine.
        cpuset: those of this process's cpuset; None when they are not told, or do not matter.
    """

    own: CpuSet
    starter: CpuSet | None
    starter_name: str | None
    online: CpuSet
    cpuset: CpuSet | None = None


def observe_masks(ranks: Ranks, *, own: CpuSet, above: Ancestry, online: CpuSet) -> Masks:
    """The masks of the ranks of this process's job on this node.

    Args:
        ranks: the ranks in use.
        own: the CPUs that this process may use, before anything is pinned.
        above: what started it, read at the same moment: a cpuset that changes, or a CPU that goes
            offline, changes the masks of both.
        online: the CPUs of the machine.
    """
    seen = Seen(
        own=own,
        starter=above.starter,
        starter_name=above.starter_name,
        online=online,
        cpuset=None if own == above.starter else _cpuset(env.get),
    )
    return classify_masks(env.get, ranks, seen)


def _cpuset(get: Get) -> CpuSet | None:
    if slurm.binding(get) != "none":
        return None
    from gpuaff.topology.cgroup import cpuset_of  # nobody else needs it to pin

    return cpuset_of(kernel.machine_tree())


def classify_masks(get: Get, ranks: Ranks, seen: Seen) -> Masks:
    """:func:`observe`, of what was read already.

    Args:
        get: the environment.
        ranks: the ranks in use.
        seen: the masks that can be seen from here.
    """
    if ranks.local_size == 1:
        bound = _is_bound(get, seen)
        return Masks(whose=Whose.COMMON, source="there is one rank", bound=bound)
    launcher = active_launcher(get, ranks)
    found = _by_launcher(get, ranks, launcher, seen)
    return replace(found, unbound=_UNBOUND.get(launcher, found.unbound))


_UNBOUND = {
    Launcher.TORCHRUN: "torchrun without --numa-binding, and without taskset around each",
    Launcher.OPEN_MPI: "mpirun --bind-to none",
    Launcher.HYDRA: "mpiexec -bind-to none",
    Launcher.SLURM: "srun --cpu-bind=none",
}


def _by_launcher(get: Get, ranks: Ranks, launcher: Launcher, seen: Seen) -> Masks:
    if launcher is Launcher.OPEN_MPI:
        return _of_open_mpi(get, seen)
    if launcher is Launcher.SLURM:
        return _of_slurm(get, ranks, seen)
    return _by_starter(seen)


def _is_bound(get: Get, seen: Seen) -> bool:
    """Whether a rank that is alone has its mask from a launcher, which may have started others."""
    if get("OMPI_MCA_orte_bound_at_launch") is not None:
        return True
    tasks, task = slurm.tasks_here(get), number(get("SLURM_LOCALID"))
    if slurm.binding(get) not in ("mask_cpu", "map_cpu") or not tasks or task is None:
        return False
    named = slurm.named_masks(get, tasks)
    return named is not None and task < tasks and named[task] & seen.online == seen.own


def _by_starter(seen: Seen) -> Masks:
    """A launcher that binds nobody hands its own mask down.

    Where it is out of sight (outside the container that this is the first process of), each rank
    may be in a cpuset of its own. A mask of the whole machine is no cpuset's.
    """
    if seen.starter is None:
        if seen.own == seen.online:
            return Masks(whose=Whose.COMMON, source="it may use the whole machine")
        return _unknown("the mask of what started it cannot be seen")
    if seen.own == seen.starter:
        return Masks(whose=Whose.COMMON, source="what started it has the same mask")
    return _unknown(f"what started it may use CPUs {format_cpulist(seen.starter)}")


def _of_open_mpi(get: Get, seen: Seen) -> Masks:
    """Up to Open MPI 4 mpirun says when it has bound the ranks.

    Open MPI 5 (PRRTE) never says, so there only the mask of mpirun itself, or of its daemon, does;
    not that of a shell whose variables cannot be read.
    """
    if get("OMPI_MCA_orte_bound_at_launch") is not None:
        return _unknown("mpirun has bound each rank to CPUs of its own", bound=True)
    is_told = get("PRTE_LAUNCHED") is None or seen.starter_name in _DAEMONS
    if is_told or seen.own == seen.online:
        return _by_starter(seen)
    return _unknown("mpirun does not tell whether it has bound the ranks")


def _of_slurm(get: Get, ranks: Ranks, seen: Seen) -> Masks:
    kind = slurm.binding(get)
    if kind is None:  # no plugin that binds
        return _by_starter(seen)
    if kind == "none":
        return _of_unbound_task(seen)
    if kind not in ("mask_cpu", "map_cpu"):
        return _unknown(f"srun has bound the ranks by {kind[:40]}", bound=True)
    if number(get("SLURM_LOCALID")) != ranks.local_rank:
        return _unknown("srun counts the ranks otherwise (SLURM_LOCALID)", bound=True)
    named = slurm.named_masks(get, ranks.local_size)
    if named is None:
        return _unknown("SLURM_CPU_BIND_LIST cannot be read", bound=True)
    return _named(named, ranks.local_rank, seen)


def _of_unbound_task(seen: Seen) -> Masks:
    """A wrapper may have bound it since: then it lacks CPUs of the job.

    Tasks have the mask of the step's daemon, which is no narrower than its cpuset unless the
    system has made it so (``CPUAffinity=`` of systemd).
    """
    if seen.cpuset is None or seen.own in (seen.starter, seen.cpuset & seen.online):
        return Masks(whose=Whose.COMMON, source="srun says that it has bound nobody")
    job = format_cpulist(seen.cpuset & seen.online)
    return _unknown(f"srun has bound nobody, and its cpuset has the CPUs {job}")


def _named(named: tuple[CpuSet, ...], rank: int, seen: Seen) -> Masks:
    """The launcher's list, as far as this rank's own mask bears it out.

    Less than the list says is all right where nobody else may use the rest: the others' plans do
    not hang on it.
    """
    named = tuple(mask & seen.online for mask in named)
    told, own = named[rank], seen.own
    if not all(named):
        return _unknown("SLURM_CPU_BIND_LIST names CPUs that are not there")
    alone = all(told.isdisjoint(mask) for place, mask in enumerate(named) if place != rank)
    if not own <= told or not (own == told or alone):
        return _unknown(f"SLURM_CPU_BIND_LIST says {format_cpulist(told)}")
    if all(mask == told for mask in named):
        return Masks(whose=Whose.COMMON, source="SLURM_CPU_BIND_LIST", bound=True)
    return Masks(whose=Whose.NAMED, source="SLURM_CPU_BIND_LIST", named=named, bound=True)


def _unknown(why: str, *, bound: bool = False) -> Masks:
    return Masks(whose=Whose.UNKNOWN, source=why, bound=bound)
