"""Jobs whose ranks stay until the test has looked at them from outside."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from gpuaff.topology.model import Topology
from tests.fakedriver.play import this_machine
from tests.processes import CPUS, environment, masks
from tests.schedulers.bed import ends_with_us

GPUAFF = (sys.executable, "-m", "gpuaff", "run")
RANK = (sys.executable, str(Path(__file__).with_name("rank.py")))

FIRST, SECOND = (frozenset((cpu,)) for cpu in (CPUS[0], CPUS[-1]))
"""The CPUs near even GPUs, and near odd ones."""

_SECONDS = 60.0


def two_sides(gpus: int) -> Topology:
    """This machine with GPUs by turns near its first CPU and near its last: pinning shows."""
    machine = this_machine(gpus)
    sided = (gpu._replace(node_cpus=(FIRST, SECOND)[gpu.index % 2]) for gpu in machine.gpus)
    return machine._replace(gpus=tuple(sided))


class Rank(NamedTuple):
    """A process that stays: what it told, and what is seen of it from outside."""

    pid: int
    told: Mapping[str, Any]
    cpus: frozenset[int]
    environ: Mapping[str, str]  # the variables that it was started with
    before: frozenset[int]  # its CPUs when it began

    def _told(self, what: str) -> Any:
        assert "error" not in self.told, self.told["error"]
        return self.told[what]

    @property
    def claim(self) -> list[int]:
        """The GPUs that it has claimed."""
        return list(self._told("claim"))

    @property
    def gpu(self) -> Any:
        """The GPU that it was pinned next to, or None."""
        return self._told("gpu")


class Stage:
    """A folder in which ranks tell, with the variables of what they are started in."""

    def __init__(self, folder: Path, variables: Mapping[str, str]) -> None:
        self.folder, self.variables = folder, dict(variables)

    def rank(self, *words: str) -> tuple[str, ...]:
        return (*RANK, str(self.folder), *words)

    @contextmanager
    def ranks(
        self, *command: str, count: int, env: Mapping[str, str] | None = None
    ) -> Iterator[list[Rank]]:
        """Start so many ranks by a command; they end with the block, and it with them."""
        out = self.folder / "out"
        with out.open("wb") as to:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=to,
                stderr=to,
                env=environment({**self.variables, **(env or {})}),
                cwd=self.folder,
                preexec_fn=ends_with_us,
            )
        try:
            yield self.wait(count, process)
        finally:
            (self.folder / "end").touch()
            try:
                process.wait(_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        assert process.returncode == 0, out.read_text()

    def wait(self, count: int, process: subprocess.Popen[bytes] | None = None) -> list[Rank]:
        """Wait until so many ranks have told."""
        ends = time.monotonic() + _SECONDS
        while len(found := list(self.folder.glob("*.json"))) < count:
            ended = process is not None and process.poll()
            if ended or time.monotonic() > ends:
                said = [path.read_text("utf-8", "replace") for path in self.folder.glob("*out*")]
                raise AssertionError("\n".join([f"{len(found)} of {count} ranks", *said]))
            time.sleep(0.02)
        return [_look(path) for path in found]


def _look(path: Path) -> Rank:
    pid, told = int(path.stem), json.loads(path.read_text())
    seen = set(masks(pid).values())
    assert len(seen) == 1, f"{told}: the threads are on {seen}"
    return Rank(pid, told, seen.pop(), told["environ"], frozenset(told["before"]))


def by(ranks: Sequence[Rank], *names: str) -> list[Rank]:
    """In the order of numbers that variables tell."""
    return sorted(ranks, key=lambda rank: [int(rank.environ[name]) for name in names])
