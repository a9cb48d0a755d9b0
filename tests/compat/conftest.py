"""The machine that old scripts are tried on: this one's CPUs, with two GPUs of the fake driver."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpuaff import Topology

from fakedriver.driver import FakeDriver
from fakedriver.play import this_machine


@pytest.fixture
def driver(fake_driver: Callable[[Topology], FakeDriver]) -> FakeDriver:
    return fake_driver(this_machine(2))
