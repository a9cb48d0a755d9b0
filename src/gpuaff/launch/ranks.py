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
    rank, size = number(said), number(told)
    if rank is not None and size is not None and rank < size:
        return Ranks(local_rank=rank, local_size=size), None
    return None, Notice(
        "bad-rank",
        f"LOCAL_RANK={said!r} and LOCAL_WORLD_SIZE={told!r} name no rank of this node; "
        "call set_affinity(local_rank, nproc_per_node)",
    )


def _numbers(get: Get) -> str:
    """The two numbers as a call has them, where a launcher that we don't ask tells them."""
    if number(get("OMPI_COMM_WORLD_LOCAL_RANK")) is not None:
        names = ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
        return ", ".join(f"int(os.environ['{name}'])" for name in names)
    tasks = tasks_here(get)
    if tasks and number(get("SLURM_LOCALID")) is not None:
        return f"int(os.environ['SLURM_LOCALID']), {tasks}"
    return "local_rank, nproc_per_node"
