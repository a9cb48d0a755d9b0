"""``examples/mpi`` and ``examples/horovod_style``, started by a real mpirun."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.example_runs import EXAMPLES, finished
from tests.fakedriver.driver import FakeDriver
from tests.processes import CPUS, environment

pytestmark = [
    pytest.mark.fake_driver,
    pytest.mark.slow,
    pytest.mark.needs("mpi4py", "mpirun.openmpi"),
]


def mpirun(
    script: str, *words: str, env: Mapping[str, str], bind: str = "none"
) -> subprocess.CompletedProcess[str]:
    command = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "--bind-to", bind]
    command += ["-n", "2", sys.executable, str(EXAMPLES / script), *words]
    return finished(command, environment(env))


@pytest.mark.needs("two-cpus")
@pytest.mark.parametrize("bind", ["none", "core"])
def test_one_gpu_per_rank(driver: FakeDriver, bind: str) -> None:
    done = mpirun("mpi/one_gpu_per_rank.py", env=driver.env(), bind=bind)
    assert done.returncode == 0, done.stderr
    head, *ranks, mean = done.stdout.splitlines()
    assert head.split() == ["rank", "host", "local", "rank", "GPU", "CPUs"]
    rows = [line.split() for line in ranks]
    assert [(rank, local, gpu) for rank, _, local, gpu, _ in rows] == [
        ("0", "0", "0"),
        ("1", "1", "1"),
    ]
    assert rows[0][4] != rows[1][4]
    if len(CPUS) == 2:
        assert {row[4] for row in rows} == {str(cpu) for cpu in CPUS}
    assert mean == "mean over 2 ranks: 1.5"  # (1 + 2) / 2


def test_each_rank_claims_for_itself(driver: FakeDriver, tmp_path: Path) -> None:
    env = {**driver.env(), "GPUAFF_LOCK_DIR": str(tmp_path / "locks")}
    done = mpirun("horovod_style/horovod_style.py", env=env)
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert [line.split(":")[0] for line in lines] == ["local rank 0", "local rank 1"]
    found = sorted(line.split(": ")[1] for line in lines)
    assert found == ["GPU 0, device 0 of 1", "GPU 1, device 0 of 1"]
    assert driver.double_holdings() == []


def test_the_wrong_order_is_refused(driver: FakeDriver, tmp_path: Path) -> None:
    env = {**driver.env(), "GPUAFF_LOCK_DIR": str(tmp_path / "locks")}
    done = mpirun("horovod_style/horovod_style.py", "--cuda-first", env=env)
    assert done.returncode != 0
    lines = done.stdout.splitlines()
    assert lines
    for line in lines:
        assert "CudaInitializedError: CUDA is already initialised in this process" in line
        assert "Claim before that" in line
