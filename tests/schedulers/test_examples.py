"""The examples' jobs on a real Slurm of two nodes: only their size and the address are changed."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.example_runs import EXAMPLES, table
from tests.processes import environment
from tests.schedulers.jobs import FIRST, SECOND, Stage
from tests.schedulers.slurm_bed import NODE_FILES, SUBMIT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.fake_driver,
    pytest.mark.needs("root", "slurmctld", "slurmd", "munged", "sbatch", "torch", "two-cpus"),
    pytest.mark.timeout(240),
]

SMALL = ["--ntasks-per-node=2", "--gres=gpu:2", "--cpus-per-task=1", "--time=2", "--output=out"]


PLACES = [(str(rank), str(rank % 2), str(min((FIRST, SECOND)[rank % 2]))) for rank in range(4)]
"""Of two tasks on each node: the rank, its GPU and its CPUs."""

ALONE = ["--ntasks=1", "--gres=gpu:2", "--cpus-per-task=2", "--time=2", "--output=out"]
"""For jobs that start their ranks themselves."""


def submit(
    stage: Stage, example: str, *arguments: str, size: Sequence[str] = SMALL, fails: bool = False
) -> str:
    """Submit ``job.slurm`` of an example, and wait for its end; what it printed.

    ``--no-cuda`` is among its arguments: the nodes' GPUs can be counted, and not used.
    """
    folder = stage.folder / example
    shutil.copytree(EXAMPLES / example, folder)
    job = folder / "job.slurm"
    # The two nodes are this machine, and their names are Slurm's alone.
    text, count = re.subn(
        r"^MASTER_ADDR=.*$", "MASTER_ADDR=127.0.0.1", job.read_text(), flags=re.MULTILINE
    )
    assert count == (size is SMALL)
    job.write_text(text)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [*SUBMIT, *size, "job.slurm", *arguments],
        cwd=folder,
        env=environment({**stage.variables, "PATH": path}),
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    printed = (folder / "out").read_text()
    assert (done.returncode != 0) == fails, f"{done.stderr}\n{printed}"
    return printed


@pytest.mark.case("B1", "B5")
def test_ddp_minimal(on_slurm: Stage) -> None:
    printed = submit(on_slurm, "ddp_minimal", "--no-cuda")
    head = "4 ranks on 2 node(s) by gloo; on the first node 2 ranks, 2 GPUs promised, 2 visible"
    assert head in printed
    rows = table(printed, "rank")
    assert [(row["rank"], row["GPU"], row["CPUs"]) for row in rows] == PLACES
    assert [row["local rank"] + row["host"] for row in rows] == ["0n1", "1n1", "0n2", "1n2"]
    assert "forward pass: the same on all ranks" in printed


def test_the_job_ends_with_the_first_rank_that_fails(on_slurm: Stage) -> None:
    """The second node sees fewer GPUs than it was promised; the first would wait for its ranks."""
    with (Path(on_slurm.variables[NODE_FILES]) / "n2").open("a") as file:
        file.write("export CUDA_VISIBLE_DEVICES=0\n")
    printed = submit(on_slurm, "ddp_minimal", "--no-cuda", fails=True)
    assert "n2 has 2 GPUs for this job, and this process sees 1" in printed
    assert "n1 has" not in printed
    assert "DUE TO TIME LIMIT" not in printed


@pytest.mark.needs("sklearn")
def test_ddp_mnist(on_slurm: Stage) -> None:
    printed = submit(on_slurm, "ddp_mnist", "--batch-size", "32", "--no-cuda")
    places = re.findall(
        r"^rank (\d) of 4: cpu, GPU (\d), CPUs (\d+), 0 workers$", printed, re.MULTILINE
    )
    assert sorted(places) == PLACES
    right = re.findall(r"Accuracy: (\d+)/359 ", printed)
    assert len(right) == 5, "rank 0 alone tells, once an epoch"
    assert int(right[-1]) > 180, "chance is 36"
    assert (on_slurm.folder / "ddp_mnist/mnist_cnn.pt").exists()


def test_dp_vs_ddp(on_slurm: Stage) -> None:
    small = ["--", "--samples=2048", "--width=64", "--batch-size=64", "--epochs=2"]
    printed = submit(on_slurm, "dp_vs_ddp", "--no-cuda", "--gpus", "2", *small, size=ALONE)
    rows = table(printed, "method")
    kinds = [(row["method"], row["visible GPUs"], row["processes"]) for row in rows]
    assert kinds == [("dp", "0,1", "1"), ("ddp", "0,1", "2")]
    assert [row["CPUs each"] for row in rows] == ["2", "1 1"]
    for row in rows:
        first, last = map(float, row["loss by epoch"].split())
        assert last < first


@pytest.mark.needs("sklearn", "matplotlib")
def test_sweep(on_slurm: Stage) -> None:
    shutil.copytree(EXAMPLES / "ddp_mnist", on_slurm.folder / "ddp_mnist")
    small = ["--gpus", "2", "--cores", "1", "--", "--dry-run", "--no-cuda"]
    printed = submit(on_slurm, "sweep", *small, size=ALONE)
    places = re.findall(r"^rank \d of 2: cpu, GPU (\d), CPUs (\d+), ", printed, re.MULTILINE)
    assert sorted(places) == [place[1:] for place in PLACES[:2]]
    with (on_slurm.folder / "sweep/sweep.csv").open(newline="") as file:
        runs = [(row["gpus"], row["cores_asked"], row["cores"]) for row in csv.DictReader(file)]
    assert runs == [("2", "1", "1")]
    assert (on_slurm.folder / "sweep/sweep.png").read_bytes().startswith(b"\x89PNG\r\n")
