"""Programs that claim GPUs of the fake driver, each a fork of the nursery (processes.py)."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable
from pathlib import Path

from tests.fakedriver.driver import FakeDriver
from tests.processes import Program, environment, nursery

BEGIN = """
import json, os, signal, sys, threading, time
import gpuaff
from gpuaff.errors import *
from tests.programs.claiming import *
"""


class Lab:
    """A fake machine, and the programs that claim its GPUs."""

    def __init__(self, driver: FakeDriver, folder: Path) -> None:
        self.driver, self.folder = driver, folder
        self._programs: list[Program] = []
        self.env: dict[str, str | None] = {
            "GPUAFF_LOCK_DIR": str(folder / "locks"),
            "GPUAFF_SAFE_GPU": "off",
        }

    def start(self, code: str, **env: str | None) -> Program:
        """Start a program; :data:`BEGIN` is before it."""
        driver = self.driver.env()
        asked = {**environment(driver), **self.env, **env}
        variables = {name: value for name, value in asked.items() if value is not None}
        forks = nursery(driver["LD_LIBRARY_PATH"])
        program = forks.start(BEGIN + textwrap.dedent(code), env=variables)
        self._programs.append(program)
        return program

    def enclosing(self, call: str, **env: str | None) -> tuple[Program, dict[str, str | None]]:
        """A program with a claim, which waits, and the variables of what it starts."""
        program = self.start(
            f"claim = gpuaff.claim_gpus({call})\n"
            "say(os.environ['GPUAFF_CLAIM'])\nsay(os.environ['CUDA_VISIBLE_DEVICES'])\ngo_on()",
            **env,
        )
        inner = {"GPUAFF_CLAIM": program.heard(), "CUDA_VISIBLE_DEVICES": program.heard()}
        return program, {**env, **inner, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    def run(self, code: str, **env: str | None) -> list[str]:
        """Run a program to its end, which must be a good one; the lines that it printed."""
        return self.start(code, **env).end().splitlines()

    def one(self, code: str, **env: str | None) -> str:
        """The only line that a program prints."""
        (line,) = self.run(code, **env)
        return line

    def shown(self, call: str, **env: str | None) -> list[str]:
        """Of a claim: CUDA's variables, each GPU's index and ordinal, the warnings' codes."""
        return self.run(f"shown(gpuaff.claim_gpus({call}))", **env)

    def refused(self, call: str, **env: str | None) -> str:
        """Why a claim is refused; the program sees to it that nothing is left behind."""
        return self.one(f"told(refused({call}))", **env)

    def holder(self, code: str, **env: str | None) -> Program:
        """A program that claims, by a call as ``claim_gpus(2)``, and holds until it may go on."""
        program = self.start(f"claim = gpuaff.{code}\nsay(*indices(claim))\ngo_on()", **env)
        program.heard()
        return program

    def used(self) -> list[int]:
        """The GPUs that some live process computes on, as the driver knows."""
        count = int(self.driver.state.gpu_count)
        return [gpu for gpu in range(count) if self.driver.contexts(gpu)]

    def close(self) -> None:
        """End all programs."""
        for program in self._programs:
            program.close()


def until(true: Callable[[], object], seconds: float = 10) -> None:
    """Wait until a function says yes."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it has not come to that"
        time.sleep(0.005)
