"""``examples/dataloader``: where each worker was."""

from __future__ import annotations

import pytest

from gpuaff.cpuset import format_cpulist, parse_cpulist
from tests.example_runs import run_example
from tests.fakedriver.driver import FakeDriver
from tests.processes import CPUS, worker_cpus

pytestmark = [
    pytest.mark.fake_driver,
    pytest.mark.slow,
    pytest.mark.needs("torch", "two-cpus"),
    pytest.mark.timeout(180),
]


def test_workers_leave_a_core_to_the_main_process(driver: FakeDriver) -> None:
    env = {**driver.env(), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    options = ["--workers", "2", "--method", "spawn"]
    done = run_example("dataloader/dataloader.py", *options, env=env, timeout=150)
    main, *workers = done.stdout.splitlines()
    assert main == f"rank 0: main process: cpus {format_cpulist(frozenset(CPUS))}"
    assert [line.rpartition(":")[0] for line in workers] == [f"rank 0: worker {n}" for n in (0, 1)]
    parts = [parse_cpulist(line.rpartition(" ")[2]) for line in workers]
    assert frozenset().union(*parts) == worker_cpus()
