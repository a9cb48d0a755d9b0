"""Whether what is taken for the ranks of this node fits what launchers say of it."""

from __future__ import annotations

from gpuaff.launch.launchers import Launcher, innermost
from gpuaff.launch.ranks import Ranks
from gpuaff.launch.slurm import binding, named_masks, tasks_here
from gpuaff.launch.variables import Get, number
from gpuaff.notices import Notice
from gpuaff.system import environ


def observe(ranks: Ranks) -> tuple[Notice, ...]:
    """Remarks on the ranks in use, which were given as arguments or are torchrun's."""
    return classify(environ.get, ranks)


def classify(get: Get, ranks: Ranks) -> tuple[Notice, ...]:
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
    """One rank, or one torchrun's, plans as if it had the node; launchers tell of others on it."""
    is_torchruns = innermost(get, ranks) is Launcher.TORCHRUN
    if ranks.local_size != 1 and not is_torchruns:
        return ()  # numbers of the caller's own: they may well count everybody
    for launcher, count in (
        ("torchrun", None if is_torchruns else _of_torchrun(get)[1]),
        ("mpirun", None if _mpirun_binds(get) else number(get("OMPI_COMM_WORLD_LOCAL_SIZE"))),
        ("srun", None if _srun_binds_apart(get) else _of_srun(get)),
    ):
        if count is not None and count > 1:
            return (_beside(ranks, launcher, count),)
    return ()


def _mpirun_binds(get: Get) -> bool:
    """Whether it says so: then each of its processes has CPUs of its own."""
    return get("OMPI_MCA_orte_bound_at_launch") is not None


def _srun_binds_apart(get: Get) -> bool:
    """Whether it says that no other task of this node has a CPU of this one's."""
    tasks, task = _of_srun(get), number(get("SLURM_LOCALID"))
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


def _of_srun(get: Get) -> int | None:
    is_task = number(get("SLURM_PROCID")) is not None and number(get("SLURM_LOCALID")) is not None
    return tasks_here(get) if is_task else None


def _beside(ranks: Ranks, launcher: str, count: int) -> Notice:
    return Notice(
        "ranks-beside",
        f"this is rank {ranks.local_rank} of {ranks.local_size}, and {launcher} has started "
        f"{count} processes of the job on this node: the others may get the same CPUs; call "
        "set_affinity(local_rank, nproc_per_node) with the numbers of all ranks of this node, or "
        'with partition="machine"',
        rank=ranks.local_rank,
    )
