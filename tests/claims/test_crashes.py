"""A claimer that is killed, stopped or interrupted at any of its steps harms no other.

The steps are the lines of a claim (``steps.py``), and the calls of NVML and CUDA.
"""

from __future__ import annotations

import json
import os
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

HERE = Path(__file__).parent

SOME = [("claim", 110), ("release", 16)]
"""What is played by default, and at every how-manieth step. By hand all are tried."""

MANY = [
    ("claim", 30),
    ("release", 4),
    ("lease", 60),
    ("refused", 60),
    ("wait", 40),
    ("vain", 50),
]
"""The same for slow tests."""


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
    *,
    every: int,
    first: int = 0,
    safe_gpu: bool = False,
    gpus: int = 4,
    prefix: Sequence[str] = (),
) -> None:
    """Try it at every so manieth step; nothing may be left at any."""
    said = {"play": play, "how": how, "every": every, "first": first, "gpus": gpus}
    options = [f"--{name}={value}" for name, value in said.items()]
    done = driver.run(
        [*prefix, sys.executable, str(HERE / "steps.py"), *options],
        env=env(driver, safe_gpu=safe_gpu),
        check=False,
        timeout=110,
    )
    assert done.stdout, done.stderr
    told = json.loads(done.stdout)
    assert told["failures"] == {}
    assert told["tried"] > 4


class TestKilled:
    @pytest.mark.case("E6")
    @pytest.mark.parametrize(("play", "every"), SOME)
    def test_at_some_steps(self, machine: FakeDriver, play: str, every: int) -> None:
        steps(machine, play, "kill", every=every, first=7)

    @pytest.mark.slow
    @pytest.mark.parametrize(("play", "every"), MANY)
    def test_at_many_steps(self, machine: FakeDriver, play: str, every: int) -> None:
        steps(machine, play, "kill", every=every, first=3)

    @pytest.mark.slow
    def test_at_steps_under_the_lock_of_safe_gpu(self, machine: FakeDriver) -> None:
        steps(machine, "claim", "kill", every=97, safe_gpu=True)


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


class TestInterrupted:
    """Of a few steps, and between any two of the interpreter: see test_interrupts.py."""

    @pytest.mark.slow
    @pytest.mark.parametrize(("play", "every"), MANY)
    def test_at_many_steps(self, machine: FakeDriver, play: str, every: int) -> None:
        steps(machine, play, "interrupt", every=every, first=4)

    @pytest.mark.slow
    def test_at_steps_under_the_lock_of_safe_gpu(self, machine: FakeDriver) -> None:
        steps(machine, "claim", "interrupt", every=120, first=9, safe_gpu=True)


@pytest.mark.needs("two-cpus", "mount-namespaces")
@pytest.mark.parametrize(
    ("how", "every"),
    [
        ("interrupt", 150),
        pytest.param("interrupt", 9, marks=pytest.mark.slow),
        pytest.param("kill", 9, marks=pytest.mark.slow),
    ],
)
def test_a_claim_with_its_cpus(
    fake_driver: MakeDriver, tmp_path: Path, how: str, every: int
) -> None:
    """GPUs that sysfs shows as well: without those nothing is pinned."""
    prefix = pci_devices.gpus(tmp_path / "pci", 2)
    steps(fake_driver(this_machine(2)), "pin", how, every=every, first=2, gpus=2, prefix=prefix)
