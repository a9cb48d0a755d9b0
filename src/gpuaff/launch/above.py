"""What started this rank: the process that is above it and above its wrappers.

A launcher that binds nobody hands its own mask down. A wrapper between it and Python (a shell,
``timeout``, a profiler) may have been bound for this rank alone, and then has the rank's mask. It
is known by its variables: it was given the rank's own, which the launcher has not.
"""

from __future__ import annotations

from gpuaff.cpuset import CpuSet
from gpuaff.launch.innermost import innermost
from gpuaff.launch.launchers import ROWS, Launcher
from gpuaff.launch.ranks import Ranks
from gpuaff.launch.variables import Get
from gpuaff.records import dataclass
from gpuaff.system import environ, kernel

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
    launcher = innermost(get, ranks)
    for row in ROWS:
        if row.launcher is launcher is not Launcher.UNKNOWN and get(row.local_rank):
            names = (row.local_rank, row.rank, *row.run)
            return {name: get(name) for name in names if name}
    return {}


def carries(pid: int, own: dict[str, str | None]) -> bool:
    """Whether a process was started with a rank's variables; who can't be read was not."""
    variables = kernel.variables_of(pid)
    return all(variables.get(name) == value for name, value in own.items())
