"""How the ranks of this node are bound: whether all may use the same CPUs, and see the same GPUs.

Each rank plans for all of them. It can where all have the same mask, or where the launcher lists
the mask of every rank; else it plans for itself only. One visible GPU and several ranks: all are on
it, unless the launcher says otherwise, or the rank has claimed it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from gpuaff._system import env, kernel
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.launch import Get, Launcher, inherited, number
from gpuaff.launch.inherited import ParentClaim
from gpuaff.launch.ranks import Ranks, active_row, local_size, present
from gpuaff.notices import Notice


class Ancestry(NamedTuple):
    """The masks of processes above this one, observed at one moment; None: unreadable."""

    parent: CpuSet | None
    # What started the rank and its wrappers (a shell, ``timeout``, a profiler), else the parent.
    starter: CpuSet | None
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


class Masks(NamedTuple):
    """The masks of this node's ranks: all have this one's, unless they are unknown or listed."""

    unknown: str = ""  # why they are unknown, in words
    named: tuple[CpuSet, ...] | None = None  # by local rank, where they differ and are listed
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

    ``own`` are the CPUs that this process may use, before anything is pinned, observed with
    ``above``: a change of a cpuset changes both. ``cpuset`` observes those of its cpuset.
    """
    if ranks.local_size == 1:
        listed = _listed_masks(get)  # of a launcher that may have started other ranks
        is_bound = listed is not None and listed[0] & online == own
        return Masks(bound=is_bound or get(_MPIRUN_BOUND) is not None)
    row = active_row(get, ranks)
    kind = None
    if row.launcher is Launcher.SLURM:
        from gpuaff.launch import slurm

        kind = slurm.binding(get)
    is_of_mpirun = row.launcher is Launcher.OPEN_MPI
    is_of_wrapper = above.starter_name not in _PRRTE and own != online
    masks = Masks()
    if kind == "none":
        # Tasks have the mask of the step's daemon, which is no narrower than its cpuset unless the
        # system made it so (``CPUAffinity=`` of systemd). One that lacks CPUs is in a wrapper.
        granted = None if own == above.starter else cpuset()
        if granted is not None and own != granted & online:
            cpus = format_cpulist(granted & online)
            masks = Masks(f"srun bound no rank, but its cpuset has the CPUs {cpus}")
    elif kind is not None:
        masks = _of_bound_task(get, ranks, kind, own, online)
    elif is_of_mpirun and get(_MPIRUN_BOUND) is not None:
        masks = Masks("mpirun bound each rank to CPUs of its own", bound=True)
    elif is_of_mpirun and get("PRTE_LAUNCHED") is not None and is_of_wrapper:
        masks = Masks("mpirun does not say whether it bound the ranks")
    # A launcher that does not bind hands its own mask down. Where its process is unreadable (in a
    # container), each rank may be in a cpuset of its own; the whole machine is no cpuset's.
    elif own != (online if above.starter is None else above.starter):
        hidden = "that cannot be read here"
        cpus = hidden if above.starter is None else format_cpulist(above.starter)
        masks = Masks(f"the process that started this rank may use CPUs {cpus}")
    return masks._replace(unbound=row.unbound)


def _listed_masks(get: Get) -> tuple[CpuSet, list[CpuSet]] | None:
    """The CPUs that srun lists for this task, and those of the node's others."""
    if get("SLURM_LOCALID") is None:
        return None
    from gpuaff.launch import slurm  # only tasks of Slurm need it

    return slurm.task_masks(get)


