"""Many claimers at the same moment: nobody gets what another one has, and no GPU is lost."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gpuaff.topology.model import Topology
from tests.fakedriver.driver import FakeDriver, MakeDriver
from tests.fakedriver.play import this_machine

pytestmark = pytest.mark.fake_driver

HERE = Path(__file__).parent


def environment(driver: FakeDriver) -> dict[str, str]:
    """The lock directory beside the driver's state, where it is everyone's."""
    folder = driver.path.parent.parent / "locks"
    return {**driver.env(), "GPUAFF_LOCK_DIR": str(folder), "GPUAFF_SAFE_GPU": "off"}


AFTERWARDS = """
import json, os
import gpuaff
from gpuaff.claims.locking import registry
from gpuaff._system import locks

folder = os.environ["GPUAFF_LOCK_DIR"]
ours = {locks.identity(os.path.join(folder, name)): name for name in os.listdir(folder)}
left = [ours[lock.file] for lock in locks.held_locks() if lock.file in ours]
slots = [entry.slot for entry in registry.entries()]
claim = gpuaff.claim_gpus(int(os.environ["ALL"]))
print(json.dumps([left, slots, len(claim.gpus)]))
"""


def race(driver: FakeDriver, *flags: str, gpus: int, **options: int) -> dict[str, Any]:
    """Play it, and look at what is left."""
    said = [f"--{name}={value}" for name, value in {"gpus": gpus, **options}.items()]
    done = driver.run(
        [sys.executable, str(HERE / "many.py"), *flags, *said],
        env=environment(driver),
        check=False,
        timeout=110,
    )
    assert done.stdout, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["failures"] == []
    assert driver.double_holdings() == []
    left = driver.run(AFTERWARDS, env={**environment(driver), "ALL": str(gpus)})
    assert json.loads(left.stdout) == [[], [], gpus]
    return told


@pytest.mark.case("E5", "E6")
def test_some_claimers_some_rounds(shared_driver: MakeDriver) -> None:
    told = race(
        shared_driver(this_machine(8)), "--wait", ours=24, hurt=12, gpus=8, rounds=2, seed=1
    )
    assert told["rounds"] == 2


@pytest.mark.slow
@pytest.mark.needs("two-users")
def test_many_claimers_of_two_users(shared_driver: MakeDriver) -> None:
    driver = shared_driver(Topology.named("dgx-a100"))
    told = race(driver, "--wait", ours=64, hurt=32, gpus=8, rounds=6, seed=2)
    assert told["killed"] > 100
    assert told["stopped"] > 50


@pytest.mark.case("E1", "E5")
@pytest.mark.parametrize(("gpus", "claimers"), [(1, 2), (2, 3), (4, 12)])
def test_as_many_get_one_as_there_are(shared_driver: MakeDriver, gpus: int, claimers: int) -> None:
    """Each tries once."""
    race(shared_driver(this_machine(gpus)), ours=claimers, gpus=gpus, rounds=2)
