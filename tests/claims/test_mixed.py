"""Scripts with gpuaff and scripts with the real safe-gpu on one machine.

safe-gpu comes from PyPI; the nvidia-smi that it calls, and the driver below both, are fake.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.fakedriver.driver import FakeDriver, MakeDriver
from tests.fakedriver.play import this_machine
from tests.processes import SRC, Program, stopped
from tests.safe_gpu_users import begin

HERE = Path(__file__).parent
GPUS = 3

pytestmark = [pytest.mark.fake_driver, pytest.mark.needs("safe_gpu")]

THEIRS = """
import logging, os, sys
import stand_in_cuda
from safe_gpu import safe_gpu

safe_gpu.LOCK_FILENAME = os.environ["GPUAFF_SAFE_GPU"]

class Placeholder:
    def __call__(self, number):
        stand_in_cuda.retain(number)
        return number
    def release(self, number):
        stand_in_cuda.release(number)

def take(count, debug_sleep=0.0):
    try:
        safe_gpu.claim_gpus(count, Placeholder(), debug_sleep=debug_sleep)
    except RuntimeError as error:
        return type(error).__name__
    return safe_gpu.gpu_owner.devices_taken
"""
"""A script with safe_gpu; its placeholder does what frameworks do."""

OURS = """
import os, sys, time
import gpuaff
import stand_in_cuda

def slowly_by(seconds):
    def occupy(number):
        time.sleep(seconds)
        stand_in_cuda.retain(number)
    return occupy

slowly = slowly_by(0.5)

def take(count, **options):
    try:
        return [gpu.index for gpu in gpuaff.claim_gpus(count, **options).gpus]
    except gpuaff.ClaimError as error:
        return type(error).__name__
"""
"""A script with gpuaff."""

DROP_IN = THEIRS.replace("from safe_gpu import", "from gpuaff.compat import")
"""The first one with its new import."""

TELLS = """
sys.stdin.readline()
print("waits")
print({call})
sys.stdin.readline()
"""


class Machine:
    """A machine of the fake driver's, on which scripts of either kind are started."""

    def __init__(self, driver: FakeDriver, env: dict[str, str], stack: ExitStack) -> None:
        self.driver = driver
        self.env = env
        self._stack = stack

    def start(self, kind: str, call: str) -> Program:
        """A script that takes GPUs when told to, prints which, and holds them."""
        return self.run(kind + TELLS.format(call=call))

    def run(self, script: str) -> Program:
        """Any script."""
        env = {**self.env, "PYTHONPATH": f"{SRC}:{self.env['PYTHONPATH']}"}
        return self._stack.enter_context(stopped(script, env=env))

    def taken(self, kind: str, call: str) -> str:
        """What a script says that takes them at once."""
        return begin(self.start(kind, call)).heard()

    def until_locked(self) -> None:
        """Wait until somebody has the lock."""
        path = Path(self.env["GPUAFF_SAFE_GPU"])
        end = time.monotonic() + 20
        while True:
            assert time.monotonic() < end
            held = [
                line for line in Path("/proc/locks").read_text().splitlines() if "FLOCK" not in line
            ]
            if path.exists() and any(f":{path.stat().st_ino} " in line for line in held):
                return
            time.sleep(0.01)


@pytest.fixture
def machine(fake_driver: MakeDriver, tmp_path: Path) -> Iterator[Machine]:
    driver = fake_driver(this_machine(GPUS))
    env = {
        **driver.env(smi=True),
        "PYTHONPATH": str(HERE / "stand_in"),
        "GPUAFF_LOCK_DIR": str(tmp_path / "locks"),
        "GPUAFF_SAFE_GPU": str(tmp_path / "safe_gpu" / "lock"),
    }
    with ExitStack() as stack:
        yield Machine(driver, env, stack)
    assert driver.double_holdings() == []


ours = pytest.mark.parametrize(
    "ours",
    [
        pytest.param(OURS, id="gpuaff"),
        pytest.param(DROP_IN, id="drop-in", marks=pytest.mark.slow),
    ],
)


