"""Fuzz the parsers and the planner: ``python tests/fuzz/fuzz.py --count 1000000 --jobs 16``.

Needs nothing but this checkout. Input number n of a seed is the same everywhere, so what failed
is repeated by ``--target T --seed S --only N``; it also lies in a file in ``--failures``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from random import Random
from typing import Any
from zlib import crc32

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":  # then the first folder is this one, and gpuaff need not be installed
    sys.path[:1] = [str(ROOT), str(ROOT / "src")]

from tests.fuzz.guard import TooSlowError, bound_memory, bounded  # noqa: E402 - found there only
from tests.fuzz.targets import TARGETS, Refused  # noqa: E402 - likewise


@dataclass
class Tally:
    """What came of some inputs.

    Attributes:
        inputs: how many there were.
        refused: how many of them were refused, as they should be.
        digest: a number that is the same whenever the same came of the same inputs.
        slowest: the most processor time that one took, in seconds, and which.
        failures: for each thing that does not hold, the inputs that show it, with what was said.
    """

    inputs: int = 0
    refused: int = 0
    digest: int = 0
    slowest: tuple[float, int] = (0.0, -1)
    failures: dict[str, list[tuple[int, str]]] = field(default_factory=dict)

    def add(self, other: Tally) -> None:
        """Take in another's."""
        self.inputs += other.inputs
        self.refused += other.refused
        self.digest ^= other.digest
        self.slowest = max(self.slowest, other.slowest)
        for what, shown in other.failures.items():
            self.failures.setdefault(what, []).extend(shown)

    def fail(self, what: str, number: int, told: str) -> None:
        """Note that something does not hold."""
        self.failures.setdefault(what, []).append((number, told))


def random_of(target: str, seed: int, number: int) -> Random:
    """The random numbers that make an input."""
    return Random(f"{target} {seed} {number}")


def run_one(target: str, seed: int, number: int, seconds: float, tally: Tally) -> None:
    """Make an input and see what comes of it."""
    made = TARGETS[target].make(random_of(target, seed, number))
    outcome = "failed"
    seconds *= 1 + _megabytes(made)
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


def _megabytes(made: Any) -> float:
    """How long a text is; its time may grow as it does."""
    return len(made) / 2**20 if isinstance(made, (str, bytes)) else 0.0


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


def counts(targets: Sequence[str], count: int) -> dict[str, int]:
    """How many of all inputs each target gets."""
    whole = sum(TARGETS[name].weight for name in targets)
    return {name: max(1, count * TARGETS[name].weight // whole) for name in targets}


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
    failed = False
    for target, count in counts(names, asked.count).items():
        start = time.monotonic()
        tally = _only(target, asked) if asked.only is not None else run(target, asked, count)
        report(target, tally, time.monotonic() - start)
        report_failures(target, asked, tally)
        failed |= bool(tally.failures)
    return int(failed)


def _only(target: str, asked: argparse.Namespace) -> Tally:
    tally = Tally()
    run_one(target, asked.seed, asked.only, asked.seconds, tally)
    return tally


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Fuzz the parsers and the planner.")
    parser.add_argument("--target", choices=["all", *TARGETS], default="all")
    parser.add_argument("--count", type=int, default=10_000, help="inputs, of all targets together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", type=int, metavar="N", help="input N of the target and seed")
    parser.add_argument(
        "--seconds",
        type=float,
        default=2.0,
        help="processor time for an input, and more for each MiB of text",
    )
    parser.add_argument("--megabytes", type=int, default=1024, help="memory for all of an input")
    parser.add_argument("--failures", default="fuzz-failures", help="folder for what failed")
    return parser


if __name__ == "__main__":
    sys.exit(main())
