"""Among whom granted GPUs are divided, by recorded environments."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from gpuaff.launch.gpus import sharers
from gpuaff.launch.ranks import Ranks, classify_ranks
from tests.environments import started


def classify(environ: Mapping[str, str], *, visible: int) -> Ranks | None:
    return sharers(classify_ranks(environ.get), visible=visible, get=environ.get)


def places(environ: Mapping[str, str], *, visible: int) -> tuple[int, int] | None:
    found = classify(environ, visible=visible)
    return None if found is None else (found.local_rank, found.local_size)


SHARED = [
    ("slurm", "two-nodes-gres-1", 2),
    ("slurm", "gpu-bind-none", 4),
    ("slurm", "torchrun-in-srun", 2),
    ("slurm", "openmpi-in-batch", 2),
    ("slurm", "mpich-in-batch", 2),
    ("openmpi", "all", 4),
    ("mpich", "bound", 4),
    ("torchrun", "four", 4),
]


@pytest.mark.parametrize(("launcher", "name", "visible"), SHARED)
def test_all_ranks_were_granted_the_same(launcher: str, name: str, visible: int) -> None:
    for rank in started(launcher, name):
        expected = rank.ranks.local_rank, rank.ranks.local_size
        assert places(rank.environ, visible=visible) == expected
        assert classify(rank.environ, visible=1) is None, "a wrapper has shown it its own"


OWN = [
    ("slurm", "two-nodes-gpus-per-task-0"),
    ("slurm", "two-nodes-map-gpu-1"),
    ("slurm", "batch-srun"),
    ("slurm", "single-2"),
]


@pytest.mark.parametrize(("launcher", "name"), OWN)
def test_each_rank_has_its_own(launcher: str, name: str) -> None:
    for rank in started(launcher, name):
        assert classify(rank.environ, visible=1) is None


def test_two_gpus_for_each_task() -> None:
    for rank in started("slurm", "two-nodes-gpus-per-task-0"):
        told = {"SLURM_STEP_GPUS": "2,3", "SLURM_GPUS_ON_NODE": "4"}
        assert classify({**rank.environ, **told}, visible=2) is None


@pytest.mark.parametrize("name", ["batch", "cpus-per-task-0"])
def test_who_is_alone_has_all(name: str) -> None:
    (rank,) = started("slurm", name)
    assert classify(rank.environ, visible=2) is None
