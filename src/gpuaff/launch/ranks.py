"""Which of a node's processes this is, by what its launcher put into the environment."""

from __future__ import annotations

from gpuaff.launch.slurm import tasks_here
from gpuaff.launch.variables import Get, number
from gpuaff.notices import Notice
from gpuaff.records import dataclass
from gpuaff.system import environ


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process's place among those of its job on this node.

    Attributes:
        local_rank: 0 … local_size − 1.
        local_size: how many there are.
    """

    local_rank: int
    local_size: int


ALONE = Ranks(local_rank=0, local_size=1)


def from_environment() -> tuple[Ranks | None, Notice | None]:
    """Read torchrun's LOCAL_RANK and LOCAL_WORLD_SIZE.

    Returns:
        The ranks, or None when the variables contradict themselves; and what to say about it.
        When neither is set the process is taken to be alone.
    """
    said, told = environ.get("LOCAL_RANK"), environ.get("LOCAL_WORLD_SIZE")
    if not said and not told:
        return ALONE, Notice(
            "no-rank",
            "neither LOCAL_RANK nor LOCAL_WORLD_SIZE is set: taking this to be rank 0 of 1; "
            f"start under torchrun or call set_affinity({_numbers(environ.get)})",
        )
    ranks = _ranks(said, number(told))
    if ranks is not None:
        return ranks, None
    return None, Notice(
        "bad-rank",
        f"LOCAL_RANK={said!r} and LOCAL_WORLD_SIZE={told!r} name no rank of this node; "
        "call set_affinity(local_rank, nproc_per_node)",
    )


def of_launcher() -> Ranks | None:
    """The ranks by whatever launcher has started this process; None when none has."""
    return launched(environ.get)


def launched(get: Get) -> Ranks | None:
    """:func:`of_launcher`, with an environment from anywhere.

    The innermost launcher counts (:mod:`gpuaff.launch.launchers`); where its numbers name no rank,
    that is None too. Last come numbers as torchrun's from a launcher that we don't know.
    """
    torchrun = get("LOCAL_RANK"), number(get("LOCAL_WORLD_SIZE"))
    if get("TORCHELASTIC_RUN_ID") and torchrun[0]:
        return _ranks(*torchrun)
    open_mpi = get("OMPI_COMM_WORLD_LOCAL_RANK"), number(get("OMPI_COMM_WORLD_LOCAL_SIZE"))
    # MPICH and Intel MPI: the proxies of hydra set both for each process.
    hydra = get("MPI_LOCALRANKID"), number(get("MPI_LOCALNRANKS"))
    is_task = get("SLURM_STEP_ID") != _INTERACTIVE
    srun = get("SLURM_LOCALID"), tasks_here(get) if is_task else None
    for said, size in (open_mpi, hydra, srun, torchrun):
        if said and size is not None:
            return _ranks(said, size)
    return None


_INTERACTIVE = str(0xFFFFFFFA)
"""``SLURM_INTERACTIVE_STEP`` of ``slurm.h``: the shell of ``salloc``, a step of one task."""


def _ranks(said: str | None, size: int | None) -> Ranks | None:
    rank = number(said)
    if rank is None or size is None or rank >= size:
        return None
    return Ranks(local_rank=rank, local_size=size)


def _numbers(get: Get) -> str:
    """The two numbers as a call has them, where a launcher that we don't ask tells them."""
    if number(get("OMPI_COMM_WORLD_LOCAL_RANK")) is not None:
        names = ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
        return ", ".join(f"int(os.environ['{name}'])" for name in names)
    tasks = tasks_here(get)
    if tasks and number(get("SLURM_LOCALID")) is not None:
        return f"int(os.environ['SLURM_LOCALID']), {tasks}"
    return "local_rank, nproc_per_node"
