"""torch brings an OpenMP runtime along: what it does to a share, and what we say of it."""

from __future__ import annotations

import pytest

from tests.fakedriver.driver import FakeDriver, MakeDriver
from tests.fakedriver.play import this_machine
from tests.processes import printed

pytestmark = [
    pytest.mark.fake_driver,
    pytest.mark.needs("two-cpus", "torch"),
]

SCRIPT = """
import os, gpuaff
affinity = gpuaff.set_affinity(0, 1, openmp=True)
print([notice.code for notice in affinity.warnings if "omp" in notice.code])
import torch
torch.ones(1000, 1000).sum()
print(len(os.sched_getaffinity(0)) == len(affinity))
print(torch.get_num_threads() == affinity.plan.share_of(0).cores)
gpuaff.set_affinity(0, 1)
torch.ones(1000, 1000).sum()
print(os.sched_getaffinity(0) == affinity)
"""


@pytest.fixture
def driver(fake_driver: MakeDriver) -> FakeDriver:
    return fake_driver(this_machine(2))


@pytest.mark.case("C2", "C4", "C5")
@pytest.mark.parametrize(
    "env",
    [
        {"OMP_PROC_BIND": "close"},
        pytest.param({"GOMP_CPU_AFFINITY": "0-1023"}, marks=pytest.mark.slow),
    ],
)
def test_torch_narrows_the_mask_and_that_was_said(driver: FakeDriver, env: dict[str, str]) -> None:
    said = printed(SCRIPT, env={**driver.env(), **env}).splitlines()
    assert said[0] == "['omp-binding']"
    assert said[1] == "False", "this is what the warning is about"
    assert said[3] == "True", "a second call gets the share back"


@pytest.mark.slow
@pytest.mark.case("C8")
def test_without_such_variables_the_share_stays(driver: FakeDriver) -> None:
    assert printed(SCRIPT, env=driver.env()).splitlines() == ["[]", "True", "True", "True"]
