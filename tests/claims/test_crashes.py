"""A claimer that is killed, stopped or interrupted at any of its steps harms nobody.

The steps are the lines of a claim (``steps.py``), and the calls of NVML and CUDA.
"""

from __future__ import annotations

import json
import os
import re
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


class TestStopped:
    @pytest.mark.slow
    @pytest.mark.parametrize(("play", "every"), [("claim", 80), ("release", 20), ("wait", 120)])
    def test_at_some_steps(self, machine: FakeDriver, play: str, every: int) -> None:
        """Who is stopped goes on when continued, and the others go on meanwhile.

        Only who is stopped with the guard holds them up, for as long as the guard allows.
        """
        steps(machine, play, "stop", every=every, first=5)

    def test_between_the_look_and_the_lease(self, fake_driver: MakeDriver) -> None:
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
SOURCES = HERE.parent / "fakedriver"


def functions() -> list[str]:
    """The functions of the fake driver."""
    text = "".join((SOURCES / name).read_text("utf-8") for name in ("nvml.c", "cuda.c"))
    return sorted(
        set(re.findall(r"^(?:EXPORT )?\w+ \*?((?:nvml|cu)[A-Z]\w+)\(", text, re.MULTILINE))
    )


def counted(driver: FakeDriver) -> dict[str, int]:
    """How often a claim and its release call each function of the driver."""
    found = {}
    names = functions()
    assert len(names) > 30
    for start in range(0, len(names), 60):  # there is room for 64 at a time
        some = names[start : start + 60]
        driver.watch(*some)
        driver.run(CLAIM, env=env(driver))
        found.update({name: driver.calls(name) for name in some})
        driver.heal()
    return {name: calls for name, calls in found.items() if calls}


def dies_at(driver: FakeDriver, function: str, call: int) -> None:
    driver.kill_at(function, after=call)
    done = driver.run(CLAIM, env=env(driver), check=False)
    driver.heal()
    assert done.returncode == -9, (function, call, done)
    all_four = driver.run(CLAIM_ALL, env=env(driver))
    assert all_four.stdout.split() == ["4"], (function, call)


class TestKilledInTheDriver:
    """Not by a step of ours: in the midst of a call, in whichever thread makes it."""

    def test_in_each_kind_of_call(self, machine: FakeDriver) -> None:
        for function in ("nvmlInit_v2", "cuInit", "cuDevicePrimaryCtxRetain"):
            dies_at(machine, function, 0)

    @pytest.mark.slow
    def test_in_each_function_at_its_first_and_last_call(self, machine: FakeDriver) -> None:
        calls = counted(machine)
        assert {"cuInit", "cuDevicePrimaryCtxRetain", "nvmlShutdown"} <= calls.keys()
        for function, count in calls.items():
            for call in sorted({0, count - 1}):
                dies_at(machine, function, call)


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
