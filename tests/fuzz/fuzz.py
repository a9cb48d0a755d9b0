"""Fuzz the parsers and the planner: ``python tests/fuzz/fuzz.py --count 1000000 --jobs 16``.

Needs nothing but this checkout. Input number n of a seed is the same everywhere, so what failed
is repeated by ``--target T --seed S --only N``; it also lies in a file in ``--failures``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any
from zlib import crc32

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":  # then the first folder is this one, and gpuaff need not be installed
    sys.path[:1] = [str(ROOT), str(ROOT / "src")]

from tests.fuzz.targets import TARGETS, Refused  # noqa: E402 - found there only

HANGING = 120
"""After so many seconds by the clock the process is ended, wherever it is."""


class TooSlowError(BaseException):
    """An input took more than its processor time. Nothing that catches exceptions catches it."""


def bound_memory(megabytes: int) -> None:
    """Let this process have so much memory more than it has now; beyond it is a MemoryError."""
    pages, *_ = Path("/proc/self/statm").read_text("ascii").split()
    now = int(pages) * resource.getpagesize()
    most = now + (megabytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


@contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """Raise :class:`TooSlowError` where the block takes more processor time.

    Processor time, since on a busy machine the clock says nothing of us. C code that never
    returns to the interpreter is ended by a signal that has no handler.
    """
    signal.signal(signal.SIGVTALRM, _stop)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, HANGING)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _stop(number: int, frame: FrameType | None) -> None:
    raise TooSlowError


@dataclass
class Tally:
    """What came of some inputs."""

    inputs: int = 0
    refused: int = 0  # as they should be
    digest: int = 0  # the same whenever the same came of the same inputs
    slowest: tuple[float, int] = (0.0, -1)  # seconds of processor time, and of which input
    failures: dict[str, list[tuple[int, str]]] = field(default_factory=dict)  # by what fails

    def add(self, other: Tally) -> None:
        """Take in another's."""
        self.inputs += other.inputs
        self.refused += other.refused
        self.digest ^= other.digest
        self.slowest = max(self.slowest, other.slowest)
        for what, shown in other.failures.items():
            self.failures.setdefault(what, []).extend(shown)

    def fail(self, what: str, number: int, told: str) -> None:
        self.failures.setdefault(what, []).append((number, told))


def random_of(target: str, seed: int, number: int) -> Random:
    return Random(f"{target} {seed} {number}")


def run_one(target: str, seed: int, number: int, seconds: float, tally: Tally) -> None:
    """Make an input and see what comes of it."""
    made = TARGETS[target].make(random_of(target, seed, number))
    outcome = "failed"
    if isinstance(made, (str, bytes)):  # its time may grow as its text does
        seconds *= 1 + len(made) / 2**20
    before = time.process_time()
    try:
        with bounded(seconds):
            outcome = TARGETS[target].check(made)
    except Refused as refusal:
        tally.refused += 1
        outcome = str(refusal)
    except TooSlowError:
        tally.fail("took too long", number, traceback.format_exc())
    except BaseException as error:  # noqa: BLE001 - SystemExit would be a finding, too
        tally.fail(_place(error), number, traceback.format_exc())
    tally.slowest = max(tally.slowest, (time.process_time() - before, number))
    tally.digest ^= crc32(f"{number} {outcome}".encode("utf-8", "replace"))
    tally.inputs += 1


def _place(error: BaseException) -> str:
    """The kind of an error and where it was raised: what it takes to call two the same."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}"


_AT_ONCE = 100


def _work(
    target: str, asked: argparse.Namespace, numbers: range, at: Synchronized[int], pipe: Connection
) -> None:
    """A process's part of the inputs; it sends the results of so many at a time."""
    bound_memory(asked.megabytes)
    for first in range(0, len(numbers), _AT_ONCE):
        tally = Tally()
        for number in numbers[first : first + _AT_ONCE]:
            at.value = number
            run_one(target, asked.seed, number, asked.seconds, tally)
        pipe.send(tally)


