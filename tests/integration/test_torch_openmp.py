"""torch brings an OpenMP runtime along: what it does to a share, and what we say of it."""

from __future__ import annotations

import json

import pytest

from tests.fakedriver.driver import FakeDriver
from tests.processes import printed

pytestmark = [
    pytest.mark.fake_driver,
    pytest.mark.needs("two-cpus", "torch"),
]

SCRIPT = """
import json, os, gpuaff
affinity = gpuaff.set_affinity(0, 1, openmp=True)
codes = [notice.code for notice in affinity.warnings if "omp" in notice.code]
import torch
torch.ones(1000, 1000).sum()
kept = len(os.sched_getaffinity(0)) == len(affinity)
threads = torch.get_num_threads() == affinity.plan.share_of(0).cores
gpuaff.set_affinity(0, 1)
torch.ones(1000, 1000).sum()
again = os.sched_getaffinity(0) == affinity
print(json.dumps({"codes": codes, "kept": kept, "threads": threads, "again": again}))
"""


@pytest.mark.case("C2", "C4", "C5", "C8")
@pytest.mark.parametrize("env", [{"OMP_PROC_BIND": "close"}, {}], ids=str)
def test_torch_narrows_the_mask_and_that_was_said(driver: FakeDriver, env: dict[str, str]) -> None:
    said = json.loads(printed(SCRIPT, env={**driver.env(), **env}))
    assert said["codes"] == (["omp-binding"] if env else [])
    assert said["kept"] is not bool(env), "this is what the warning is about"
    assert said["threads"] or env
    assert said["again"], "a second call gets the share back"
