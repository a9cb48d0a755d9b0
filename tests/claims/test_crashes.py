"""A claimer that is killed, stopped or interrupted at any of its steps harms no other.

The steps are the interpreter's in a claim (``steps.py``), and the calls of NVML and CUDA.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests import pci_devices
from tests.fakedriver.driver import FakeDriver, MakeDriver
from tests.fakedriver.play import this_machine
from tests.processes import stopped

pytestmark = pytest.mark.fake_driver

STEPS = Path(__file__).parent / "steps.py"


@pytest.fixture
def machine(fake_driver: MakeDriver) -> Iterator[FakeDriver]:
    """Four GPUs; the driver lists the dead for a moment, as a real one does."""
    driver = fake_driver(this_machine(4))
    driver.linger(20)
    yield driver
    assert driver.double_holdings() == []


def env(driver: FakeDriver, *, safe_gpu: bool = False) -> dict[str, str]:
    folder = driver.path.parent.parent
    return {
        **driver.env(),
        "GPUAFF_LOCK_DIR": str(folder / "locks"),
        "GPUAFF_SAFE_GPU": str(folder / "safe/lock") if safe_gpu else "off",
    }


def steps(
    driver: FakeDriver,
    play: str,
    how: str,
    turns: int,
    *,
    gpus: int = 4,
    safe_gpu: bool = False,
    prefix: Sequence[str] = (),
) -> None:
    """Try it at so many random steps; nothing may be left at any."""
    seed = int(os.environ.get("SEED", random.randrange(10**6)))
    said = {"play": play, "how": how, "turns": turns, "gpus": gpus, "seed": seed}
    done = driver.run(
        [*prefix, sys.executable, str(STEPS), *(f"--{key}={said[key]}" for key in said)],
        env=env(driver, safe_gpu=safe_gpu),
        check=False,
        timeout=300,
    )
    assert done.stdout, done.stderr
    told = json.loads(done.stdout)
    assert told["failures"] == {}, f"SEED={seed}"
    assert told["steps"] > 200


@pytest.mark.case("E6")
@pytest.mark.parametrize(
    ("play", "how", "turns"),
    [
        ("claim", "kill", 6),
        ("release", "kill", 4),
        ("claim", "interrupt", 12),
        ("release", "interrupt", 8),
        ("block", "interrupt", 8),
    ],
)
def test_at_some_steps(machine: FakeDriver, play: str, how: str, turns: int) -> None:
    steps(machine, play, how, turns)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("play", ["claim", "release", "block", "lease", "refused", "wait", "vain"])
@pytest.mark.parametrize("how", ["kill", "interrupt"])
def test_at_many_steps(machine: FakeDriver, play: str, how: str) -> None:
    steps(machine, play, how, int(os.environ.get("TURNS", "150")))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "interrupt"])
def test_at_steps_under_the_lock_of_safe_gpu(machine: FakeDriver, how: str) -> None:
    steps(machine, "claim", how, 40, safe_gpu=True)


@pytest.mark.needs("two-cpus", "mount-namespaces")
@pytest.mark.parametrize(
    ("how", "turns"),
    [
        ("interrupt", 8),
        *(pytest.param(how, 150, marks=pytest.mark.slow) for how in ("interrupt", "kill")),
    ],
)
def test_a_claim_with_its_cpus(
    fake_driver: MakeDriver, tmp_path: Path, how: str, turns: int
) -> None:
    """GPUs that sysfs shows as well: without those nothing is pinned."""
    prefix = pci_devices.gpus(tmp_path / "pci", 2)
    steps(fake_driver(this_machine(2)), "pin", how, turns, gpus=2, prefix=prefix)


def test_one_that_is_stopped_between_the_look_and_the_lease(fake_driver: MakeDriver) -> None:
    """Who has had the GPU meanwhile, and is dead, is no stranger: the driver lists it still."""
    driver = fake_driver(this_machine(1))
    last = "nvmlDeviceGetDisplayActive"  # of each look
    driver.watch(last)
    driver.run(CLAIM_ONE, env=env(driver))
    looks = driver.calls(last)
    assert looks >= 2  # before and after
    driver.heal()
    driver.stop_at(last, after=looks - 2)
    with stopped(CLAIM_ONE, env=env(driver), fresh=True) as first:
        os.waitid(os.P_PID, first.pid, os.WSTOPPED | os.WNOWAIT)
        driver.heal()
        driver.linger(350)
        driver.run(f"{CLAIM_ONE}\nos.kill(os.getpid(), 9)", env=env(driver), check=False)
        os.kill(first.pid, signal.SIGCONT)
        assert first.heard() == "0"
    assert driver.contexts_made(0) == 3


CLAIM_ONE = """
import os
import gpuaff
print(gpuaff.claim_gpus(1).gpus[0].index)
"""
CLAIM = """
import gpuaff
claim = gpuaff.claim_gpus(2)
print(*[gpu.index for gpu in claim.gpus])
claim.release()
"""
CLAIM_ALL = """
import gpuaff
print(len(gpuaff.claim_gpus(4, wait=2).gpus))
"""


@pytest.mark.parametrize(
    "function", ["nvmlInit_v2", "nvmlShutdown", "cuInit", "cuDevicePrimaryCtxRetain"]
)
def test_one_that_is_killed_in_a_call_of_the_driver(machine: FakeDriver, function: str) -> None:
    """Not by a step of ours, and in whichever thread makes the call."""
    machine.kill_at(function, after=0)
    done = machine.run(CLAIM, env=env(machine), check=False)
    machine.heal()
    assert done.returncode == -9
    assert machine.run(CLAIM_ALL, env=env(machine)).stdout.split() == ["4"]
