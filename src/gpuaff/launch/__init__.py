"""The launchers: which variables of each give a process its place among the ranks.

One row per launcher, the innermost first: torchrun runs inside the others, mpirun inside a batch
job or a task of srun. Variables are inherited, so those of several launchers may be set at once.
``docs/launchers.md`` has the source of each name.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

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


def quoted(text: str | None, *, most: int = 40) -> str:
    """A variable's value as a message quotes it; a long one is cut."""
    if text is None:
        return "(unset)"
    return repr(text if len(text) <= most else f"{text[: most - 3]}...")


class Launcher(str, Enum):
    """The program that started the ranks."""

    TORCHRUN = "torchrun"
    DEEPSPEED = "deepspeed"
    HOROVOD = "horovodrun"
    DRAGON = "dragon"
    OPEN_MPI = "mpirun"  # Open MPI 4 (ORTE) and 5 (PRRTE)
    HYDRA = "mpiexec"  # MPICH, Intel MPI, and what is built from them
    MVAPICH = "mpirun_rsh"
    PALS = "PALS mpiexec"  # HPE Cray's Parallel Application Launch Service
    JSRUN = "jsrun"
    FLUX = "flux run"
    SLURM = "srun"
    UNKNOWN = "unknown"  # another launcher, a script's own loop, or none


class Row(NamedTuple):
    """The variables that a launcher sets for each of its processes; ``""``: it sets none."""

    launcher: Launcher
    local_rank: str
    local_size: str
    rank: str
    size: str
    node: str = ""
    nodes: str = ""
    marks: tuple[str, ...] = ()  # must be set too, because other programs use the names above
    run: tuple[str, ...] = ()  # distinguish one run of the launcher from another
    programs: tuple[str, ...] = ()  # process names of what starts ranks, unless it is Python
    unbound: str = "without taskset or numactl around each"  # how ranks get no masks of their own

    @property
    def is_python(self) -> bool:
        """Whether it is torchrun or its like, which run inside the others."""
        return not self.programs and self.launcher is not Launcher.UNKNOWN


def _row(launcher: Launcher, names: str, *, unbound: str = "", **words: str) -> Row:
    """A row; ``names`` are those of the numbers, in the order of the fields, ``-`` for none."""
    fields: list[Any] = ["" if name == "-" else name for name in names.split()]
    more: dict[str, Any] = {field: tuple(text.split()) for field, text in words.items()}
    if unbound:
        more["unbound"] = unbound
    return Row(launcher, *fields, **more)


_DRAGON = "{0}LOCAL_RANK {0}LOCAL_WORLD_SIZE {0}RANK {0}WORLD_SIZE {0}GROUP_RANK"

ROWS = (
    _row(
        Launcher.TORCHRUN,
        "LOCAL_RANK LOCAL_WORLD_SIZE RANK WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE",
        marks="TORCHELASTIC_RUN_ID",
        run="LOCAL_WORLD_SIZE TORCHELASTIC_RUN_ID",
        unbound="torchrun without --numa-binding, and without taskset around each",
    ),
    _row(
        Launcher.DEEPSPEED,
        "LOCAL_RANK LOCAL_SIZE RANK WORLD_SIZE CROSS_RANK CROSS_SIZE",
        marks="CROSS_RANK LOCAL_SIZE",
    ),
    _row(
        Launcher.HOROVOD,
        "HOROVOD_LOCAL_RANK HOROVOD_LOCAL_SIZE HOROVOD_RANK HOROVOD_SIZE"
        " HOROVOD_CROSS_RANK HOROVOD_CROSS_SIZE",
    ),
    _row(Launcher.DRAGON, _DRAGON.format("_DRAGON_CG_")),  # released: dragon.ai.collective_group
    _row(Launcher.DRAGON, _DRAGON.format("DRAGON_PG_")),  # later: configure_training_group
    _row(
        Launcher.OPEN_MPI,
        "OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE"
        " OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE",
        run="PMIX_NAMESPACE",
        programs="mpirun mpirun.openmpi mpiexec.openmpi orterun orted prte prted prterun",
        unbound="mpirun --bind-to none",
    ),
    _row(
        Launcher.HYDRA,
        "MPI_LOCALRANKID MPI_LOCALNRANKS PMI_RANK PMI_SIZE",
        programs="hydra_pmi_proxy hydra_bstrap_pr",
        unbound="mpiexec -bind-to none",
    ),
    _row(
        Launcher.MVAPICH,
        "MV2_COMM_WORLD_LOCAL_RANK MV2_COMM_WORLD_LOCAL_SIZE"
        " MV2_COMM_WORLD_RANK MV2_COMM_WORLD_SIZE",
        programs="mpispawn",
    ),
    _row(
        Launcher.PALS,
        "PALS_LOCAL_RANKID PALS_LOCAL_SIZE PALS_RANKID PMI_SIZE PALS_NODEID",
        programs="palsd",
    ),
    _row(
        Launcher.JSRUN,
        "JSM_NAMESPACE_LOCAL_RANK JSM_NAMESPACE_LOCAL_SIZE JSM_NAMESPACE_RANK JSM_NAMESPACE_SIZE",
        programs="jsmd",
    ),
    _row(
        Launcher.FLUX,
        "FLUX_TASK_LOCAL_ID - FLUX_TASK_RANK FLUX_JOB_SIZE - FLUX_JOB_NNODES",
        run="FLUX_JOB_ID",
        programs="flux-shell",
    ),
    _row(
        Launcher.SLURM,
        "SLURM_LOCALID SLURM_STEP_TASKS_PER_NODE SLURM_PROCID SLURM_STEP_NUM_TASKS"
        " SLURM_NODEID SLURM_STEP_NUM_NODES",
        marks="SLURM_STEP_TASKS_PER_NODE",
        run="SLURM_STEP_ID SLURM_JOB_ID",
        programs="slurmstepd",
        unbound="srun --cpu-bind=none",
    ),
    # Weakest: many scripts set these from the numbers of the launcher around them.
    _row(Launcher.UNKNOWN, "LOCAL_RANK LOCAL_WORLD_SIZE RANK WORLD_SIZE"),
)
"""Innermost first; last come torchrun's names where torchrun did not set them."""

BY_PROGRAM = {program: row.launcher for row in ROWS for program in row.programs}
