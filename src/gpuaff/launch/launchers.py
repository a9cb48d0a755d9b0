"""The launchers: which variables of each tell a process its place.

One row a launcher. ``docs/launchers.md`` says where each name comes from and what was seen to be
set. Rows are in order, the innermost first: torchrun runs inside the others, mpirun inside a batch
job or a task, srun inside nothing. Their variables are inherited, so all of them may be there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from gpuaff.launch import slurm
from gpuaff.launch.variables import Get, number


class Launcher(str, Enum):
    """Who started the ranks."""

    TORCHRUN = "torchrun"
    DEEPSPEED = "deepspeed"
    HOROVOD = "horovodrun"
    DRAGON = "dragon"
    OPEN_MPI = "mpirun"
    """Open MPI's, of ORTE (up to 4) and of PRRTE (5)."""
    HYDRA = "mpiexec"
    """That of MPICH and of Intel MPI, and of those made from them."""
    MVAPICH = "mpirun_rsh"
    PALS = "PALS mpiexec"
    """That of HPE Cray's Parallel Application Launch Service."""
    JSRUN = "jsrun"
    FLUX = "flux run"
    SLURM = "srun"
    UNKNOWN = "unknown"
    """Another one, or a script's own loop, or nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Which variables a launcher sets for each of its processes; None: it sets none for that.

    Attributes:
        launcher: who it is.
        local_rank: this process's number on its node.
        local_size: how many there are on this node.
        rank: this process's number in the job.
        size: how many there are in the job.
        node: this node's number.
        nodes: how many nodes there are.
        marks: what must be set as well, as other programs set variables of those names too.
        run: what tells one run of the launcher from another.
        programs: what the kernel calls its programs that start processes. None where Python does:
            then a process above that one is no sign of another launcher in between.
    """

    launcher: Launcher
    local_rank: str
    local_size: str | None = None
    rank: str | None = None
    size: str | None = None
    node: str | None = None
    nodes: str | None = None
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
"""From the inside out; last what many programs set and read as torchrun does."""

BY_PROGRAM = {program: row.launcher for row in ROWS for program in row.programs}


def present(get: Get) -> Iterator[Row]:
    """The rows whose variables are set, whatever they hold, from the inside out.

    Variables as torchrun's count once: for the launcher whose marks are there. One of them alone is
    part of what somebody has meant.
    """
    named: set[str] = set()
    for row in ROWS:
        is_anybodys = row.launcher is Launcher.UNKNOWN
        enough = any if is_anybodys else all
        needed = (row.local_rank, row.local_size or "") if is_anybodys else _needed(row)
        if row.local_rank in named or not enough(map(get, needed)):
            continue
        if row.launcher is Launcher.SLURM and slurm.is_shell(get):
            continue
        named.add(row.local_rank)
        yield row


def _needed(row: Row) -> tuple[str, ...]:
    return (row.local_rank, *row.marks)


def size_by(get: Get, row: Row) -> int | None:
    """How many processes a launcher says that it has started on this node; None: not told."""
    if row.launcher is Launcher.SLURM:
        return slurm.tasks_here(get)
    return None if row.local_size is None else number(get(row.local_size))
