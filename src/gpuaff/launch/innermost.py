"""Which launcher started the ranks in use.

Launchers run inside each other (torchrun inside srun, mpirun inside a batch job), and a process
inherits the variables of all of them. Only the innermost one's speak of these ranks.
"""

from __future__ import annotations

from gpuaff.launch.launchers import Launcher, Row, present, size_by
from gpuaff.launch.ranks import Ranks
from gpuaff.launch.variables import Get, number


def innermost(get: Get, ranks: Ranks) -> Launcher:
    """The launcher that started these ranks.

    Args:
        get: the environment.
        ranks: the ranks in use. Where they were given as arguments, a launcher whose own count
            differs has started something else: a shell, one process that started the ranks itself.
    """
    if ranks.launcher is not Launcher.UNKNOWN:
        return ranks.launcher
    for row in present(get):
        if row.launcher is not Launcher.UNKNOWN and _started(get, row, ranks):
            return row.launcher
    return Launcher.UNKNOWN


def _started(get: Get, row: Row, ranks: Ranks) -> bool:
    """LOCAL_RANK and LOCAL_SIZE alone prove little: scripts set them, too."""
    if row.local_rank == "LOCAL_RANK" and number(get(row.local_rank)) != ranks.local_rank:
        return False
    return size_by(get, row) == ranks.local_size
