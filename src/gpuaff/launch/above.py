"""What started this rank: the process that is above it and above its wrappers.

A launcher that binds nobody hands its own mask down. A wrapper between it and Python (a shell,
``timeout``, a profiler) may have been bound for this rank alone, and then has the rank's mask. It
is known by its variables: it was given the rank's own, which the launcher has not.
"""

from __future__ import annotations

from gpuaff.cpuset import CpuSet
from gpuaff.launch.launchers import Launcher, innermost
from gpuaff.launch.ranks import Ranks
from gpuaff.launch.variables import Get
from gpuaff.records import dataclass
from gpuaff.system import environ, kernel

_OWN = {
    Launcher.TORCHRUN: ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
    Launcher.OPEN_MPI: ("OMPI_COMM_WORLD_LOCAL_RANK", "PMIX_NAMESPACE"),
    Launcher.SLURM: ("SLURM_LOCALID", "SLURM_PROCID", "SLURM_STEP_ID", "SLURM_JOB_ID"),
}
"""The variables that are a rank's own, and those that tell one run of the launcher from another:
it may run inside another one's rank, and then has such variables itself."""

_OF_OTHERS = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""The same for launchers that have no row there."""

_MOST = 64
"""The most wrappers; a chain of processes that changes while it is read has no end."""


@dataclass(frozen=True, kw_only=True)
class Above:
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


def observe(ranks: Ranks) -> Above:
    """Look at the processes above this one."""
    parent = kernel.parent_id()
    starter = parent if ranks.local_size == 1 else _starter(environ.get, ranks, parent)
    mask = kernel.affinity_of(parent)
    return Above(
        parent=mask,
        starter=mask if starter == parent else kernel.affinity_of(starter),
        starter_name=kernel.name_of(starter),
    )


def has_variables_of(ranks: Ranks, pid: int) -> bool:
    """Whether a process was started with this rank's variables.

    Then it is the rank itself or was started by it, and no launcher stands between them and us.

    Args:
        ranks: the rank that this process is, or was started by.
        pid: the other process; one that can't be read was not.
    """
    names = _OWN.get(innermost(environ.get, ranks), _OF_OTHERS)
    return _carries(pid, {name: environ.get(name) for name in names})


def _starter(get: Get, ranks: Ranks, parent: int | None) -> int | None:
    names = _OWN.get(innermost(get, ranks), ())
    own = {name: get(name) for name in names}
    if parent is None or not names or not own[names[0]]:
        return parent
    found: int | None = parent
    for _ in range(_MOST):
        if found is None or not _carries(found, own):
            break
        found = kernel.parent_of(found)
    return found


def _carries(pid: int, own: dict[str, str | None]) -> bool:
    """Whether a process was started with a rank's variables; who can't be read was not."""
    variables = kernel.variables_of(pid)
    return all(variables.get(name) == value for name, value in own.items())
