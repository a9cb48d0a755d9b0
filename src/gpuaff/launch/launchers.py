"""Which launcher started the ranks in use.

Launchers run inside each other (torchrun inside srun, mpirun inside a batch job), and a process
inherits the variables of all of them. Only the innermost one's speak of these ranks.
"""

from __future__ import annotations

from enum import Enum

from gpuaff.launch.ranks import Ranks
from gpuaff.launch.slurm import tasks_here
from gpuaff.launch.variables import Get, number


class Launcher(str, Enum):
    """Who started the ranks."""

    TORCHRUN = "torchrun"
    OPEN_MPI = "mpirun"
    SLURM = "srun"
    UNKNOWN = "unknown"
    """None that we know of: a script's own loop, multiprocessing, another launcher."""


def innermost(get: Get, ranks: Ranks) -> Launcher:
    """The launcher that started these ranks.

    Args:
        get: the environment.
        ranks: the ranks in use, wherever they come from. A launcher whose own count differs has
            started something else: a shell, one process that started the ranks itself.
    """
    for launcher, started in _RULES:
        if started(get, ranks):
            return launcher
    return Launcher.UNKNOWN


def _by_torchrun(get: Get, ranks: Ranks) -> bool:
    """LOCAL_RANK alone proves nothing: scripts set it from SLURM_LOCALID."""
    found = number(get("LOCAL_RANK")), number(get("LOCAL_WORLD_SIZE"))
    return bool(get("TORCHELASTIC_RUN_ID")) and found == (ranks.local_rank, ranks.local_size)


def _by_open_mpi(get: Get, ranks: Ranks) -> bool:
    return number(get("OMPI_COMM_WORLD_LOCAL_SIZE")) == ranks.local_size


def _by_srun(get: Get, ranks: Ranks) -> bool:
    return tasks_here(get) == ranks.local_size


_RULES = (
    (Launcher.TORCHRUN, _by_torchrun),
    (Launcher.OPEN_MPI, _by_open_mpi),
    (Launcher.SLURM, _by_srun),
)
"""From the inside out: torchrun runs inside the others, and mpirun inside a batch job."""
