"""Whether all ranks of this node may use the same CPUs.

Each rank plans for all of them. It can where all have the same mask, or where the launcher lists
the mask of every rank; else it plans for itself only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from gpuaff._system import env, kernel
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.launch import slurm
from gpuaff.launch.launchers import ROWS, Get, Launcher, number
from gpuaff.launch.ranks import Ranks, active_launcher
from gpuaff.launch.reports import local_size, present
from gpuaff.notices import Notice


@dataclass(frozen=True, slots=True, kw_only=True)
class Ancestry:
    """Processes above this one, observed at one moment.

    A launcher that does not bind hands its own mask down. A wrapper between it and Python (a shell,
    ``timeout``, a profiler) may be bound for this rank alone.

    Attributes:
        parent: the CPUs that the parent may use; None when unreadable.
        starter: those of the process that started the rank and its wrappers; the parent's when it
            is not known.
        starter_name: the name of that process.
    """

    parent: CpuSet | None
    starter: CpuSet | None
    starter_name: str | None


def observe_ancestry(ranks: Ranks) -> Ancestry:
    """Observe the processes above this one."""
    parent = kernel.parent_id()
    starter = parent if ranks.local_size == 1 else _starter(env.get, ranks, parent)
    mask = kernel.affinity_of(parent)
    return Ancestry(
        parent=mask,
        starter=mask if starter == parent else kernel.affinity_of(starter),
        starter_name=kernel.name_of(starter),
    )


def _starter(get: Get, ranks: Ranks, parent: int | None, most: int = 64) -> int | None:
    """The nearest process without this rank's variables: wrappers have them."""
    own, found = own_variables(get, ranks), parent
    for _ in range(most if own else 0):  # a chain that changes meanwhile may not end
        if found is None or not carries(found, own):
            break
        found = kernel.parent_of(found)
    return found


def own_variables(get: Get, ranks: Ranks) -> dict[str, str | None]:
    """The variables that only this rank has; none where its launcher is unknown.

    They are its number, and what distinguishes one run of the launcher from another: it may run
    inside a rank of another run.
    """
    launcher = active_launcher(get, ranks)
    for row in ROWS:
        if row.launcher is launcher is not Launcher.UNKNOWN and get(row.local_rank):
            return {name: get(name) for name in (row.local_rank, row.rank, *row.run) if name}
    return {}


def carries(pid: int, own: dict[str, str | None]) -> bool:
    """Whether a process was started with a rank's variables; False when it is unreadable."""
    variables = kernel.variables_of(pid)
    return all(variables.get(name) == value for name, value in own.items())


class Whose(str, Enum):
    """What is known about the ranks' masks."""

    COMMON = "common"
    """All are the same."""
    NAMED = "named"
    """They differ, and the launcher lists them."""
    UNKNOWN = "unknown"
    """They may differ, and nothing lists them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Masks:
    """The masks of this node's ranks.

    Attributes:
        whose: what is known about them.
        source: where that comes from, or why they are unknown, in words.
        named: each rank's CPUs, by local rank, where they are listed; else None.
        bound: whether the launcher says that it bound each rank.
        unbound: how to start ranks without masks of their own.
    """

    whose: Whose
    source: str
    named: tuple[CpuSet, ...] | None = None
    bound: bool = False
    unbound: str = "without taskset or numactl around each"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedMasks:
    """The masks that this process can observe.

    Attributes:
        own: the CPUs that it may use.
        starter: those of the process that started it (:class:`Ancestry`); None when unreadable.
        starter_name: the name of that process.
        online: the CPUs of the machine.
        cpuset: those of this process's cpuset; None when unknown or irrelevant.
    """

    own: CpuSet
    starter: CpuSet | None
    starter_name: str | None
    online: CpuSet
    cpuset: CpuSet | None = None


def observe_masks(
    ranks: Ranks,
    *,
    own: CpuSet,
    above: Ancestry,
    online: CpuSet,
    cpuset: Callable[[], CpuSet | None],
) -> Masks:
    """The masks of the ranks of this process's job on this node.

    Args:
        ranks: the ranks in use.
        own: the CPUs that this process may use, before anything is pinned.
        above: the processes above, observed at the same moment: a cpuset that changes, or a CPU
            that goes offline, changes the masks of both.
        online: the CPUs of the machine.
        cpuset: observes the CPUs of this process's cpuset; called only where they matter.
    """
    matters = own != above.starter and slurm.binding(env.get) == "none"
    observed = ObservedMasks(
        own=own,
        starter=above.starter,
        starter_name=above.starter_name,
        online=online,
        cpuset=cpuset() if matters else None,
    )
    return classify_masks(env.get, ranks, observed)


_UNBOUND = {
    Launcher.TORCHRUN: "torchrun without --numa-binding, and without taskset around each",
    Launcher.OPEN_MPI: "mpirun --bind-to none",
    Launcher.HYDRA: "mpiexec -bind-to none",
    Launcher.SLURM: "srun --cpu-bind=none",
}


def classify_masks(get: Get, ranks: Ranks, observed: ObservedMasks) -> Masks:
    """:func:`observe_masks` for any environment. Pure."""
    if ranks.local_size == 1:
        masks = _common("there is one rank")
        return replace(masks, bound=_is_bound(get, observed))
    launcher = active_launcher(get, ranks)
    if launcher is Launcher.OPEN_MPI:
        masks = _of_open_mpi(get, observed)
    elif launcher is Launcher.SLURM:
        masks = _of_slurm(get, ranks, observed)
    else:
        masks = _by_starter(observed)
    return replace(masks, unbound=_UNBOUND.get(launcher, masks.unbound))


def _is_bound(get: Get, observed: ObservedMasks) -> bool:
    """Whether the mask of a single rank is a launcher's, which may have started others."""
    listed = slurm.task_masks(get)
    if get("OMPI_MCA_orte_bound_at_launch") is not None:
        return True
    return listed is not None and listed[0] & observed.online == observed.own


