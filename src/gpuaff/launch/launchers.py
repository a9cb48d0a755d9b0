"""The launchers: which variables of each give a process its place among the ranks.

One row per launcher, the innermost first: torchrun runs inside the others, mpirun inside a batch
job or a task of srun. Variables are inherited, so those of several launchers may be set at once.
``docs/launchers.md`` has the source of each name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from gpuaff.cpuset import MAX_CPU_ID
from gpuaff.options import natural

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

Get: TypeAlias = Callable[[str], "str | None"]
"""Reads a variable, None when it is unset: ``env.get``, or the ``get`` of a test's dict."""


def number(text: str | None) -> int | None:
    """A number of ranks or devices; None when it is malformed or above 65535."""
    found = natural(text)
    return None if found is None or found > MAX_CPU_ID else found


class Launcher(str, Enum):
    """The program that started the ranks."""

    TORCHRUN = "torchrun"
    DEEPSPEED = "deepspeed"
    HOROVOD = "horovodrun"
    DRAGON = "dragon"
    OPEN_MPI = "mpirun"
    """Open MPI 4 (ORTE) and 5 (PRRTE)."""
    HYDRA = "mpiexec"
    """MPICH, Intel MPI, and what is built from them."""
    MVAPICH = "mpirun_rsh"
    PALS = "PALS mpiexec"
    """HPE Cray's Parallel Application Launch Service."""
    JSRUN = "jsrun"
    FLUX = "flux run"
    SLURM = "srun"
    UNKNOWN = "unknown"
    """Another launcher, a script's own loop, or none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The variables that a launcher sets for each of its processes; ``""``: it sets none.

    Attributes:
        launcher: the launcher.
        local_rank: this process's number on its node.
        local_size: the number of processes on this node.
        rank: this process's number in the job.
        size: the number of processes in the job.
        node: this node's number.
        nodes: the number of nodes.
        marks: variables that must be set too, because other programs use the names above.
        run: variables that distinguish one run of the launcher from another.
        programs: the process names of the launcher's programs that start ranks; empty for Python
            programs, which are not recognised among a process's ancestors.
    """

    launcher: Launcher
    local_rank: str
    local_size: str = ""
    rank: str = ""
    size: str = ""
    node: str = ""
    nodes: str = ""
    marks: tuple[str, ...] = ()
    run: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()


def _of_dragon(prefix: str) -> Row:
    return Row(
        launcher=Launcher.DRAGON,
        local_rank=f"{prefix}LOCAL_RANK",
        local_size=f"{prefix}LOCAL_WORLD_SIZE",
        rank=f"{prefix}RANK",
        size=f"{prefix}WORLD_SIZE",
        node=f"{prefix}GROUP_RANK",
    )


ROWS = (
    Row(
        launcher=Launcher.TORCHRUN,
        local_rank="LOCAL_RANK",
        local_size="LOCAL_WORLD_SIZE",
        rank="RANK",
        size="WORLD_SIZE",
        node="GROUP_RANK",
        nodes="GROUP_WORLD_SIZE",
        marks=("TORCHELASTIC_RUN_ID",),
        run=("LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
    ),
    Row(
        launcher=Launcher.DEEPSPEED,
        local_rank="LOCAL_RANK",
        local_size="LOCAL_SIZE",
        rank="RANK",
        size="WORLD_SIZE",
        node="CROSS_RANK",
        nodes="CROSS_SIZE",
        marks=("CROSS_RANK", "LOCAL_SIZE"),
    ),
    Row(
        launcher=Launcher.HOROVOD,
        local_rank="HOROVOD_LOCAL_RANK",
        local_size="HOROVOD_LOCAL_SIZE",
        rank="HOROVOD_RANK",
        size="HOROVOD_SIZE",
        node="HOROVOD_CROSS_RANK",
        nodes="HOROVOD_CROSS_SIZE",
    ),
    _of_dragon("_DRAGON_CG_"),  # released: dragon.ai.collective_group
    _of_dragon("DRAGON_PG_"),  # later: ProcessGroup.configure_training_group
    Row(
        launcher=Launcher.OPEN_MPI,
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        run=("PMIX_NAMESPACE",),
        programs=(
            *("mpirun", "mpirun.openmpi", "mpiexec.openmpi", "orterun", "orted"),
            *("prte", "prted", "prterun"),
        ),
    ),
    Row(
        launcher=Launcher.HYDRA,
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
        rank="PMI_RANK",
        size="PMI_SIZE",
        programs=("hydra_pmi_proxy", "hydra_bstrap_pr"),
    ),
    Row(
        launcher=Launcher.MVAPICH,
        local_rank="MV2_COMM_WORLD_LOCAL_RANK",
        local_size="MV2_COMM_WORLD_LOCAL_SIZE",
        rank="MV2_COMM_WORLD_RANK",
        size="MV2_COMM_WORLD_SIZE",
        programs=("mpispawn",),
    ),
    Row(
        launcher=Launcher.PALS,
        local_rank="PALS_LOCAL_RANKID",
        local_size="PALS_LOCAL_SIZE",
        rank="PALS_RANKID",
        size="PMI_SIZE",
        node="PALS_NODEID",
        programs=("palsd",),
    ),
    Row(
        launcher=Launcher.JSRUN,
        local_rank="JSM_NAMESPACE_LOCAL_RANK",
        local_size="JSM_NAMESPACE_LOCAL_SIZE",
        rank="JSM_NAMESPACE_RANK",
        size="JSM_NAMESPACE_SIZE",
        programs=("jsmd",),
    ),
    Row(
        launcher=Launcher.FLUX,
        local_rank="FLUX_TASK_LOCAL_ID",
        rank="FLUX_TASK_RANK",
        size="FLUX_JOB_SIZE",
        nodes="FLUX_JOB_NNODES",
        run=("FLUX_JOB_ID",),
        programs=("flux-shell",),
    ),
    Row(
        launcher=Launcher.SLURM,
        local_rank="SLURM_LOCALID",
        local_size="SLURM_STEP_TASKS_PER_NODE",
        rank="SLURM_PROCID",
        size="SLURM_STEP_NUM_TASKS",
        node="SLURM_NODEID",
        nodes="SLURM_STEP_NUM_NODES",
        marks=("SLURM_STEP_TASKS_PER_NODE",),
        run=("SLURM_STEP_ID", "SLURM_JOB_ID"),
        programs=("slurmstepd",),
    ),
    Row(
        launcher=Launcher.UNKNOWN,
        local_rank="LOCAL_RANK",
        local_size="LOCAL_WORLD_SIZE",
        rank="RANK",
        size="WORLD_SIZE",
    ),
)
"""Innermost first; last come torchrun's names where torchrun did not set them."""

BY_PROGRAM = {program: row.launcher for row in ROWS for program in row.programs}
