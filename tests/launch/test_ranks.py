"""The ranks by whatever launcher started a process; recorded environments first."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuaff.launch.ranks import launched

from environments import started


def found(environ: Mapping[str, str], **more: str) -> tuple[int, int] | None:
    ranks = launched({**environ, **more}.get)
    return None if ranks is None else (ranks.local_rank, ranks.local_size)


@pytest.mark.parametrize(
    ("launcher", "name"),
    [
        ("torchrun", "torchrun"),
        ("openmpi", "bound"),
        ("openmpi", "5-unbound"),
        ("openmpi", "oversubscribed"),
        ("slurm", "gres"),
        ("slurm", "second-node"),
        ("slurm", "no-plugin"),
    ],
)
def test_every_launcher(launcher: str, name: str) -> None:
    for rank in started(launcher, name):
        assert launched(rank.environ.get) == rank.ranks


def test_no_launcher() -> None:
    assert found({}) is None
    for rank in started("slurm", "batch-script"):
        assert found(rank.environ) is None, "a batch script is no task"
        shell = {"SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_ID": "4294967290"}
        assert found(rank.environ, **shell) is None, "nor is the shell of salloc"


HYDRA = {"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_RANK": "5", "PMI_SIZE": "8"}


def test_the_innermost_counts() -> None:
    (task, _), (rank, _), (worker, _) = (
        started("slurm", "gres"),
        started("openmpi", "oversubscribed")[:2],
        started("torchrun", "torchrun"),
    )
    srun = {**task.environ, "SLURM_LOCALID": "1"}
    assert found(srun) == (1, 2)
    assert found({**srun, **rank.environ}) == (0, 3)
    assert found(HYDRA) == (1, 2)
    assert found({**srun, **HYDRA, "MPI_LOCALNRANKS": "4"}) == (1, 4)
    assert found({**srun, **rank.environ, **HYDRA, **worker.environ}) == (0, 2)


def test_numbers_of_a_launcher_that_is_not_known() -> None:
    numbers = {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
    assert found(numbers) == (3, 4)
    assert found({**numbers, **HYDRA}) == (1, 2)
    assert found({"LOCAL_RANK": "3"}) is None


@pytest.mark.parametrize(
    "numbers",
    [
        {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"},
        {"LOCAL_RANK": "0"},
        {"LOCAL_RANK": "-1", "LOCAL_WORLD_SIZE": "2"},
        {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "two"},
    ],
)
def test_numbers_that_name_no_rank(numbers: dict[str, str]) -> None:
    """The outer launcher's are not taken in their place."""
    assert found({**numbers, "TORCHELASTIC_RUN_ID": "x", **HYDRA}) is None


NAMES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", *HYDRA)


@given(st.dictionaries(st.sampled_from(NAMES), st.text(max_size=3) | st.sampled_from("0123")))
def test_any_environment(environ: dict[str, str]) -> None:
    ranks = launched(environ.get)
    assert ranks is None or 0 <= ranks.local_rank < ranks.local_size
