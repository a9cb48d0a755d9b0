"""``data/environments``: what launchers were seen to put into the environment, seen once more.

``RECORD=1 pytest --slow -p no:randomly tests/schedulers/test_recorded.py`` writes the records.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

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

SAID = {
    "slurm": "Slurm 22.05, task/affinity, select/cons_tres, "
    "two nodes with the 2 CPUs of one machine",
    "openmpi": "Open MPI 4.1 on a machine of 2 CPUs",
    "mpich": "MPICH 4.0 (hydra) on a machine of 2 CPUs",
    "grid_engine": "Son of Grid Engine 8.1.9 on a machine of 2 CPUs",
    "torchrun": "torch 2.13 on a machine of 2 CPUs",
}

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


def compare(
    launcher: str, ranks: Sequence[Rank], name: str, *, by: str, command: str, others: str = ""
) -> None:
    """The record that is there says the same of the ranks of one node; a batch script is none."""
    ordered = sorted(ranks, key=lambda rank: int(rank.environ.get(by, "0")))
    above = [Path(f"/proc/{rank.pid}/stat").read_text().rpartition(")")[2] for rank in ordered]
    parents = [int(text.split()[1]) for text in above]
    (parent,) = {frozenset.union(*masks(pid).values()) for pid in parents}
    (parent_name,) = {Path(f"/proc/{pid}/comm").read_text().strip() for pid in parents}
    names = sorted(n for one in (launcher, *others.split()) for n in NAMES[one].split())
    no_rank = {} if by else {"told": {"local_rank": None, "local_size": None}}
    environs = [{n: rank.environ[n] for n in names if n in rank.environ} for rank in ordered]
    record = {
        "name": name,
        "seen": SAID[launcher],
        "command": command.replace(" --allow-run-as-root", ""),  # only tests are root
        "parent": format_cpulist(parent),
        "parent_name": parent_name,
        "ranks": [
            {
                **no_rank,
                "own": format_cpulist(rank.before),
                "environ": {n: SAME.get(n, value) for n, value in environ.items()},
            }
            for rank, environ in zip(ordered, environs, strict=True)
        ],
    }
    path = FOLDER / f"{launcher}.json"
    records = json.loads(path.read_text()) if path.exists() else []
    by_name = {other["name"]: other for other in records}
    if os.environ.get("RECORD"):
        path.write_text(json.dumps([*{**by_name, name: record}.values()], indent=1) + "\n")
    else:
        assert record == by_name.get(name)


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
            of_node = name if len(here) == len(ranks) else f"{name}-{node}"
            compare("slurm", here, of_node, by="SLURM_LOCALID", command=f"srun {options}")


INSIDE = {
    "batch": ("-N2 --ntasks-per-node=2 --gres=gpu:2", "", "", ""),
    "batch-srun": (
        "-N2 --ntasks-per-node=2 --gpus-per-task=1 --cpus-per-task=1",
        *("srun -N1 -n2", "SLURM_LOCALID", ""),
    ),
    "torchrun-in-srun": (
        "-N1 --ntasks-per-node=1 --gres=gpu:2 --cpus-per-task=2",
        *("srun torchrun --nproc-per-node=2", "LOCAL_RANK", "torchrun"),
    ),
    "openmpi-in-batch": (
        "-N1 -n2 --gres=gpu:2",
        *("mpirun.openmpi --allow-run-as-root -n 2", "OMPI_COMM_WORLD_LOCAL_RANK", "openmpi"),
    ),
    "mpich-in-batch": (
        "-N1 -n2 --gres=gpu:2",
        *("mpirun.mpich -launcher fork -n 2", "MPI_LOCALRANKID", "mpich"),
    ),
}


@needs_slurm
@pytest.mark.needs("mpirun.openmpi", "mpirun.mpich", "torch", "torchrun")
@pytest.mark.parametrize("name", INSIDE)
def test_batch_scripts_of_slurm(on_slurm: Stage, name: str) -> None:
    options, command, by, others = INSIDE[name]
    count = 2 if command else 1
    python, *rank = on_slurm.rank()
    words = [*command.split(), *([] if "torchrun" in command else [python]), *rank]
    with on_slurm.ranks(*batch(on_slurm, options, words), count=count) as ranks:
        shown = f"sbatch {options}; {command}".removesuffix("; ")
        compare("slurm", ranks, name, by=by, command=shown, others=others)


MPIRUN = "mpirun.openmpi --allow-run-as-root -n 2"
MPIRUNS = {
    ("openmpi", "all"): MPIRUN,
    ("openmpi", "all-unbound"): f"{MPIRUN} --bind-to none",
    ("mpich", "unbound"): "mpirun.mpich -n 2",
    ("mpich", "bound"): "mpirun.mpich -n 2 -bind-to core",
}


@pytest.mark.needs("mpirun.openmpi", "mpirun.mpich")
@pytest.mark.parametrize("which", MPIRUNS, ids="-".join)
def test_mpiruns(stage: Stage, which: tuple[str, str]) -> None:
    (launcher, name), command = which, MPIRUNS[which]
    by = {"openmpi": "OMPI_COMM_WORLD_LOCAL_RANK", "mpich": "MPI_LOCALRANKID"}[launcher]
    with stage.ranks(*command.split(), *stage.rank(), count=2) as ranks:
        compare(launcher, ranks, name, by=by, command=command.replace(f".{launcher}", ""))


@pytest.mark.needs("torch", "torchrun")
def test_torchrun(stage: Stage) -> None:
    _, *rank = stage.rank()
    command = ("torchrun", "--standalone", "--nproc-per-node", "4")
    with stage.ranks(*command, *rank, count=4) as ranks:
        compare("torchrun", ranks, "four", by="LOCAL_RANK", command=shlex.join(command))


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
        compare("grid_engine", ranks, name, by=ordered, command=f"qsub {options}")
