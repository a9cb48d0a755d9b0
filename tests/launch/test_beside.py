"""Whether the ranks in use fit what launchers say of this node."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from gpuaff.launch.masks import consistency
from gpuaff.launch.ranks import Ranks
from gpuaff.notices import Notice
from tests.environments import started

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
ONE_OF_TORCHRUN = {**TORCHRUN, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def said(env: Mapping[str, str], rank: int = 0, size: int = 1) -> list[Notice]:
    return list(consistency(Ranks(local_rank=rank, local_size=size), env.get))


def codes(env: Mapping[str, str], rank: int = 0, size: int = 1) -> list[str]:
    return [notice.code for notice in said(env, rank, size)]


def of(launcher: str, name: str) -> dict[str, str]:
    env = dict(started(launcher, name)[1].environ)
    return {**env, "SLURM_PROCID": "1"} if launcher == "slurm" else env


def test_numbers_that_torchrun_contradicts() -> None:
    (notice,) = said(TORCHRUN, 0, 2)
    assert (notice.code, notice.rank) == ("rank-differs", 0)
    assert "local_rank 0 of 2" in notice.message
    assert "LOCAL_RANK=1" in notice.message


def test_numbers_that_torchrun_does_not_contradict() -> None:
    assert codes(TORCHRUN, 1, 2) == []
    assert codes(TORCHRUN, 0, 4) == [], "numbers of the caller's own"
    assert codes({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, 0, 2) == [], "not torchrun's"


BESIDE = {
    "mpirun": of("openmpi", "unbound"),
    "mpirun (5)": of("openmpi", "5-bound"),
    "srun": of("slurm", "job-gpus"),
    "srun, one mask": of("slurm", "one-mask-for-all"),
    "torchrun": TORCHRUN,
    "torchrun, bound as one": {**of("slurm", "gres"), **TORCHRUN},
    "torchrun of one": {**of("openmpi", "unbound"), **ONE_OF_TORCHRUN},
}


@pytest.mark.parametrize("env", BESIDE.values(), ids=BESIDE)
def test_one_rank_where_a_launcher_has_started_more(env: Mapping[str, str]) -> None:
    (notice,) = said(env)
    assert (notice.code, notice.rank) == ("ranks-beside", 0)
    assert "started 2 processes" in notice.message


def test_torchruns_ranks_beside_another_torchruns() -> None:
    for env in (of("openmpi", "unbound"), of("slurm", "job-gpus")):
        assert codes({**env, **TORCHRUN}, 1, 2) == ["ranks-beside"]
        assert codes(env, 1, 2) == []
        assert codes(env, 1, 4) == [], "the caller counts as it likes"


ALONE: dict[str, Mapping[str, str]] = {
    "nobody": {},
    "mpirun has bound it": of("openmpi", "bound"),
    "srun has bound it apart": of("slurm", "gres"),
    "one task": {**of("slurm", "job-gpus"), "SLURM_STEP_TASKS_PER_NODE": "1"},
    "one process": {**of("openmpi", "unbound"), "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
    "a batch script": of("slurm", "batch-script"),
    "no task": {k: v for k, v in of("slurm", "job-gpus").items() if k != "SLURM_LOCALID"},
    "torchrun of one": ONE_OF_TORCHRUN,
}


@pytest.mark.parametrize("env", ALONE.values(), ids=ALONE)
def test_one_rank_that_is_alone_or_apart(env: Mapping[str, str]) -> None:
    assert codes(env) == []


@pytest.mark.parametrize("changes", [{"SLURM_LOCALID": "7"}, {"SLURM_CPU_BIND_LIST": "?"}])
def test_srun_s_list_that_does_not_tell(changes: Mapping[str, str]) -> None:
    assert codes({**of("slurm", "gres"), **changes}) == ["ranks-beside"]
