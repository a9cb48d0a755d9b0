"""This machine with two GPUs of our own in /sys: each has half of its CPUs as its domain."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests import pci_devices
from tests.fakedriver.driver import FakeDriver
from tests.processes import THREADS, run

START = THREADS + "from gpuaff.pinning.grant import take_grant\n"


class Machine:
    """A machine to run scripts on."""

    def __init__(self, driver: FakeDriver, inside: tuple[str, ...]) -> None:
        self.driver = driver
        self.inside = inside

    def says(
        self, script: str, *, env: dict[str, str] | None = None, prefix: Sequence[str] = ()
    ) -> list[str]:
        """The words that a script prints, which must succeed."""
        variables = {**self.driver.env(), **(env or {})}
        done = run(START + script, env=variables, prefix=prefix, inside=self.inside)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    def all_hold(self, script: str, *, env: dict[str, str] | None = None) -> None:
        """Run a script all of whose facts must hold."""
        assert self.says(f"{script}\nprint('the end')\n", env=env)[-2:] == ["the", "end"]


@pytest.fixture(scope="module")
def two_in_sysfs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    return tuple(pci_devices.gpus(tmp_path_factory.mktemp("machine"), 2))


@pytest.fixture
def machine(driver: FakeDriver, two_in_sysfs: tuple[str, ...]) -> Machine:
    return Machine(driver, two_in_sysfs)


@pytest.fixture
def bare(driver: FakeDriver) -> Machine:
    """Whose GPUs sysfs does not show."""
    return Machine(driver, ())
