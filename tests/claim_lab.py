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

def go_on():
    return sys.stdin.readline()

def hang():
    # Not in one long sleep: a signal that comes just before that call would not end it.
    while True:
        time.sleep(0.05)

def say(*what):
    sys.stdout.write(" ".join(map(str, what)) + chr(10))  # at once: children may print as well
    sys.stdout.flush()

def locked():
    # What this process has locked. Not by /proc/locks: that leaves some out, or tells them twice,
    # while others come and go.
    found = []
    for number in os.listdir("/proc/self/fdinfo"):
        try:
            with open(f"/proc/self/fdinfo/{number}") as file:
                what = [line.split(maxsplit=2)[2] for line in file if line.startswith("lock:")]
            name = os.readlink(f"/proc/self/fd/{number}")
            found += [(name, one) for one in what if not name.endswith("driver/state")]
        except OSError:
            pass
    return sorted(found)

def handles():
    # The open files, without those of the fake driver.
    found = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            found[number] = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            pass
    return {n: at for n, at in found.items() if "/proc/" not in at and "driver" not in at}

def state():
    from gpuaff.claims.locking import registry
    # Not those of /proc: a thread that was joined may stand there for a moment.
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    tids = [os.getpid(), *(thread.native_id for thread in others if thread.native_id)]
    threads = {tid: sorted(os.sched_getaffinity(tid)) for tid in tids}
    slots = [entry.slot for entry in registry.entries()]
    return dict(
        env=dict(os.environ), cpus=threads, handles=handles(), locks=locked(), slots=slots,
        claim=gpuaff.current_claim(),
    )

def differs(before, after):
    both = before["cpus"].keys() & after["cpus"].keys()  # a thread that wakes the driver may end
    before, after = ({**one, "cpus": {t: one["cpus"][t] for t in both}} for one in (before, after))
    return {key: (before[key], after[key]) for key in before if before[key] != after[key]}

def refused(*arguments, **options):
    # What a claim raises; and everything is as it was.
    before = state()
    try:
        claim = gpuaff.claim_gpus(*arguments, **options)
    except BaseException as error:
        caught = error
    else:
        raise AssertionError(f"it was not refused: {claim}")
    after = state()
    assert not differs(before, after), (differs(before, after), repr(caught))
    return caught

def told(error):
    say(type(error).__name__, str(error).replace(chr(10) + "  ", " | "))

def occupant_that_waits():
    # it makes its context, and then lets others act
    from contextlib import ExitStack
    from gpuaff._system import cuda
    contexts = ExitStack()
    def occupant(number):
        cuda.start()
        cuda.retain(0, contexts)
        say("now")
        go_on()
    occupant.release = lambda held: contexts.close()
    return occupant

def indices(claim):
    return [gpu.index for gpu in claim.gpus]

def shown(claim):
    say(os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER"))
    say(*((gpu.index, gpu.local) for gpu in claim.gpus))
    say(*(warning.code for warning in claim.warnings))
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
