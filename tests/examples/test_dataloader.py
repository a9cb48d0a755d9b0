"""``examples/dataloader``: where each worker was."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gpuaff.cpuset import format_cpulist, parse_cpulist
from tests.fakedriver.driver import FakeDriver
from tests.processes import CPUS, environment, worker_cpus

SCRIPT = Path(__file__).parents[2] / "examples/dataloader/dataloader.py"

pytestmark = [
    pytest.mark.fake_driver,
    pytest.mark.slow,
    pytest.mark.needs("torch", "two-cpus"),
    pytest.mark.timeout(180),
    pytest.mark.skipif(not SCRIPT.exists(), reason="needs the examples of a checkout"),
]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_leave_a_core_to_the_main_process(driver: FakeDriver, method: str) -> None:
    env = environment({**driver.env(), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})
    command = [sys.executable, str(SCRIPT), "--workers", "2", "--method", method]
    done = driver.run(command, env=env, timeout=150)
    main, *workers = done.stdout.splitlines()
    assert main == f"rank 0: main process: cpus {format_cpulist(frozenset(CPUS))}"
    assert [line.rpartition(":")[0] for line in workers] == [
        "rank 0: worker 0",
        "rank 0: worker 1",
    ]
    parts = [parse_cpulist(line.rpartition(" ")[2]) for line in workers]
    assert frozenset().union(*parts) == worker_cpus()
