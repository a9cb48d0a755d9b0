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


def race(driver: FakeDriver, *, gpus: int, **options: int) -> dict[str, Any]:
    """Play it, and look at what is left."""
    said = [f"--{name}={value}" for name, value in {"gpus": gpus, **options}.items()]
    done = driver.run(
        [sys.executable, str(HERE / "many.py"), "--wait", *said],
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
    told = race(shared_driver(this_machine(8)), ours=24, hurt=12, gpus=8, rounds=2, seed=1)
    assert told["rounds"] == 2


@pytest.mark.slow
@pytest.mark.needs("two-users")
def test_many_claimers_of_two_users(shared_driver: MakeDriver) -> None:
    driver = shared_driver(Topology.named("dgx-a100"))
    told = race(driver, ours=64, hurt=32, gpus=8, rounds=12, seed=2)
    assert told["killed"] > 100
    assert told["stopped"] > 50


TOGETHER = """
import json, os, sys
import gpuaff

gpuaff.claim_gpus(1, placeholder=None).release()
ready, start = os.pipe()
reader, writer = os.pipe()
done, end = os.pipe()
for number in range(int(sys.argv[1])):
    if os.fork() == 0:
        os.close(start)
        os.close(end)
        os.read(ready, 1)
        try:
            said = gpuaff.claim_gpus(1).gpus[0].index
        except BaseException as error:
            said = type(error).__name__
            if said != "GpusBusyError":
                import traceback
                traceback.print_exc()
        os.write(writer, (json.dumps(said) + "\\n").encode())
        os.read(done, 1)  # who has one holds it until all have tried
        os._exit(0)
os.close(start)
os.close(writer)
told = [next(lines) for lines in [iter(os.fdopen(reader))] for _ in range(int(sys.argv[1]))]
os.close(end)
print(*(json.loads(line) for line in told))
"""


@pytest.mark.case("E1", "E5")
@pytest.mark.parametrize(("gpus", "claimers"), [(1, 2), (1, 3), (2, 3), (4, 12)])
def test_as_many_get_one_as_there_are(
    fake_driver: MakeDriver, tmp_path: Path, gpus: int, claimers: int
) -> None:
    driver = fake_driver(this_machine(gpus))
    env = environment(driver) | {"GPUAFF_LOCK_DIR": str(tmp_path / "locks")}
    done = driver.run([sys.executable, "-c", TOGETHER, str(claimers)], env=env)
    told = done.stdout.split()
    assert sorted(one for one in told if one.isdigit()) == [str(gpu) for gpu in range(gpus)]
    assert told.count("GpusBusyError") == claimers - gpus
    assert driver.double_holdings() == []
