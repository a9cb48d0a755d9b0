"""A real Slurm: what its tasks get, seen from outside."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import pytest

from tests.schedulers.jobs import FIRST, GPUAFF, SECOND, Rank, Stage, by
from tests.schedulers.slurm_bed import SUBMIT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.fake_driver,
    pytest.mark.needs("root", "slurmctld", "slurmd", "munged", "srun", "two-cpus"),
]

TWO_A_NODE = ("srun", "-N2", "--ntasks-per-node=2")


def placed(ranks: Sequence[Rank]) -> list[tuple[int | None, frozenset[int]]]:
    """The GPU and the CPUs of each, in the order of their numbers."""
    return [(rank.gpu, rank.cpus) for rank in by(ranks, "SLURM_PROCID")]


@pytest.mark.case("B1", "B19")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # Slurm binds each task to a core of its own; GPU r is near that of task r.
        (["--gres=gpu:2"], [(0, FIRST), (1, SECOND)]),
        (["--gres=gpu:2", "--cpus-per-task=1"], [(0, FIRST), (1, SECOND)]),
        # It binds nobody: the two CPUs are cut by what is near.
        (["--gres=gpu:2", "--cpu-bind=none"], [(0, FIRST), (1, SECOND)]),
        (["--gpus-per-task=1", "--cpu-bind=none"], [(0, FIRST), (1, SECOND)]),
        (["--gres=gpu:2", "--gpu-bind=map_gpu:1,0", "--cpu-bind=none"], [(1, SECOND), (0, FIRST)]),
        # It binds them away from their GPUs: a task never leaves what it was given.
        (["--gres=gpu:2", "--gpu-bind=map_gpu:1,0"], [(1, FIRST), (0, SECOND)]),
        (["--gres=gpu:2", "--cpu-bind=mask_cpu:0x2,0x1"], [(0, SECOND), (1, FIRST)]),
    ],
)
def test_tasks_of_two_nodes(
    on_slurm: Stage, options: list[str], expected: list[tuple[int, frozenset[int]]]
) -> None:
    command = (*TWO_A_NODE, *options, *on_slurm.rank("pin"))
    with on_slurm.ranks(*command, count=4) as ranks:
        assert placed(ranks) == [*expected, *expected]
        for rank in ranks:
            assert rank.cpus <= rank.before


@pytest.mark.parametrize("cpus", ["1", "2"])
def test_cpus_per_task(on_slurm: Stage, cpus: str) -> None:
    """A task that is alone on its node has what it was granted, and takes the near part of it."""
    command = ("srun", "-N2", "-n2", f"--cpus-per-task={cpus}", "--gres=gpu:2")
    with on_slurm.ranks(*command, *on_slurm.rank("pin"), count=2) as ranks:
        assert placed(ranks) == [(0, FIRST)] * 2
        assert {len(rank.before) for rank in ranks} == {int(cpus)}


def test_run_inside_srun(on_slurm: Stage) -> None:
    """It knows the rank by srun's variables, and pins it."""
    command = (*TWO_A_NODE, "--gres=gpu:2", "--cpu-bind=none", *GPUAFF, "--", *on_slurm.rank())
    with on_slurm.ranks(*command, count=4) as ranks:
        seen = [(rank.environ["SLURM_LOCALID"], rank.cpus) for rank in ranks]
        assert sorted(seen) == [("0", FIRST)] * 2 + [("1", SECOND)] * 2


@pytest.mark.parametrize("command", [[], [*GPUAFF, "--per-rank", "-n", "auto", "--"]])
@pytest.mark.parametrize(
    "options", [["--gpus-per-task=1"], ["--gres=gpu:2", "--gpu-bind=map_gpu:1,0"]]
)
def test_tasks_claim_the_gpu_that_is_theirs(
    on_slurm: Stage, options: list[str], command: list[str]
) -> None:
    claims = [] if command else ["claim=auto"]
    task = (*TWO_A_NODE, *options, *command, *on_slurm.rank(*claims))
    with on_slurm.ranks(*task, count=4) as ranks:
        seen = [rank.environ["CUDA_VISIBLE_DEVICES"] for rank in by(ranks, "SLURM_PROCID")]
        assert sorted(seen) == ["0", "0", "1", "1"]
        if not command:
            given = [[int(rank.environ["CUDA_VISIBLE_DEVICES"])] for rank in ranks]
            assert [rank.claim for rank in ranks] == given


def batch(stage: Stage, options: str, *commands: Sequence[str]) -> tuple[str, ...]:
    """Submit a script with these commands, and stay until its job has ended."""
    path = stage.folder / "job.sh"
    lines = [shlex.join(command) for command in commands]
    path.write_text("\n".join(["#!/bin/bash", f"#SBATCH {options}", *lines, ""]))
    return (*SUBMIT, "--output=out-%j", str(path))


def test_a_batch_script_claims_what_it_was_granted(on_slurm: Stage) -> None:
    """Two jobs on one node: each has the GPUs that Slurm has given it."""
    one = on_slurm.rank("claim=auto")
    array = batch(on_slurm, "-N1 -n1 --gres=gpu:2 --array=0-1 --nodelist=n1", one)
    with on_slurm.ranks(*array, count=2) as ranks:
        assert sorted(rank.claim for rank in ranks) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("command", [[], [*GPUAFF, "--per-rank", "-n", "auto", "--"]])
def test_what_all_tasks_were_granted_is_divided(on_slurm: Stage, command: list[str]) -> None:
    """By rank, in the order of CUDA's numbers; the second node's are no others."""
    claims = [] if command else ["claim=auto", "pin"]
    task = (*TWO_A_NODE, "--gres=gpu:4", *command, *on_slurm.rank(*claims))
    with on_slurm.ranks(*task, count=4) as ranks:
        ranks = by(ranks, "SLURM_PROCID")
        if command:
            shown = [rank.environ["CUDA_VISIBLE_DEVICES"] for rank in ranks]
            assert shown == ["0,1", "2,3"] * 2
        else:
            assert [rank.claim for rank in ranks] == [[0, 1], [2, 3]] * 2


def test_fewer_gpus_than_tasks(on_slurm: Stage) -> None:
    task = ("srun", "-N1", "-n2", "--gres=gpu:1", "--cpu-bind=none", *on_slurm.rank("claim=auto"))
    with on_slurm.ranks(*task, count=2) as ranks:
        errors = [rank.told.get("error", "") for rank in ranks]
        assert sum(not error for error in errors) == 1
        assert sum(error.startswith("GpusBusyError") for error in errors) == 1