def run(target: str, asked: argparse.Namespace, count: int) -> Tally:
    """Spread a target's inputs over processes; what kills one is a failure of its input."""
    context, tally = multiprocessing.get_context("fork"), Tally()
    workers = {}
    for job in range(min(asked.jobs, count)):
        ours, theirs = context.Pipe(duplex=False)
        at = context.Value("q", -1)
        part = range(job, count, asked.jobs)
        process = context.Process(target=_work, args=(target, asked, part, at, theirs), daemon=True)
        process.start()
        theirs.close()
        workers[ours] = process, at
    while workers:
        for pipe in [one for one in wait(list(workers)) if isinstance(one, Connection)]:
            try:
                tally.add(pipe.recv())
            except EOFError:
                process, at = workers.pop(pipe)
                process.join()
                if process.exitcode:
                    what = f"the process died with {process.exitcode}"
                    tally.fail(what, at.value, "its inputs after this one were not tried")
    return tally


def report(target: str, tally: Tally, seconds: float) -> None:
    """Say what came of a target's inputs."""
    slowest, number = tally.slowest
    print(
        f"{target:9} {tally.inputs:8} inputs {tally.inputs / seconds:8.0f}/s "
        f"{100 * (1 - tally.refused / tally.inputs):3.0f} % taken, "
        f"slowest {slowest:5.2f} s (number {number}), digest {tally.digest:08x}, "
        f"{sum(map(len, tally.failures.values()))} failures",
        flush=True,
    )


def report_failures(target: str, asked: argparse.Namespace, tally: Tally) -> None:
    """Each thing that does not hold, with the smallest number that shows it, and its input."""
    for what, shown in sorted(tally.failures.items()):
        number, told = min(shown)
        file = Path(asked.failures, f"{target}-{asked.seed}-{number}.txt")
        file.parent.mkdir(parents=True, exist_ok=True)
        made = TARGETS[target].make(random_of(target, asked.seed, number))
        file.write_text(f"{_shown(made)}\n\n{told}", "utf-8")
        again = f"--target {target} --seed {asked.seed} --only {number}"
        print(f"FAILED {what} ({len(shown)} inputs), again by: {again}\n  input: {file}\n{told}")


def _shown(made: Any) -> str:
    """An input as Python writes it, topologies as what to_dict gives."""
    if isinstance(made, tuple):
        return "\n".join(map(_shown, made))
    return repr(made.to_dict() if hasattr(made, "to_dict") else made)


def main(arguments: Iterable[str] | None = None) -> int:
    """Run; 1 if anything does not hold."""
    asked = _parser().parse_args(None if arguments is None else list(arguments))
    names = list(TARGETS) if asked.target == "all" else [asked.target]
    weight, failed = sum(TARGETS[name].weight for name in names), False
    for target in names:
        count = max(1, asked.count * TARGETS[target].weight // weight)
        start = time.monotonic()
        tally = Tally()
        if asked.only is None:
            tally = run(target, asked, count)
        else:
            run_one(target, asked.seed, asked.only, asked.seconds, tally)
        report(target, tally, time.monotonic() - start)
        report_failures(target, asked, tally)
        failed |= bool(tally.failures)
    return int(failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Fuzz the parsers and the planner.")
    parser.add_argument("--target", choices=["all", *TARGETS], default="all")
    parser.add_argument("--count", type=int, default=10_000, help="inputs, of all targets together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", type=int, metavar="N", help="input N of the target and seed")
    parser.add_argument("--seconds", type=float, default=2.0, help="for an input, or a MiB of it")
    parser.add_argument("--megabytes", type=int, default=1024, help="memory for all of an input")
    parser.add_argument("--failures", default="fuzz-failures", help="folder for what failed")
    return parser


if __name__ == "__main__":
    sys.exit(main())
