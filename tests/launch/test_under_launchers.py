"""``set_affinity()`` and ``gpuaff run`` under each launcher: real processes, recorded environments.

Each GPU of the fake driver is near all CPUs of this machine, so two ranks get a half each.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from environments import started
from fakedriver.driver import FakeDriver
from processes import CPUS, environment

pytestmark = [pytest.mark.fake_driver, pytest.mark.needs("two-cpus")]

PIN = """
    import json, os
    import gpuaff
    affinity = gpuaff.set_affinity()
    here = gpuaff.ranks()
    print(json.dumps({
        "rank": affinity.rank,
        "gpu": affinity.gpu,
        "cpus": sorted(os.sched_getaffinity(0)),
        "codes": [warning.code for warning in affinity.warnings],
        "launcher": here.launcher.value,
        "world": [here.rank, here.size],
    }))
"""

RUN = (sys.executable, "-m", "gpuaff", "run", "--")


def said(
    driver: FakeDriver, env: Mapping[str, str], prefix: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """What the ranks say that a command starts, by rank."""
    done = subprocess.run(
        [*prefix, sys.executable, "-c", textwrap.dedent(PIN)],
        capture_output=True,
        text=True,
        env=environment({**driver.env(), **env}),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(found, key=lambda rank: int(rank["rank"]))


UNBOUND = [
    ("torchrun", "torchrun"),
    ("deepspeed", "second-node"),
    ("horovod", "gloo"),
    ("dragon", "collective-group"),
    ("openmpi", "unbound"),
    ("openmpi", "5-unbound"),
    ("hydra", "unbound"),
    ("hydra", "intel"),
    ("mvapich", "mpirun_rsh"),
    ("pals", "mpiexec"),
    ("jsrun", "jsrun"),
    ("flux", "one-node"),
    ("slurm", "no-plugin"),
]


@pytest.mark.parametrize(
    "prefix",
    [
        pytest.param((), id="in the script"),
        pytest.param(RUN, id="gpuaff run", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(("launcher", "name"), UNBOUND)
def test_each_rank_has_its_gpu_and_its_half(
    driver: FakeDriver, launcher: str, name: str, prefix: Sequence[str]
) -> None:
    """Nobody passes a number."""
    found = []
    for rank in started(launcher, name):
        # The GPUs that it was shown are those of the machine where it was recorded.
        gone = {"CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE"}
        env = {k: v for k, v in rank.environ.items() if k not in gone}
        if prefix:
            done = subprocess.run(
                [*prefix, sys.executable, "-c", "import os; print(*os.sched_getaffinity(0))"],
                capture_output=True,
                text=True,
                env=environment({**driver.env(), **env}),
                check=False,
            )
            assert done.returncode == 0, done.stderr
            found.append({int(cpu) for cpu in done.stdout.split()})
        else:
            (one,) = said(driver, env)
            assert (one["rank"], one["gpu"]) == (rank.ranks.local_rank, rank.ranks.local_rank)
            assert not {"no-rank", "ranks-beside", "masks-unknown"} & set(one["codes"])
            found.append(set(one["cpus"]))
    first, second = found
    assert first
    assert second
    assert first & second == set()
    assert first | second <= set(CPUS)


@pytest.mark.case("D10")
@pytest.mark.parametrize("name", ["gpus-per-task", "map-gpu"])
def test_one_visible_gpu_for_each_task(driver: FakeDriver, name: str) -> None:
    """Device 0 is the rank's own, whatever its number is; the job has all GPUs of the machine."""
    ranks = started("slurm", name)
    seen = [rank.environ["CUDA_VISIBLE_DEVICES"] for rank in ranks]
    halves = {}
    for rank, gpu in zip(ranks, seen, strict=True):
        unbound = {**rank.environ, "SLURM_CPU_BIND_TYPE": "none", "SLURM_JOB_GPUS": "0,1"}
        (one,) = said(driver, unbound)
        assert (one["rank"], one["gpu"]) == (rank.ranks.local_rank, int(gpu))
        assert "gpus-unknown" not in one["codes"]
        halves[gpu] = one["cpus"]
    assert max(halves["0"]) < min(halves["1"])


def test_variables_that_are_left_over_from_another_launcher(driver: FakeDriver) -> None:
    """All ranks of this mpirun have another one's variables, of rank 0 of 2."""
    old = started("hydra", "unbound")[0].environ
    for rank in started("openmpi", "unbound"):
        (one,) = said(driver, {**rank.environ, **old})
        assert (one["rank"], one["launcher"]) == (rank.ranks.local_rank, "mpirun")
        told = "ranks-contradict" in one["codes"]
        assert told is (rank.ranks.local_rank == 1), "rank 0 is the same to both"


def test_numbers_that_name_no_rank_under_run(driver: FakeDriver) -> None:
    env = {"OMPI_COMM_WORLD_LOCAL_RANK": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    done = subprocess.run(
        [*RUN[:-1], "--no-claim", "--", "true"],
        capture_output=True,
        text=True,
        env=environment({**driver.env(), **env}),
        check=False,
    )
    assert (done.returncode, done.stderr.count("[bad-rank]")) == (0, 1)


MPIRUN = ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none")


@pytest.mark.parametrize(
    ("launcher", "command"),
    [
        pytest.param("mpirun", MPIRUN, marks=pytest.mark.needs("mpirun.openmpi")),
        pytest.param("mpiexec", ("mpirun.mpich",), marks=pytest.mark.needs("mpirun.mpich")),
    ],
)
def test_a_real_launcher(driver: FakeDriver, launcher: str, command: Sequence[str]) -> None:
    first, second = said(driver, {}, [*command, "-n", "2"])
    assert [first["world"], second["world"]] == [[0, 2], [1, 2]]
    assert (first["launcher"], second["launcher"]) == (launcher, launcher)
    assert (first["gpu"], second["gpu"]) == (0, 1)
    assert not set(first["cpus"]) & set(second["cpus"])


@pytest.mark.needs("mpirun.openmpi", "mpirun.mpich")
def test_a_real_launcher_with_anothers_variables(driver: FakeDriver) -> None:
    """mpirun of MPICH with Open MPI's variables: its proxy is the nearest above."""
    old = started("openmpi", "unbound")[0].environ
    found = said(driver, old, ["mpirun.mpich", "-n", "2"])
    assert [one["rank"] for one in found] == [0, 1]
    assert {one["launcher"] for one in found[1:]} == {"mpiexec"}


@pytest.mark.needs("mpirun.mpich")
def test_ranks_that_mpich_has_bound(driver: FakeDriver) -> None:
    found = said(driver, {}, ["mpirun.mpich", "-n", "2", "-bind-to", "hwthread"])
    assert all(len(one["cpus"]) == 1 and "masks-unknown" in one["codes"] for one in found)
    assert found[0]["cpus"] != found[1]["cpus"]
