"""``data/environments``: what launchers were seen to put into the environment, seen once more.

``RECORD=1 pytest --slow -p no:randomly tests/schedulers/test_recorded.py`` writes the records.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gpuaff.cpuset import format_cpulist
from tests.environments import FOLDER
from tests.processes import masks
from tests.schedulers.jobs import Rank, Stage
from tests.schedulers.test_grid_engine import job
from tests.schedulers.test_slurm import batch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.fake_driver,
    pytest.mark.needs("two-cpus"),
]

SLURM = "Slurm 22.05, task/affinity, select/cons_tres, two nodes with the 2 CPUs of one machine"
OPEN_MPI = "Open MPI 4.1 on a machine of 2 CPUs"
MPICH = "MPICH 4.0 (hydra) on a machine of 2 CPUs"
GRID_ENGINE = "Son of Grid Engine 8.1.9 on a machine of 2 CPUs"
TORCHRUN = "torch 2.13 on a machine of 2 CPUs"

AS_ROOT = " --allow-run-as-root"
"""Only tests are root."""

NAMES: dict[str, str] = json.loads((FOLDER.parent / "environment_names.json").read_text())
"""The variables that tell of ranks, masks and GPUs; not those that name people, hosts and ports."""

SAME = {
    "JOB_ID": "1",
    "PE_HOSTFILE": "/var/spool/gridengine/execd/node/active_jobs/1.1/pe_hostfile",
    "PMIX_NAMESPACE": "1",
    "PMI_JOBID": "1.0",
    "SGE_CELL": "default",
    "SGE_ROOT": "/var/lib/gridengine",
    "SLURM_JOB_ID": "1",
    "TORCHELASTIC_RUN_ID": "1",
}
"""What differs from run to run, or from site to site, and is the same in the records."""


def seen(
    ranks: Sequence[Rank], *, name: str, by: str, command: str, said: str, launchers: Sequence[str]
) -> dict[str, Any]:
    """The record of the ranks of one node; a batch script is none."""
    ordered = sorted(ranks, key=lambda rank: int(rank.environ.get(by, "0")))
    above = [Path(f"/proc/{rank.pid}/stat").read_text().rpartition(")")[2] for rank in ordered]
    parents = [int(text.split()[1]) for text in above]
    (parent,) = {frozenset.union(*masks(pid).values()) for pid in parents}
    (parent_name,) = {Path(f"/proc/{pid}/comm").read_text().strip() for pid in parents}
    names = sorted(name for launcher in launchers for name in NAMES[launcher].split())
    return {
        "name": name,
        "seen": said,
        "command": command,
        "parent": format_cpulist(parent),
        "parent_name": parent_name,
        "ranks": [
            {
                **({} if by else {"told": {"local_rank": None, "local_size": None}}),
                "own": format_cpulist(rank.before),
                "environ": {
                    name: SAME.get(name, rank.environ[name])
                    for name in names
                    if name in rank.environ
                },
            }
            for rank in ordered
        ],
    }


def compare(launcher: str, record: dict[str, Any]) -> None:
    """The record that is there says the same."""
    path = FOLDER / f"{launcher}.json"
    records = json.loads(path.read_text()) if path.exists() else []
    by_name = {other["name"]: other for other in records}
    if os.environ.get("RECORD"):
        new = {**by_name, record["name"]: record}
        path.write_text(json.dumps([*new.values()], indent=1) + "\n")
    else:
        assert record == by_name.get(record["name"])


needs_slurm = pytest.mark.needs("root", "slurmctld", "slurmd", "munged", "srun")
needs_grid_engine = pytest.mark.needs("root", "sge_qmaster", "sge_execd", "qsub", "qconf")

STEPS = {
    "two-nodes-gres": ("-N2 --ntasks-per-node=2 --gres=gpu:2", 4),
    "two-nodes-gpus-per-task": ("-N2 --ntasks-per-node=2 --gpus-per-task=1", 4),
    "two-nodes-map-gpu": ("-N2 --ntasks-per-node=2 --gres=gpu:2 --gpu-bind=map_gpu:1,0", 4),
    "two-nodes-uneven": ("-N2 -n3 -m block", 3),
    "two-nodes-cyclic": ("-N2 -n4 -m cyclic", 4),
    "two-nodes-unbound": ("-N2 --ntasks-per-node=2 --gres=gpu:2 --cpu-bind=none", 4),
    "single-2": ("-N1 -n2 --gres=gpu:2 --gpu-bind=single:2 --cpu-bind=none", 2),
    "pmi2": ("-N1 -n2 --mpi=pmi2", 2),
    "cpus-per-task": ("-N2 -n2 --cpus-per-task=2", 2),
}


@needs_slurm
@pytest.mark.parametrize("name", STEPS)
def test_steps_of_slurm(on_slurm: Stage, name: str) -> None:
    options, count = STEPS[name]
    with on_slurm.ranks("srun", *options.split(), *on_slurm.rank(), count=count) as ranks:
        for node in sorted({rank.environ["SLURM_NODEID"] for rank in ranks}):
            here = [rank for rank in ranks if rank.environ["SLURM_NODEID"] == node]
            record = seen(
                here,
                name=name if len(here) == len(ranks) else f"{name}-{node}",
                by="SLURM_LOCALID",
                command=f"srun {options}",
                said=SLURM,
                launchers=["slurm"],
            )
            compare("slurm", record)


INSIDE = {
    "batch": ("-N2 --ntasks-per-node=2 --gres=gpu:2", "", "", "slurm"),
    "batch-srun": (
        "-N2 --ntasks-per-node=2 --gpus-per-task=1 --cpus-per-task=1",
        *("srun -N1 -n2", "SLURM_LOCALID", "slurm"),
    ),
    "torchrun-in-srun": (
        "-N1 --ntasks-per-node=1 --gres=gpu:2 --cpus-per-task=2",
        *("srun torchrun --nproc-per-node=2", "LOCAL_RANK", "slurm torchrun"),
    ),
    "openmpi-in-batch": (
        "-N1 -n2 --gres=gpu:2",
        *("mpirun.openmpi --allow-run-as-root -n 2", "OMPI_COMM_WORLD_LOCAL_RANK", "slurm openmpi"),
    ),
    "mpich-in-batch": (
        "-N1 -n2 --gres=gpu:2",
        *("mpirun.mpich -launcher fork -n 2", "MPI_LOCALRANKID", "slurm mpich"),
    ),
}


@needs_slurm
@pytest.mark.needs("mpirun.openmpi", "mpirun.mpich", "torch", "torchrun")
@pytest.mark.parametrize("name", INSIDE)
def test_batch_scripts_of_slurm(on_slurm: Stage, name: str) -> None:
    options, command, by, names = INSIDE[name]
    launchers, count = names.split(), 2 if command else 1
    python, *rank = on_slurm.rank()
    words = [*command.split(), *([] if "torchrun" in command else [python]), *rank]
    with on_slurm.ranks(*batch(on_slurm, options, words), count=count) as ranks:
        shown = f"sbatch {options}; {command}".removesuffix("; ").replace(AS_ROOT, "")
        record = seen(ranks, name=name, by=by, command=shown, said=SLURM, launchers=launchers)
        compare("slurm", record)


MPIRUN = "mpirun.openmpi --allow-run-as-root -n 2"
MPIRUNS = {
    ("openmpi", "all"): (MPIRUN, OPEN_MPI),
    ("openmpi", "all-unbound"): (f"{MPIRUN} --bind-to none", OPEN_MPI),
    ("mpich", "unbound"): ("mpirun.mpich -n 2", MPICH),
    ("mpich", "bound"): ("mpirun.mpich -n 2 -bind-to core", MPICH),
}


@pytest.mark.needs("mpirun.openmpi", "mpirun.mpich")
@pytest.mark.parametrize("which", MPIRUNS, ids="-".join)
def test_mpiruns(stage: Stage, which: tuple[str, str]) -> None:
    (launcher, name), (command, said) = which, MPIRUNS[which]
    by = {"openmpi": "OMPI_COMM_WORLD_LOCAL_RANK", "mpich": "MPI_LOCALRANKID"}[launcher]
    with stage.ranks(*command.split(), *stage.rank(), count=2) as ranks:
        shown = command.replace(f".{launcher}", "").replace(AS_ROOT, "")
        record = seen(ranks, name=name, by=by, command=shown, said=said, launchers=[launcher])
        compare(launcher, record)


@pytest.mark.needs("torch", "torchrun")
def test_torchrun(stage: Stage) -> None:
    _, *rank = stage.rank()
    command = ("torchrun", "--standalone", "--nproc-per-node", "4")
    with stage.ranks(*command, *rank, count=4) as ranks:
        record = seen(
            ranks,
            name="four",
            by="LOCAL_RANK",
            command=shlex.join(command),
            said=TORCHRUN,
            launchers=["torchrun"],
        )
        compare("torchrun", record)


JOBS = {
    "gpu-2": ("-l gpu=2", 1),
    "array": ("-t 1-4 -l gpu=1", 4),
    "binding": ("-l gpu=1 -binding linear:1", 1),
    "parallel": ("-pe smp 2 -l gpu=1", 1),
}


@needs_grid_engine
@pytest.mark.parametrize("name", JOBS)
def test_jobs_of_grid_engine(on_grid_engine: Stage, name: str) -> None:
    options, count = JOBS[name]
    command = job(on_grid_engine, *options.split(), commands=[on_grid_engine.rank()])
    with on_grid_engine.ranks(*command, count=count) as ranks:
        ordered = "SGE_TASK_ID" if count > 1 else "NSLOTS"
        record = seen(
            ranks,
            name=name,
            by=ordered,
            command=f"qsub {options}",
            said=GRID_ENGINE,
            launchers=["grid_engine"],
        )
        compare("grid_engine", record)
