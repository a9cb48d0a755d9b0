"""Whether the ranks in use fit what launchers say of this node."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from gpuaff.launch.binding import consistency
from gpuaff.launch.ranks import Ranks
from tests.environments import started, variables


def of(launcher: str, name: str, changes: str = "") -> dict[str, str]:
    env = {**started(launcher, name)[1].environ, **variables(changes)}
    return {**env, "SLURM_PROCID": "1"} if launcher == "slurm" else env


TORCHRUN = variables("TORCHELASTIC_RUN_ID=none LOCAL_RANK=1 LOCAL_WORLD_SIZE=2")
ONE_OF_TORCHRUN = variables("TORCHELASTIC_RUN_ID=none LOCAL_RANK=0 LOCAL_WORLD_SIZE=1")
MPIRUN, SRUN, BOUND = of("openmpi", "unbound"), of("slurm", "job-gpus"), of("slurm", "gres")
ONE, DIFFERS, BESIDE = (0, 1), ["rank-differs"], ["ranks-beside"]

CASES: dict[str, tuple[Mapping[str, str], tuple[int, int], list[str]]] = {
    "another rank than torchrun's": (TORCHRUN, (0, 2), DIFFERS),
    "torchrun's rank": (TORCHRUN, (1, 2), []),
    "numbers of the caller's own": (TORCHRUN, (0, 4), []),
    "not torchrun's": (variables("LOCAL_RANK=1 LOCAL_WORLD_SIZE=2"), (0, 2), []),
    "one beside mpirun's": (MPIRUN, ONE, BESIDE),
    "one beside mpirun 5's": (of("openmpi", "5-bound"), ONE, BESIDE),
    "one beside srun's": (SRUN, ONE, BESIDE),
    "one beside srun's with one mask": (of("slurm", "one-mask-for-all"), ONE, BESIDE),
    "one beside torchrun's": (TORCHRUN, ONE, BESIDE),
    "one beside torchrun's, bound as one": ({**BOUND, **TORCHRUN}, ONE, BESIDE),
    "torchrun of one beside mpirun's": ({**MPIRUN, **ONE_OF_TORCHRUN}, ONE, BESIDE),
    "torchrun inside mpirun": ({**MPIRUN, **TORCHRUN}, (1, 2), BESIDE),
    "torchrun inside srun": ({**SRUN, **TORCHRUN}, (1, 2), BESIDE),
    "srun's other task": (of("slurm", "gres", "SLURM_LOCALID=7"), ONE, BESIDE),
    "srun's unreadable list": (of("slurm", "gres", "SLURM_CPU_BIND_LIST=?"), ONE, BESIDE),
    "mpirun's rank": (MPIRUN, (1, 2), []),
    "as the caller counts": (MPIRUN, (1, 4), []),
    "no launcher": ({}, ONE, []),
    "mpirun has bound it": (of("openmpi", "bound"), ONE, []),
    "srun has bound it apart": (BOUND, ONE, []),
    "one task": (of("slurm", "job-gpus", "SLURM_STEP_TASKS_PER_NODE=1"), ONE, []),
    "one process": (of("openmpi", "unbound", "OMPI_COMM_WORLD_LOCAL_SIZE=1"), ONE, []),
    "a batch script": (of("slurm", "batch-script"), ONE, []),
    "no task": (of("slurm", "job-gpus", "SLURM_LOCALID="), ONE, []),
    "torchrun of one": (ONE_OF_TORCHRUN, ONE, []),
}


@pytest.mark.parametrize(("env", "place", "expected"), CASES.values(), ids=CASES)
def test_ranks_and_launchers(
    env: Mapping[str, str], place: tuple[int, int], expected: list[str]
) -> None:
    found = consistency(Ranks(local_rank=place[0], local_size=place[1]), env.get)
    assert [notice.code for notice in found] == expected
    assert {notice.rank for notice in found} <= {place[0]}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("another rank than torchrun's", "local_rank 0 of 2, but torchrun set LOCAL_RANK=1"),
        ("one beside mpirun's", "mpirun started 2 processes"),
    ],
)
def test_the_warning_names_both(name: str, said: str) -> None:
    env, (rank, size), _ = CASES[name]
    (notice,) = consistency(Ranks(local_rank=rank, local_size=size), env.get)
    assert said in notice.message