def _of_bound_task(get: Get, ranks: Ranks, kind: str, own: CpuSet, online: CpuSet) -> Masks:
    """By srun's list, unless this rank's own mask contradicts it."""
    from gpuaff.launch import slurm

    listed, why = slurm.named_masks(get, ranks.local_size), ""
    if kind not in slurm.LISTED:
        why = f"srun bound the ranks by {kind[:40]}"
    elif number(get("SLURM_LOCALID")) != ranks.local_rank:
        why = "srun numbers the ranks differently (SLURM_LOCALID)"
    elif listed is None:
        why = "SLURM_CPU_BIND_LIST is malformed"
    if why or listed is None:
        return Masks(why, bound=True)
    named = tuple(mask & online for mask in listed)
    mine = named[ranks.local_rank]
    others = (*named[: ranks.local_rank], *named[ranks.local_rank + 1 :])
    if not all(named):
        return Masks("SLURM_CPU_BIND_LIST has CPUs that are not there")
    # A mask may be narrower than listed where no other rank may use the rest: no other plan
    # depends on it.
    if own != mine and not (own <= mine and all(map(mine.isdisjoint, others))):
        return Masks(f"SLURM_CPU_BIND_LIST gives it {format_cpulist(mine)}")
    return Masks(named=None if set(named) == {mine} else named, bound=True)


def consistency(ranks: Ranks, get: Get = env.get) -> tuple[Notice, ...]:
    """Warnings where the ranks in use leave out others of this node, which may get the same CPUs.

    For ranks that were given as arguments, and for torchrun's. The default of an old
    ``--local_rank`` option makes every process rank 0.
    """
    rank, size = number(get("LOCAL_RANK")), number(get("LOCAL_WORLD_SIZE"))
    is_other = rank not in (None, ranks.local_rank) and size == ranks.local_size
    beside = _ranks_beside(get, ranks)
    if not is_other or not get("TORCHELASTIC_RUN_ID"):
        return beside
    text = (
        f"set_affinity was called with local_rank {ranks.local_rank} of {size}, but torchrun set "
        f"LOCAL_RANK={rank}; the argument is used: processes that pass the same number get the "
        "same GPU and CPUs, so pass LOCAL_RANK"
    )
    return (Notice("rank-differs", text, rank=ranks.local_rank), *beside)


def _ranks_beside(get: Get, ranks: Ranks) -> tuple[Notice, ...]:
    """One rank, or one launcher's, plans for the whole node; another launcher has more there."""
    launcher = active_row(get, ranks).launcher
    around = launcher is Launcher.UNKNOWN  # the rows from here on are around these ranks
    if around and ranks.local_size != 1:
        return ()  # the caller's own numbers may well count all processes
    for row in present(get):
        around = around or row.launcher is launcher
        count = local_size(get, row) or 1
        if not around or row.launcher in (launcher, Launcher.UNKNOWN) or count == 1:
            continue
        # Two that agree started the same processes, as jsrun does for Open MPI.
        same = (number(get(row.local_rank)), count) == (ranks.local_rank, ranks.local_size)
        agrees = same and launcher is not Launcher.TORCHRUN
        if not agrees and not _binds_apart(get, row.launcher):
            text = (
                f"this is rank {ranks.local_rank} of {ranks.local_size}, but {row.launcher.value} "
                f"started {count} processes of the job on this node, which may get the same CPUs; "
                "call set_affinity(local_rank, nproc_per_node) with the numbers of all ranks of "
                'this node, or with partition="machine"'
            )
            return (Notice("ranks-beside", text, rank=ranks.local_rank),)
    return ()


def _binds_apart(get: Get, launcher: Launcher) -> bool:
    """Whether it says that each of its processes here has CPUs of its own."""
    if launcher is Launcher.OPEN_MPI:
        return get(_MPIRUN_BOUND) is not None
    listed = _listed_masks(get) if launcher is Launcher.SLURM else None
    return listed is not None and all(map(listed[0].isdisjoint, listed[1]))


# ---- GPUs ----------------------------------------------------------------------------------------


class OwnGpus(NamedTuple):
    """The GPUs that this rank sees are its own; the other ranks see others.

    Indices count the machine's GPUs in the order of their PCI addresses; None is unknown.
    """

    named: tuple[int, ...] | None = None  # the GPUs of all ranks
    own: tuple[int, ...] | None = None  # those of this rank, as the launcher counts
    on_node: int | None = None  # how many the job has on this node
    shared: bool = False  # whether other ranks may be on this rank's GPUs, too
    claimed: bool = False  # whether this rank claimed them for itself, so that no other is on them


