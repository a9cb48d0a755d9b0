"""Scripts in files; this machine with two GPUs of our own in /sys, each with half of its CPUs."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import pci_devices
from tests.fakedriver.driver import FakeDriver
from tests.processes import THREADS, environment, run

START = f"{THREADS}\nfrom gpuaff.pinning.grant import take_grant\n"


def of_script(folder: Path, script: str, *arguments: str, env: Mapping[str, str]) -> list[Any]:
    """What the processes of a script in a file say, which spawned children import: JSON lines."""
    path = folder / "script.py"
    path.write_text(textwrap.dedent(script))
    done = subprocess.run(
        [sys.executable, path, *arguments],
        capture_output=True,
        text=True,
        env=environment(env),
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


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