def _by_starter(observed: ObservedMasks) -> Masks:
    """A launcher that does not bind hands its own mask down.

    Where its process is unreadable (outside the container that this is the first process of), each
    rank may be in a cpuset of its own. A mask of the whole machine is no cpuset's.
    """
    if observed.starter is None:
        if observed.own == observed.online:
            return _common("this rank may use the whole machine")
        return _unknown("the mask of the process that started this rank is unreadable")
    if observed.own == observed.starter:
        return _common("the process that started this rank has the same mask")
    cpus = format_cpulist(observed.starter)
    return _unknown(f"the process that started this rank may use CPUs {cpus}")


def _of_open_mpi(get: Get, observed: ObservedMasks) -> Masks:
    """Up to Open MPI 4 a variable says that mpirun bound the ranks.

    Open MPI 5 (PRRTE) has none; there only the mask of mpirun itself, or of its daemon, shows it;
    not that of a shell whose variables are unreadable.
    """
    if get("OMPI_MCA_orte_bound_at_launch") is not None:
        return _unknown("mpirun bound each rank to CPUs of its own", bound=True)
    is_known = get("PRTE_LAUNCHED") is None or observed.starter_name in _PRRTE
    if is_known or observed.own == observed.online:
        return _by_starter(observed)
    return _unknown("mpirun does not say whether it bound the ranks")


_PRRTE = frozenset({"mpirun", "prte", "prted", "prterun"})
"""The programs of PRRTE that start ranks."""


def _of_slurm(get: Get, ranks: Ranks, observed: ObservedMasks) -> Masks:
    kind = slurm.binding(get)
    if kind is None:  # no plugin that binds
        return _by_starter(observed)
    if kind == "none":
        return _of_unbound_task(observed)
    if kind not in ("mask_cpu", "map_cpu"):
        return _unknown(f"srun bound the ranks by {kind[:40]}", bound=True)
    if number(get("SLURM_LOCALID")) != ranks.local_rank:
        return _unknown("srun numbers the ranks differently (SLURM_LOCALID)", bound=True)
    named = slurm.named_masks(get, ranks.local_size)
    if named is None:
        return _unknown("SLURM_CPU_BIND_LIST is malformed", bound=True)
    return _of_listed_task(named, ranks.local_rank, observed)


def _of_unbound_task(observed: ObservedMasks) -> Masks:
    """A wrapper may have bound it since: then it lacks CPUs of the job.

    Tasks have the mask of the step's daemon, which is no narrower than its cpuset unless the
    system made it so (``CPUAffinity=`` of systemd).
    """
    job = (observed.cpuset or frozenset()) & observed.online
    if observed.cpuset is None or observed.own in (observed.starter, job):
        return _common("srun bound no rank")
    return _unknown(f"srun bound no rank, but its cpuset has the CPUs {format_cpulist(job)}")


