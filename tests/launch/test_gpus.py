"""Whose GPUs: whether the launcher has given each rank its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from gpuaff.launch.gpus import OwnGpus, own_gpus
from gpuaff.launch.ranks import Ranks
from gpuaff.launch.slurm import gpu_indices
from tests.environments import Started, started


def found(
    rank: Started, changes: Mapping[str, str] | None = None, *, visible: int = 1
) -> OwnGpus | None:
    variables = {**rank.environ, **(changes or {})}
    return own_gpus(rank.ranks, visible=visible, get=variables.get)


OWN = {
    "gpus-per-task": [OwnGpus(own=(0,), on_node=2), OwnGpus(own=(1,), on_node=2)],
    "map-gpu": [OwnGpus(own=(1,), on_node=2), OwnGpus(own=(0,), on_node=2)],
    "job-gpus": [OwnGpus(named=(0, 1), own=(r,), on_node=2) for r in (0, 1)],
    "job-map-gpu": [OwnGpus(named=(0, 1), own=(r,), on_node=2) for r in (1, 0)],
    "two-tasks-a-gpu": [OwnGpus(own=(r // 2,), on_node=2, shared=True) for r in range(4)],
    "tres-per-task": [OwnGpus(named=(8, 9)), OwnGpus(named=(8, 9))],
}


@pytest.mark.case("D10")
@pytest.mark.parametrize(("name", "expected"), OWN.items())
def test_srun_gives_each_rank_its_own(name: str, expected: list[OwnGpus]) -> None:
    assert [found(rank) for rank in started("slurm", name)] == expected


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
        assert found(rank, {"SLURM_GPUS_PER_TASK": "1"}, visible=visible) is None, "by sbatch"


def test_one_gpu_for_all_tasks_is_shared() -> None:
    for rank in started("slurm", "gres"):
        assert found(rank, {"SLURM_STEP_GPUS": "0", "SLURM_GPUS_ON_NODE": "1"}) is None
        assert found(rank, {"SLURM_STEP_GPUS": "0,1"}) is None, "a wrapper hid the other one"


def test_a_wrapper_hides_one_of_two_own_gpus() -> None:
    rank = started("slurm", "gpus-per-task")[0]
    two_of_four = {"SLURM_STEP_GPUS": "0,1", "SLURM_GPUS_ON_NODE": "4"}
    assert found(rank, two_of_four) == OwnGpus(own=(0, 1), on_node=4)


def test_a_step_that_names_all_its_gpus() -> None:
    """Releases that name the GPUs of the step, not of the task."""
    for rank in started("slurm", "job-gpus"):
        step = {"SLURM_STEP_GPUS": "0,3", "SLURM_JOB_GPUS": "0-3"}
        assert found(rank, step) == OwnGpus(named=(0, 3), on_node=2)


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_GPUS_PER_TASK": "1"},
        {"SLURM_TRES_PER_TASK": "cpu=4,gres/gpu:h100=1"},
        {"SLURM_GPU_BIND": "verbose,map_gpu:1,0"},
        {"SLURM_GPU_BIND": "mask_gpu:0x1,0x2"},
        {"SLURM_TRES_BIND": "gres/gpu:single:1"},
    ],
)
def test_what_was_asked_of_sbatch(variables: dict[str, str]) -> None:
    rank = started("slurm", "gres")[0]
    assert found(rank, variables) == OwnGpus(named=(0, 1), on_node=2)


@pytest.mark.parametrize(
    "variables",
    [{"SLURM_GPU_BIND": "none"}, {"SLURM_TRES_PER_TASK": "cpu=4"}, {"SLURM_GPUS_PER_TASK": ""}],
)
def test_what_tells_nothing_of_gpus(variables: dict[str, str]) -> None:
    assert found(started("slurm", "gres")[0], variables) is None


SHARED = {
    "map_gpu:0,0": True,
    "map_gpu:0,1": False,
    "map_gpu:0*2,1*2": True,
    "map_gpu:0": True,  # used again
    "map_gpu:0x1,1": True,
    "map_gpu:?": True,
    "mask_gpu:0x1,0x2": False,
    "verbose,mask_gpu:0x3,0x6": True,
    "q,single:1": False,
    "single:2": True,
    "closest": True,
    "per_task:2": False,
}


@pytest.mark.case("D10")
@pytest.mark.parametrize(("text", "shared"), SHARED.items())
def test_several_tasks_may_be_on_one_gpu(text: str, shared: bool) -> None:
    rank = started("slurm", "gres")[0]
    word, _, rest = text.replace("_gpu", "").partition(",")
    tres = f"gres/gpu:{word},{rest}" if rest else f"gres/gpu:{word}"
    for variables in ({"SLURM_GPU_BIND": text}, {"SLURM_TRES_BIND": f"{tres}+gres/nic:single:2"}):
        own = found(rank, variables)
        assert own is not None
        assert own.shared is shared


def test_tasks_per_gpu() -> None:
    rank = started("slurm", "gpus-per-task")[0]
    for name in ("SLURM_NTASKS_PER_TRES", "SLURM_NTASKS_PER_GPU"):
        for count, shared in (("1", False), ("2", True)):
            assert found(rank, {name: count}) == OwnGpus(own=(0,), on_node=2, shared=shared)


@pytest.mark.parametrize("name", ["gpus-per-task", "job-gpus"])
def test_a_worker_that_a_task_has_started_is_no_task(name: str) -> None:
    """Two workers in each of two tasks with two GPUs: worker 1 of task 0 is on the second."""
    task = started("slurm", name)[0]
    worker = replace(task, ranks=Ranks(local_rank=1, local_size=2))
    two = {"SLURM_STEP_GPUS": "0,1", "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_GPUS": "0-3"}
    assert found(worker, two, visible=2) is None
    assert found(task, two, visible=2) is not None


def test_other_launchers_do_not_tell() -> None:
    inside = started("torchrun", "torchrun")[0]
    outside = started("slurm", "gpus-per-task")[0]
    assert found(replace(inside, environ={**outside.environ, **inside.environ})) is None
    assert found(started("openmpi", "bound")[0]) is None
    ranks = Ranks(local_rank=0, local_size=2)
    assert own_gpus(ranks, visible=1, get=dict[str, str]().get) is None


def test_no_gpu_or_one_rank() -> None:
    rank = started("slurm", "gpus-per-task")[0]
    assert found(rank, visible=0) is None
    assert found(replace(rank, ranks=Ranks(local_rank=0, local_size=1))) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", (0,)),
        ("3,1", (1, 3)),
        ("0-2,10", (0, 1, 2, 10)),
        ("", None),
        (None, None),
        ("x", None),
    ],
)
def test_indices(text: str | None, expected: tuple[int, ...] | None) -> None:
    assert gpu_indices(text) == expected