def own_gpus(
    ranks: Ranks, *, visible: int, is_rank: bool = False, get: Get = env.get
) -> OwnGpus | None:
    """What makes the visible GPUs this rank's own; None: all ranks see the same ones.

    ``is_rank`` says that this process is known to be the rank itself, and no worker of it.
    """
    if ranks.local_size == 1 or not visible:
        return None
    is_worker = not is_rank and inherited.is_child()
    claim, _ = inherited.claim_in_environment(get)
    # A worker that a rank started has the rank's variables, too, and shares what it claimed.
    if claim and (claim.pid == os.getpid() or (not is_worker and _is_of_rank(get, claim, ranks))):
        facts = kernel.thread_facts(claim.pid, claim.pid)  # ids are used again
        if facts is None or facts.started == claim.started:
            return OwnGpus(claimed=True)
    return None if is_worker else _by_launcher(get, ranks, visible)


def _is_of_rank(get: Get, claim: ParentClaim, ranks: Ranks) -> bool:
    """Whether a rank claimed for itself; a claim around the launcher is for all ranks."""
    # ``gpuaff run --per-rank`` claims, and becomes its command: Python, or a wrapper of Python
    # (``sh -c``), which was started with the rank's own variables, as the launcher was not.
    own = own_variables(get, ranks)
    return bool(own) and carries(claim.pid, own)


def _by_launcher(get: Get, ranks: Ranks, visible: int) -> OwnGpus | None:
    """What the launcher says, for several ranks and at least one visible GPU."""
    if ranks.sources.get("local_rank") == "RANK":  # torchrun --virtual-local-rank
        return OwnGpus()
    if active_row(get, ranks).launcher is not Launcher.SLURM:
        return None
    # A worker and a task in a wrapper look alike: the same variables, and a process in between.
    # Only multiprocessing marks its workers; for others the number decides.
    if number(get("SLURM_LOCALID")) != ranks.local_rank:
        return None  # a worker that a task started, or ranks numbered differently
    return _of_task(get, ranks, visible)


def _of_task(get: Get, ranks: Ranks, visible: int) -> OwnGpus | None:
    from gpuaff.launch import slurm

    step, on_node = slurm.gpu_indices(get("SLURM_STEP_GPUS")), number(get("SLURM_GPUS_ON_NODE"))
    if on_node is not None and on_node <= visible:
        return None  # every task sees all that the step has here
    is_part = step is not None and on_node is not None and len(step) < on_node
    is_bound, is_shared = slurm.gpus_of_tasks(get, ranks.local_size)
    if not is_part and not is_bound:
        return None
    own = OwnGpus(on_node=on_node, shared=is_shared)
    if step is not None and not is_part and len(step) > visible:
        return own._replace(named=step)
    # The batch script's GPUs: in a job of several nodes they are the first one's only.
    job = slurm.gpu_indices(get("SLURM_JOB_GPUS"))
    is_here = number(get("SLURM_JOB_NUM_NODES")) == 1 and len(job or ()) >= (on_node or 0)
    return own._replace(named=job if is_here else None, own=step)


def sharers(
    ranks: Ranks, *, visible: int, claim: ParentClaim | None = None, get: Get = env.get
) -> Ranks | None:
    """The ranks that were granted the same GPUs as this process; None: all are this process's.

    ``visible`` is how many GPUs are candidates, by what CUDA shows and the scheduler lists.
    """
    # One: usually a launcher or a wrapper shows each rank its own. If all are on the same one after
    # all, the first gets it, and the others an error that says so.
    if not ranks.is_told or ranks.local_size == 1 or visible == 1:
        return None
    if visible and _by_launcher(get, ranks, visible) is not None:
        return None
    is_claim_of_rank = claim is not None and _is_of_rank(get, claim, ranks)
    return None if is_claim_of_rank else ranks