def _of_listed_task(named: tuple[CpuSet, ...], rank: int, observed: ObservedMasks) -> Masks:
    """The launcher's list, unless this rank's own mask contradicts it.

    A mask may be narrower than listed where no other rank may use the rest: no other plan depends
    on it.
    """
    named = tuple(mask & observed.online for mask in named)
    listed, own = named[rank], observed.own
    if not all(named):
        return _unknown("SLURM_CPU_BIND_LIST has CPUs that are not there")
    alone = all(listed.isdisjoint(mask) for other, mask in enumerate(named) if other != rank)
    if not own <= listed or not (own == listed or alone):
        return _unknown(f"SLURM_CPU_BIND_LIST gives it {format_cpulist(listed)}")
    source = "SLURM_CPU_BIND_LIST"
    if all(mask == listed for mask in named):
        return Masks(whose=Whose.COMMON, source=source, bound=True)
    return Masks(whose=Whose.NAMED, source=source, named=named, bound=True)


def _common(source: str) -> Masks:
    return Masks(whose=Whose.COMMON, source=source)


def _unknown(why: str, *, bound: bool = False) -> Masks:
    return Masks(whose=Whose.UNKNOWN, source=why, bound=bound)


# Whether the ranks in use leave out others of this node, which may get the same CPUs.


def observe_consistency(ranks: Ranks) -> tuple[Notice, ...]:
    """Warnings about ranks that were given as arguments, or are torchrun's."""
    return consistency(env.get, ranks)


def consistency(get: Get, ranks: Ranks) -> tuple[Notice, ...]:
    """:func:`observe_consistency` for any environment. Pure."""
    found = (_rank_differs(get, ranks), _ranks_beside(get, ranks))
    return tuple(notice for notice in found if notice is not None)


def _rank_differs(get: Get, ranks: Ranks) -> Notice | None:
    """The default of an old ``--local_rank`` option makes every process rank 0."""
    rank, size = number(get("LOCAL_RANK")), number(get("LOCAL_WORLD_SIZE"))
    is_other = rank not in (None, ranks.local_rank) and size == ranks.local_size
    if not get("TORCHELASTIC_RUN_ID") or not is_other:
        return None
    text = (
        f"set_affinity was called with local_rank {ranks.local_rank} of {size}, but torchrun set "
        f"LOCAL_RANK={rank}; the argument is used: processes that pass the same number get the "
        f"same GPU and CPUs, so pass LOCAL_RANK"
    )
    return Notice("rank-differs", text, rank=ranks.local_rank)


def _ranks_beside(get: Get, ranks: Ranks) -> Notice | None:
    """One rank, or one launcher's, plans for the whole node; another launcher has more there."""
    launcher = active_launcher(get, ranks)
    around = launcher is Launcher.UNKNOWN  # the rows from here on are around these ranks
    if around and ranks.local_size != 1:
        return None  # the caller's own numbers may well count all processes
    for row in present(get):
        around = around or row.launcher is launcher
        count = local_size(get, row) or 1
        if not around or row.launcher in (launcher, Launcher.UNKNOWN) or count == 1:
            continue
        if _binds_apart(get, row.launcher):
            continue
        same = (number(get(row.local_rank)), count) == (ranks.local_rank, ranks.local_size)
        if launcher is Launcher.TORCHRUN or not same:
            return _beside(ranks, row.launcher, count)
    return None  # two that agree started the same processes, as jsrun does for Open MPI


def _binds_apart(get: Get, launcher: Launcher) -> bool:
    """Whether it says that each of its processes here has CPUs of its own."""
    if launcher is Launcher.OPEN_MPI:
        return get("OMPI_MCA_orte_bound_at_launch") is not None
    listed = slurm.task_masks(get) if launcher is Launcher.SLURM else None
    return listed is not None and all(map(listed[0].isdisjoint, listed[1]))


def _beside(ranks: Ranks, launcher: Launcher, count: int) -> Notice:
    return Notice(
        "ranks-beside",
        f"this is rank {ranks.local_rank} of {ranks.local_size}, but {launcher.value} started "
        f"{count} processes of the job on this node, which may get the same CPUs; call "
        "set_affinity(local_rank, nproc_per_node) with the numbers of all ranks of this node, or "
        'with partition="machine"',
        rank=ranks.local_rank,
    )
