"""Ctrl-C at any moment of a call: the process is wholly as before, or wholly as after."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

from tests.fakedriver.driver import FakeDriver
from tests.processes import environment

PROGRAM = Path(__file__).parents[1] / "programs/interrupted_pin.py"


@pytest.mark.fake_driver
@pytest.mark.needs("two-cpus", "memory-policies")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("trials", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_an_interrupt_at_a_random_opcode_leaves_all_or_nothing(
    driver: FakeDriver, trials: int
) -> None:
    """Of set_affinity (the first, and a second call), reapply, restore, the end of a block."""
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    command = [sys.executable, str(PROGRAM), str(seed), str(trials)]
    done = driver.run(command, env={**environment(), **driver.env()}, timeout=280)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["mixed"] == []
    assert found["sent"] >= 3.75 * trials
    assert found["raised"] == found["sent"]
    assert found["old"] > 0 or trials < 40
