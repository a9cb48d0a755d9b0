"""Programs that claim GPUs of the fake driver, each a process of its own (claims/nursery.py)."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from fakedriver.driver import FakeDriver
from processes import environment

_NURSERY = Path(__file__).parent / "claims/nursery.py"

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
    from gpuaff._system import cuda
    contexts = cuda.Contexts()
    def occupant(number):
        cuda.start()
        contexts.retain(0)
        say("now")
        go_on()
    occupant.release = lambda held: contexts.release()
    return occupant

def indices(claim):
    return [gpu.index for gpu in claim.gpus]
"""


class Program:
    """A program that runs: it talks by lines on its standard streams."""

    def __init__(self, pid: int, streams: tuple[int, int, int, int]) -> None:
        self.pid = pid
        self._watch = os.pidfd_open(pid)
        self._in: IO[str] = os.fdopen(streams[0], "w")
        self._out: IO[str] = os.fdopen(streams[1])
        self._err: IO[str] = os.fdopen(streams[2])
        self._end = streams[3]

    def heard(self) -> str:
        """The next line that it prints."""
        line = self._out.readline()
        assert line, f"it has ended: {self._err.read()}"
        return line.strip()

    def go_on(self, line: str = "") -> None:
        """Let it go on."""
        self._in.write(f"{line}\n")
        self._in.flush()

    def end_of_input(self) -> None:
        """Close its standard input, which children that it has left behind may have as well."""
        self._in.close()

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal; after SIGKILL it is gone."""
        signal.pidfd_send_signal(self._watch, number)
        if number == signal.SIGKILL:
            self.wait()

    def wait(self, timeout: float = 50) -> None:
        """Until it has ended."""
        assert select.select([self._watch], [], [], timeout)[0], "it goes on"

    def end(self) -> str:
        """Let it come to its end, which must be a good one; what else it printed."""
        self._in.close()
        printed = self._out.read()
        self.wait()
        said = os.read(self._end, 1)
        assert said == b"0", f"{printed}\n{self._err.read()}"
        return printed

    def close(self) -> None:
        """Kill it, if it lives."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._watch, signal.SIGKILL)
        for stream in (self._in, self._out, self._err):
            with suppress(BrokenPipeError):
                stream.close()
        os.close(self._watch)
        os.close(self._end)


class Nursery:
    """The process of which programs are forked."""

    def __init__(self, driver: FakeDriver) -> None:
        """Start it, with the fake driver's libraries."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, str(_NURSERY), str(theirs.fileno())],
            env=environment(driver.env()),
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def fork(self, code: str, env: Mapping[str, str | None]) -> Program:
        pipes = [os.pipe() for _ in range(4)]
        inner = [pipes[0][0], *(pipe[1] for pipe in pipes[1:])]
        outer = (pipes[0][1], pipes[1][0], pipes[2][0], pipes[3][0])
        message = json.dumps({"code": code, "env": dict(env)}).encode()
        socket.send_fds(self._socket, [message], inner)
        for handle in inner:
            os.close(handle)
        return Program(int(self._socket.recv(100)), outer)

    def close(self) -> None:
        """End it."""
        self._socket.close()
        self._process.wait(20)


class Lab:
    """A fake machine, and the programs that claim its GPUs."""

    def __init__(self, nursery: Nursery, driver: FakeDriver, folder: Path) -> None:
        self.driver, self.folder = driver, folder
        self._nursery = nursery
        self._programs: list[Program] = []
        self.env: dict[str, str | None] = {
            "GPUAFF_FAKE_STATE": str(driver.path),
            "GPUAFF_LOCK_DIR": str(folder / "locks"),
            "GPUAFF_SAFE_GPU": "off",
        }

    def start(self, code: str, **env: str | None) -> Program:
        """Start a program; :data:`BEGIN` is before it."""
        program = self._nursery.fork(BEGIN + textwrap.dedent(code), {**self.env, **env})
        self._programs.append(program)
        return program

    def run(self, code: str, **env: str | None) -> list[str]:
        """Run a program to its end, which must be a good one; the lines that it printed."""
        return self.start(code, **env).end().splitlines()

    def one(self, code: str, **env: str | None) -> str:
        """The only line that a program prints."""
        (line,) = self.run(code, **env)
        return line

    def holder(self, code: str, **env: str | None) -> Program:
        """A program that claims, and then holds until it is told to go on.

        Args:
            code: the call, as ``claim_gpus(2)``.
            env: variables.
        """
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
