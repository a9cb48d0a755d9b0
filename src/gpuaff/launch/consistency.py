"""Whether what is taken for the ranks of this node fits what launchers say of it."""

from __future__ import annotations

from gpuaff._system import env
from gpuaff.launch.launchers import Launcher, present, size_by
from gpuaff.launch.ranks import Ranks, active_launcher
from gpuaff.launch.slurm import binding, named_masks, tasks_here
from gpuaff.launch.variables import Get, number
from gpuaff.notices import Notice


def observe_consistency(ranks: Ranks) -> tuple[Notice, ...]:
    """Remarks on the ranks in use, which were given as arguments or are torchrun's."""
    return check_consistency(env.get, ranks)


def check_consistency(get: Get, ranks: Ranks) -> tuple[Notice, ...]:
    """:func:`observe`, with an environment from anywhere."""
    return (*_other_rank(get, ranks), *_others(get, ranks))


def _other_rank(get: Get, ranks: Ranks) -> tuple[Notice, ...]:
    """The default of an old ``--local_rank`` option makes every process rank 0."""
    told, size = _of_torchrun(get)
    if size != ranks.local_size or told is None or told == ranks.local_rank:
        return ()
    text = (
        f"set_affinity was called with local_rank {ranks.local_rank} of {size}, and torchrun says "
        f"LOCAL_RANK={told}: the arguments count; where several processes pass the same number "
        "they get the same GPU and the same CPUs"
    )
    return (Notice("rank-differs", text, rank=ranks.local_rank),)


def _others(get: Get, ranks: Ranks) -> tuple[Notice, ...]:
    """One rank, or one launcher's, plans as if it had the node; others tell of more on it."""
    mine = active_launcher(get, ranks)
    if ranks.local_size != 1 and mine is Launcher.UNKNOWN:
        return ()  # numbers of the caller's own: they may well count everybody
    around = ranks.local_size == 1 and mine is Launcher.UNKNOWN
    for row in present(get):
        around = around or row.launcher is mine
        count = None if row.launcher in (mine, Launcher.UNKNOWN) else size_by(get, row)
        if not around or not count or count == 1 or _binds_apart(get, row.launcher):
            continue
        same = (number(get(row.local_rank)), count) == (ranks.local_rank, ranks.local_size)
        if not same or mine is Launcher.TORCHRUN:
            return (_beside(ranks, row.launcher.value, count),)
    return ()  # two that agree have started the same processes, as jsrun for Open MPI


def _binds_apart(get: Get, launcher: Launcher) -> bool:
    """Whether it says that each of its processes here has CPUs of its own."""
    if launcher is Launcher.OPEN_MPI:
        return get("OMPI_MCA_orte_bound_at_launch") is not None
    return launcher is Launcher.SLURM and _srun_binds_apart(get)


def _srun_binds_apart(get: Get) -> bool:
    """Whether it says that no other task of this node has a CPU of this one's."""
    tasks, task = tasks_here(get), number(get("SLURM_LOCALID"))
    if not tasks or task is None or binding(get) not in ("mask_cpu", "map_cpu"):
        return False
    masks = named_masks(get, tasks)
    if masks is None or task >= tasks:
        return False
    others = masks[:task] + masks[task + 1 :]
    return all(map(masks[task].isdisjoint, others))


def _of_torchrun(get: Get) -> tuple[int | None, int | None]:
    if not get("TORCHELASTIC_RUN_ID"):
        return None, None
    return number(get("LOCAL_RANK")), number(get("LOCAL_WORLD_SIZE"))


def _beside(ranks: Ranks, launcher: str, count: int) -> Notice:
    return Notice(
        "ranks-beside",
        f"this is rank {ranks.local_rank} of {ranks.local_size}, and {launcher} has started "
        f"{count} processes of the job on this node: the others may get the same CPUs; call "
        "set_affinity(local_rank, nproc_per_node) with the numbers of all ranks of this node, or "
        'with partition="machine"',
        rank=ranks.local_rank,
    )
