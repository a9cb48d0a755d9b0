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
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.environments import Started, started
from tests.fakedriver.driver import FakeDriver
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


def said(
    driver: FakeDriver, env: Mapping[str, str], prefix: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """What the ranks say that a command starts, by rank: in files, as mpirun may mix lines."""
    with TemporaryDirectory() as folder:
        write = f"import os, sys; sys.stdout = open(f'{folder}/{{os.getpid()}}', 'w')\n"
        done = subprocess.run(
            [*prefix, sys.executable, "-c", write + textwrap.dedent(PIN)],
            capture_output=True,
            text=True,
            env=environment({**driver.env(), **env}),
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found = [json.loads(file.read_text()) for file in Path(folder).iterdir()]
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


@pytest.mark.parametrize(("launcher", "name"), UNBOUND)
def test_each_rank_has_its_gpu_and_its_half(driver: FakeDriver, launcher: str, name: str) -> None:
    """Without numbers from the script."""
    ranks = started(launcher, name)[:2]
    found = [
        json.loads(printed(PIN, env={**driver.env(), **shown_no_gpus(rank)})) for rank in ranks
    ]
    for one, rank in zip(found, ranks, strict=True):
        assert (one["rank"], one["gpu"]) == (rank.ranks.local_rank, rank.ranks.local_rank)
        assert not {"no-rank", "ranks-beside", "masks-unknown"} & set(one["codes"])
    first, second = (set(one["cpus"]) for one in found)
    assert first
    assert second
    assert not first & second
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
