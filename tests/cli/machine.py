"""A machine of two fake GPUs, and what the command does there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpuaff.claims.locking import registry
from gpuaff.claims.locking.registry import Entry
from tests.fakedriver.driver import FakeDriver
from tests.processes import as_text, command_line, environment

RUN = (sys.executable, "-m", "gpuaff", "run")
HOLD = ("sh", "-c", "echo $CUDA_VISIBLE_DEVICES; read x")
"""A command that tells its GPUs, and has them until its standard input ends."""
LIMIT = 20.0

Done = subprocess.CompletedProcess[str]


def heard(process: subprocess.Popen[str]) -> str:
    """The next line that a command prints."""
    assert process.stdout is not None
    assert process.stderr is not None
    line = process.stdout.readline().strip()
    assert line, f"it ended: {process.stderr.read()}"
    return line


def said(process: subprocess.Popen[str]) -> str:
    """The next line on its standard error."""
    assert process.stderr is not None
    return process.stderr.readline().strip()


def told(done: Done) -> str:
    """The line in which a failure is told, and the indented ones below it."""
    assert done.stdout == ""
    first, *below = done.stderr.splitlines()
    assert first.startswith("gpuaff: ")
    assert all(line.startswith("  ") for line in below)
    return " | ".join([first, *map(str.strip, below)])


class Machine:
    """Two GPUs, and nothing on them."""

    def __init__(self, driver: FakeDriver, folder: Path) -> None:
        self.driver = driver
        self.locks = folder / "locks"
        self.env = {
            **driver.env(),
            "GPUAFF_LOCK_DIR": str(self.locks),
            "GPUAFF_SAFE_GPU": "off",
        }

    def call(self, *words: str, **variables: str) -> Done:
        """A call of the command, to its end."""
        return as_text(command_line(*words, env=environment({**self.env, **variables})))

    def run(
        self, *words: str, env: Mapping[str, str] | None = None, prefix: Sequence[str] = ()
    ) -> Done:
        """``gpuaff run``, to its end."""
        if not prefix:
            return self.call("run", *words, **(env or {}))
        return subprocess.run(
            [*prefix, *RUN, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=environment({**self.env, **(env or {})}),
            check=False,
        )

    @contextmanager
    def used(self, gpu: int) -> Iterator[int]:
        """The id of another program's process on a GPU."""
        with subprocess.Popen(["sleep", "60"]) as stranger:
            self.driver.use(gpu, stranger.pid)
            try:
                yield stranger.pid
            finally:
                stranger.kill()

    @contextmanager
    def running(
        self, *words: str, env: Mapping[str, str] | None = None, prefix: Sequence[str] = ()
    ) -> Iterator[subprocess.Popen[str]]:
        """``gpuaff run --no-pin``, killed at the end."""
        with subprocess.Popen(
            [*prefix, *RUN, "--no-pin", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment({**self.env, **(env or {})}),
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    @contextmanager
    def holding(self, *words: str, script: str = "echo; read x") -> Iterator[subprocess.Popen[str]]:
        """A shell that has its GPUs by now, and has printed a line."""
        with self.running(*words, "--", "sh", "-c", script) as process:
            assert process.stdout is not None
            process.stdout.readline()
            yield process

    def refused(self, *words: str) -> str:
        """What ``gpuaff run`` says that ends at once; nothing when it has its GPUs."""
        done = self.run("--no-pin", *words, "--", "true")
        assert done.returncode == (75 if done.stderr else 0)
        return done.stderr

    def all_are_free(self) -> bool:
        """Whether both can be had at once."""
        return not self.refused("-n", "2")

    def status(self) -> Any:
        """The status as JSON."""
        done = self.call("status", "--json")
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(done.stdout)

    def shown(self) -> str:
        """The status as text."""
        return self.call("status").stdout

    def soon(self, holds: Callable[[Any], bool]) -> Any:
        """The status, as soon as something holds for it."""
        end = time.monotonic() + LIMIT
        while not holds(found := self.status()):
            assert time.monotonic() < end, found
        return found

    def wait_until(self, waiting: int) -> None:
        """Until so many wait: what costs a process each time is asked afterwards."""
        end = time.monotonic() + LIMIT
        while sum(entry.waits for entry in self.entries()) != waiting:
            assert time.monotonic() < end, self.status()
            time.sleep(0.01)

    def entries(self) -> Sequence[Entry]:
        """The entries of the registry."""
        try:
            handle = os.open(self.locks / "registry", os.O_RDONLY)
        except FileNotFoundError:
            return ()
        try:
            return registry.read(handle)
        finally:
            os.close(handle)

    def since(self, pid: int, time: float) -> None:
        """Let the record of a holder say that it has held its GPUs since another time."""
        (entry,) = (one for one in self.entries() if one.pid == pid)
        with (self.locks / "registry").open("r+b") as file:
            file.seek(registry.RECORDS + entry.slot * registry.SLOT_SIZE)
            record = {**json.loads(file.read(registry.SLOT_SIZE)), "since": time}
            file.seek(-registry.SLOT_SIZE, os.SEEK_CUR)
            file.write(json.dumps(record).encode().ljust(registry.SLOT_SIZE))