@ours
def test_we_take_what_they_have_left(machine: Machine, ours: str) -> None:
    assert machine.taken(THEIRS, "take(2)") == "[0, 1]"
    assert machine.taken(ours, "take(2)") == "GpusBusyError"
    assert machine.taken(ours, "take(1)") == "[2]"
    assert machine.taken(ours, "take(1)") == "GpusBusyError"


@ours
def test_they_take_what_we_have_left(machine: Machine, ours: str) -> None:
    assert len(json.loads(machine.taken(ours, "take(2)"))) == 2
    assert machine.taken(THEIRS, "take(2)") == "RuntimeError"
    assert len(json.loads(machine.taken(THEIRS, "take(1)"))) == 1
    assert machine.taken(THEIRS, "take(1)") == "RuntimeError"


@ours
def test_we_wait_while_they_choose(machine: Machine, ours: str) -> None:
    """Between its look and its placeholder the other one's GPU looks free."""
    theirs = begin(machine.start(THEIRS, "take(1, debug_sleep=0.5)"))
    machine.until_locked()
    one = begin(machine.start(ours, "take(1)"))
    assert theirs.heard() == "[0]"
    assert one.heard() in ("[1]", "[2]")


@pytest.mark.parametrize(
    ("ours", "call"),
    [
        pytest.param(OURS, "take(1, placeholder=slowly)", id="gpuaff"),
        pytest.param(DROP_IN, "take(1, debug_sleep=0.5)", id="drop-in", marks=pytest.mark.slow),
    ],
)
def test_they_wait_while_we_occupy(machine: Machine, ours: str, call: str) -> None:
    """Leases mean nothing to them: only the lock keeps them off until the context is there."""
    one = begin(machine.start(ours, call))
    machine.until_locked()
    theirs = begin(machine.start(THEIRS, "take(3)"))
    assert theirs.heard() == "RuntimeError"
    assert one.heard() in ("[0]", "[1]", "[2]")


def test_whoever_is_killed_while_choosing_is_in_nobodys_way(machine: Machine) -> None:
    theirs = begin(machine.start(THEIRS, "take(3, debug_sleep=60)"))
    machine.until_locked()
    one = begin(machine.start(OURS, "take(3, placeholder=slowly)"))
    theirs.kill()
    machine.until_locked()
    time.sleep(0.1)
    one.kill()
    assert machine.taken(THEIRS, "take(3)") == "[0, 1, 2]"


def test_without_a_placeholder_they_do_not_see_us(machine: Machine) -> None:
    """As the documentation says: until CUDA starts, such a claim is for gpuaff's users only."""
    assert machine.taken(OURS, "take(3, placeholder=None)") == "[0, 1, 2]"
    assert machine.taken(OURS, "take(1)") == "GpusBusyError"
    assert machine.taken(THEIRS, "take(3)") == "[0, 1, 2]"


@pytest.mark.slow
def test_they_are_served_among_claimers_that_keep_coming(machine: Machine) -> None:
    """Ours would share the lock so that it is never free; but they stand back."""
    script = f"""
import gpuaff.claims.acquire, random
{OURS}
print("begun")
while True:
    if os.fork() == 0:
        take(1, placeholder=slowly_by(random.uniform(0.3, 0.6)))
        os._exit(0)
    os.wait()
"""
    for _ in range(6):
        machine.run(script).heard()
    time.sleep(0.5)
    user = machine.start(THEIRS, "take(0)")  # no GPU: what counts is its turn
    started = time.monotonic()
    assert begin(user).heard() == "[]"
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    "arguments",
    [
        "--theirs 4 --ours 4 --rounds 3",
        pytest.param("--theirs 4 --drop-in 4 --ours 0 --rounds 6", marks=pytest.mark.slow),
        pytest.param("--theirs 20 --ours 20 --rounds 4 --seed 1", marks=pytest.mark.slow),
        pytest.param("--theirs 6 --ours 6 --rounds 12 --hurt 4", marks=pytest.mark.slow),
    ],
)
def test_many_at_the_same_moment(machine: Machine, arguments: str) -> None:
    """No GPU is lost, and none is given to two; each round begins without a lock file."""
    command = [sys.executable, str(HERE / "many.py"), "--gpus", str(GPUS), *arguments.split()]
    done = machine.driver.run(command, env=machine.env, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
