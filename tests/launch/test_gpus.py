"""Whose GPUs: whether the launcher has given each rank its own, and else among whom they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from gpuaff.launch.binding import OwnGpus, own_gpus, sharers
from gpuaff.launch.ranks import Ranks, classify_ranks
from gpuaff.launch.slurm import gpu_indices
from tests.environments import Started, started, table, variables


def found(rank: Started, changes: str = "", *, visible: int = 1) -> OwnGpus | None:
    said = {**rank.environ, **variables(changes)}
    return own_gpus(rank.ranks, visible=visible, get=said.get)


def owned(fields: dict[str, Any] | None) -> OwnGpus | None:
    if fields is None:
        return None
    lists: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    return OwnGpus(**lists)


@pytest.mark.case("D10")
@pytest.mark.parametrize(("name", "expected"), table("own gpus"))
def test_srun_gives_each_rank_its_own(name: str, expected: list[dict[str, Any]]) -> None:
    assert [found(rank) for rank in started("slurm", name)] == [*map(owned, expected)]


def test_the_batch_scripts_gpus_are_the_first_nodes() -> None:
    """In a job of several nodes every node has them in its environment."""
    for rank in started("slurm", "second-node"):
        own = found(rank)
        assert own is not None
        assert own.named is None


@pytest.mark.parametrize("visible", [2, 4])
@pytest.mark.parametrize("name", ["gres", "gpu-bind-none", "one-mask-for-all"])
def test_all_ranks_see_all_gpus(name: str, visible: int) -> None:
    for rank in started("slurm", name):
        assert found(rank, visible=visible) is None
        assert found(rank, "SLURM_GPUS_PER_TASK=1", visible=visible) is None, "by sbatch"


@pytest.mark.parametrize(("text", "expected"), table("own gpus of the first task, with changes"))
def test_what_variables_say_of_a_task(text: str, expected: dict[str, Any] | None) -> None:
    name, _, changes = text.partition(" ")
    assert found(started("slurm", name)[0], changes) == owned(expected)


@pytest.mark.case("D10")
@pytest.mark.parametrize(("text", "shared"), table("shared gpus"))
def test_several_tasks_may_be_on_one_gpu(text: str, shared: bool) -> None:
    tres = f"gres/gpu:{text.replace('_gpu', '')}+gres/nic:single:2"
    for changes in (f"SLURM_GPU_BIND={text}", f"SLURM_TRES_BIND={tres}"):
        own = found(started("slurm", "gres")[0], changes)
        assert own is not None
        assert own.shared is shared


@pytest.mark.parametrize("name", ["gpus-per-task", "job-gpus"])
def test_a_worker_that_a_task_has_started_is_no_task(name: str) -> None:
    """Two workers in each of two tasks with two GPUs: worker 1 of task 0 is on the second."""
    task = started("slurm", name)[0]
    worker = replace(task, ranks=Ranks(local_rank=1, local_size=2))
    two = "SLURM_STEP_GPUS=0,1 SLURM_GPUS_ON_NODE=4 SLURM_JOB_GPUS=0-3"
    assert found(worker, two, visible=2) is None
    assert found(task, two, visible=2) is not None


def test_other_launchers_do_not_tell() -> None:
    inside, outside = started("torchrun", "torchrun")[0], started("slurm", "gpus-per-task")[0]
    assert found(replace(inside, environ={**outside.environ, **inside.environ})) is None
    assert found(started("openmpi", "bound")[0]) is None
    assert own_gpus(Ranks(local_rank=0, local_size=2), visible=1, get=variables("").get) is None


def test_no_gpu_or_one_rank() -> None:
    rank = started("slurm", "gpus-per-task")[0]
    assert found(rank, visible=0) is None
    assert found(replace(rank, ranks=Ranks(local_rank=0, local_size=1))) is None


@pytest.mark.parametrize(("text", "expected"), table("gpu lists"))
def test_indices(text: str, expected: list[int] | None) -> None:
    assert gpu_indices(text) == (expected and tuple(expected))


# Among whom granted GPUs are divided.


def sharing(environ: Mapping[str, str], *, visible: int) -> tuple[int, int] | None:
    ranks = sharers(classify_ranks(environ.get), visible=visible, get=environ.get)
    return None if ranks is None else (ranks.local_rank, ranks.local_size)


GRANTED_TO_ALL = [
    ("slurm", "two-nodes-gres-1", 2),
    ("slurm", "gpu-bind-none", 4),
    ("slurm", "torchrun-in-srun", 2),
    ("slurm", "openmpi-in-batch", 2),
    ("slurm", "mpich-in-batch", 2),
    ("openmpi", "all", 4),
    ("mpich", "bound", 4),
    ("torchrun", "four", 4),
]


@pytest.mark.parametrize(("launcher", "name", "visible"), GRANTED_TO_ALL)
def test_all_ranks_were_granted_the_same(launcher: str, name: str, visible: int) -> None:
    for rank in started(launcher, name):
        expected = rank.ranks.local_rank, rank.ranks.local_size
        assert sharing(rank.environ, visible=visible) == expected
        assert sharing(rank.environ, visible=1) is None, "a wrapper has shown it its own"


GRANTED_APART = [
    *(("two-nodes-gpus-per-task-0", 1), ("two-nodes-map-gpu-1", 1), ("batch-srun", 1)),
    *(("single-2", 1), ("batch", 2), ("cpus-per-task-0", 2)),
]


@pytest.mark.parametrize(("name", "visible"), GRANTED_APART)
def test_each_rank_was_granted_its_own(name: str, visible: int) -> None:
    for rank in started("slurm", name):
        assert sharing(rank.environ, visible=visible) is None


def test_two_gpus_for_each_task() -> None:
    for rank in started("slurm", "two-nodes-gpus-per-task-0"):
        two = variables("SLURM_STEP_GPUS=2,3 SLURM_GPUS_ON_NODE=4")
        assert sharing({**rank.environ, **two}, visible=2) is None
