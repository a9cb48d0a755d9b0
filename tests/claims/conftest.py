"""The machine that claims are tried on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuaff.topology.model import Topology
from tests.claim_lab import Lab
from tests.fakedriver.driver import MakeDriver
from tests.fakedriver.play import this_machine


@pytest.fixture
def make_lab(fake_driver: MakeDriver, tmp_path: Path) -> Iterator[Callable[[Topology], Lab]]:
    """Makes a machine that plays a topology."""
    made: list[Lab] = []

    def make(topology: Topology) -> Lab:
        made.append(Lab(fake_driver(topology), tmp_path))
        return made[-1]

    yield make
    for lab in made:
        lab.close()


@pytest.fixture
def lab(make_lab: Callable[[Topology], Lab]) -> Lab:
    """A machine with four GPUs, all alike."""
    return make_lab(this_machine(4))
