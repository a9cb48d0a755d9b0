"""``set_affinity()`` and ``gpuaff run`` under each launcher: real processes, recorded environments.

Each GPU of the fake driver is near all CPUs of this machine, so two ranks get a half each.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.environments import Started, started
from tests.fakedriver.driver import FakeDriver
from tests.fakedriver.play import this_machine
from tests.processes import CPUS, environment, printed

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


def shown_no_gpus(rank: Started) -> dict[str, str]:
    """A rank's environment; the GPUs that it was shown are those of the machine of its record."""
    gone = {"CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE"}
    return {name: text for name, text in rank.environ.items() if name not in gone}


def are_halves(cpus: Sequence[set[int]]) -> bool:
    first, second = cpus
    return bool(first and second) and not first & second and first | second <= set(CPUS)


@pytest.fixture(scope="module")
def in_the_script(
    tmp_path_factory: pytest.TempPathFactory, driver_builds: Path
) -> Mapping[tuple[str, str], list[dict[str, Any]]]:
    """What the two ranks of each start say that pin themselves."""
    folder = tmp_path_factory.mktemp("launchers")
    driver = FakeDriver(this_machine(2), folder, builds=driver_builds)
    ranks = [rank for start in UNBOUND for rank in started(*start)]
    environments = [shown_no_gpus(rank) for rank in ranks]
    found = [json.loads(printed(PIN, env={**driver.env(), **one})) for one in environments]
    assert len(found) == 2 * len(UNBOUND)
    return {start: found[2 * place :][:2] for place, start in enumerate(UNBOUND)}


@pytest.mark.parametrize("start", UNBOUND, ids="-".join)
def test_each_rank_has_its_gpu_and_its_half(
    in_the_script: Mapping[tuple[str, str], list[dict[str, Any]]], start: tuple[str, str]
) -> None:
    """Nobody passes a number."""
    for one, rank in zip(in_the_script[start], started(*start), strict=True):
        assert (one["rank"], one["gpu"]) == (rank.ranks.local_rank, rank.ranks.local_rank)
        assert not {"no-rank", "ranks-beside", "masks-unknown"} & set(one["codes"])
    assert are_halves([set(one["cpus"]) for one in in_the_script[start]])


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "name"), UNBOUND)
def test_so_has_each_rank_under_run(driver: FakeDriver, launcher: str, name: str) -> None:
    found = []
    for rank in started(launcher, name):
        done = subprocess.run(
            [*RUN, sys.executable, "-c", "import os; print(*os.sched_getaffinity(0))"],
            capture_output=True,
            text=True,
            env=environment({**driver.env(), **shown_no_gpus(rank)}),
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found.append({int(cpu) for cpu in done.stdout.split()})
    assert are_halves(found)


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
