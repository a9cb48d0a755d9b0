"""``gpuaff run``: claim GPUs, and become a command that uses them alone.

The user's program waits for this, so it imports as little as it can.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from gpuaff import options
from gpuaff._system import execute
from gpuaff.cli.arguments import argument
from gpuaff.cli.interrupt import raise_on_interrupt
from gpuaff.errors import ClaimTimeoutError, GpusBusyError, InvalidOptionError, NotEnoughGpusError
from gpuaff.formatting import counted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpuaff.claims.claim import Claim
    from gpuaff.claims.model import Device, Waiting
    from gpuaff.cli.dispatch import Parser
    from gpuaff.cpuset import CpuSet
    from gpuaff.launch.ranks import Ranks

_USAGE = """\
gpuaff run [-n N | --gpus LIST] [--candidates LIST] [--wait [DURATION]]
                  [--min-free-memory SIZE] [--max-utilization PCT] [--per-rank]
                  [--no-claim] [--no-pin] [--dry-run] -- COMMAND ..."""

_OPTIONS = {
    "n": "-n",
    "gpus": "--gpus",
    "candidates": "--candidates",
    "wait": "--wait",
    "min_free_memory": "--min-free-memory",
    "max_utilization": "--max-utilization",
}
"""The option for each argument of ``claim_gpus``."""

_REMEDY = "to queue: --wait 10m (at most ten minutes) or --wait (no limit)"

_EXAMPLE = "as in: gpuaff run -n 2 -- python train.py"

_INTERVAL = 3.0
"""Seconds between two lines about the wait, at least."""


def register(parser: Parser) -> None:
    """Add the command's options to its parser."""
    parser.one_line = True
    parser.usage = _USAGE
    parser.description = (
        "Claim free GPUs, make only these visible to the command, pin it to the CPUs next to them, "
        "and become it: its process id, signals and exit code are the command's own. The GPUs stay "
        "claimed until it and its children have ended. Inside a launcher (a rank of torchrun, "
        "srun, mpirun) nothing is claimed, and the rank is pinned."
    )
    _add_which(parser)
    _add_conditions(parser)
    parser.add_argument(
        "--per-rank", action="store_true", help="inside a launcher: let each rank claim"
    )
    parser.add_argument(
        "--no-claim", dest="claim", action="store_false", help="claim nothing, and pin"
    )
    parser.add_argument(
        "--no-pin", dest="pin", action="store_false", help="leave the CPUs as they are"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="show what would be done, and do nothing"
    )
    parser.add_argument("stray", nargs="*", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def _add_which(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "-n",
        dest="count",
        metavar="N",
        type=argument(gpu_count),
        help="how many GPUs; 1 by default, auto for as many as the scheduler has granted",
    )
    which.add_argument(
        "--gpus",
        metavar="LIST",
        type=argument(options.gpus),
        help="exactly these GPUs, by index (0,2 or 4-7), UUID or PCI address",
    )
    parser.add_argument(
        "--candidates",
        metavar="LIST",
        type=argument(options.gpus),
        help="some of these GPUs, named likewise",
    )


def _add_conditions(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--wait",
        metavar="DURATION",
        nargs="?",
        default=0.0,
        const=None,
        type=argument(wait_time),
        help="wait for busy GPUs, for so long (90, 10m, 1h30m) or without limit",
    )
    parser.add_argument(
        "--min-free-memory",
        metavar="SIZE",
        type=argument(options.size),
        help="the least memory that must be free on each (40G)",
    )
    parser.add_argument(
        "--max-utilization",
        metavar="PCT",
        type=argument(options.percent),
        help="the highest recent utilization of each, in percent",
    )


def gpu_count(name: str, text: str) -> int | str:
    """How many GPUs: a number, or ``auto`` for as many as the scheduler has granted."""
    expected = "a number of GPUs from 1 on, or auto"
    return text if text == "auto" else options.count(name, text, text=True, expected=expected)


def wait_time(name: str, text: str) -> float:
    """A duration; the error is also for a command without ``--`` before it."""
    try:
        return options.duration(name, text)
    except InvalidOptionError as error:
        hint = "--wait alone waits without limit, and -- stands before the command"
        raise InvalidOptionError(name, text, f"{error.expected}; {hint}") from None


def run(args: argparse.Namespace) -> int:
    """Claim, pin, and become the command; returns only after ``--dry-run``.

    Raises:
        GpuaffError: a step failed; those before it are undone.
    """
    from gpuaff.launch.ranks import ranks

    words = _command(args)
    here = ranks()
    if args.claim and not here.is_told and _has_other_ranks(here):
        from gpuaff.pinning.state import say

        say(here.warnings, rank=None)  # it may be one of many, and each of them claims
    job = settle(args, here if here.is_told else None)
    path = execute.find(words[0])
    with _as_options():
        if args.dry_run:
            _show(job, path, words)
            return 0
        claim = None if job.claim is None else _claimed(job.claim)
    try:
        if job.pin:
            from gpuaff.pinning.affinity import set_affinity

            set_affinity()
        raise_on_interrupt()  # the command gets SIGINT as this process got it
        return execute.become(path, words, keeping=() if claim is None else claim.fds)
    except BaseException:
        if claim is not None:
            claim.release()
        raise


def _has_other_ranks(here: Ranks) -> bool:
    """Whether variables describe ranks, though not which one of this node this process is."""
    is_bad = any(notice.code == "bad-rank" for notice in here.warnings)
    return is_bad or (here.rank is not None and here.size != 1)


def _command(args: argparse.Namespace) -> list[str]:
    words: list[str] = args.words
    if args.stray:
        raise InvalidOptionError("COMMAND", args.stray[0], f"-- before it, {_EXAMPLE}")
    if not words:
        raise InvalidOptionError("COMMAND", "", f"a command after --, {_EXAMPLE}")
    return words


@contextmanager
def _as_options() -> Iterator[None]:
    """Errors of ``claim_gpus`` with options in the place of its arguments."""
    try:
        yield
    except InvalidOptionError as error:
        option = _OPTIONS.get(error.option, error.option)
        raise InvalidOptionError(option, error.value, error.expected) from None
    except NotEnoughGpusError as error:
        raise NotEnoughGpusError(error.wanted, error.found, _spelled(error.reason)) from None
    except GpusBusyError as error:
        raise _busy(error, _REMEDY) from None
    except ClaimTimeoutError as error:
        raise ClaimTimeoutError(error.waited, _busy(error.busy, "")) from None


def _busy(error: GpusBusyError, remedy: str) -> GpusBusyError:
    narrowed = _spelled(error.narrowed)
    return GpusBusyError(error.wanted, error.free, error.reasons, narrowed, remedy)


def _spelled(text: str) -> str:
    return text.replace("candidates=", "--candidates").replace("gpus=", "--gpus")


def _claimed(arguments: Mapping[str, Any]) -> Claim:
    """A claim without a context: the command makes its own."""
    from gpuaff.claims.claiming import claim_gpus

    raise_on_interrupt()
    if arguments["wait"] == 0:
        return claim_gpus(placeholder=None, **arguments)
    with reporting() as on_wait:
        return claim_gpus(placeholder=None, on_wait=on_wait, **arguments)


# What a call means. Pure.


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is done before the command starts.

    Attributes:
        claim: the arguments of ``claim_gpus``; None when nothing is claimed.
        pin: whether this process is pinned as its rank. Whether a claim pins is among its
            arguments.
    """

    claim: Mapping[str, object] | None
    pin: bool


def settle(args: argparse.Namespace, ranks: Ranks | None) -> Job:
    """Decide what is done.

    Outside of a launcher, GPUs are claimed. Inside one, every rank runs this command, and each
    would claim as many GPUs: a rank claims with ``--per-rank`` only, and is pinned otherwise.

    Args:
        args: the parsed arguments.
        ranks: this process's rank in a launcher; None outside of one.

    Raises:
        InvalidOptionError: options contradict each other, or the launcher.
    """
    for option, value in _about_claims(args):
        if not args.claim:
            raise InvalidOptionError(option, value, "no --no-claim beside it: it is about a claim")
        if ranks is not None and not args.per_rank:
            raise InvalidOptionError(option, value, _around(option, value, ranks))
    if not args.claim or (ranks is not None and not args.per_rank):
        return Job(claim=None, pin=args.pin)
    if args.gpus is not None and ranks is not None and ranks.local_size > 1:
        expected = (
            f"--candidates instead: each of the {ranks.local_size} ranks here would claim the "
            "same GPUs"
        )
        raise InvalidOptionError("--gpus", _listed(args.gpus), expected)
    claim = {name: getattr(args, name) for name in _OPTIONS if name != "n"}
    return Job(claim={"n": args.count or 1, **claim, "pin": args.pin}, pin=False)


def _about_claims(args: argparse.Namespace) -> Iterator[tuple[str, object]]:
    """The options that were given and concern a claim."""
    values = {
        "-n": args.count,
        "--gpus": _listed(args.gpus),
        "--candidates": _listed(args.candidates),
        "--wait": "" if args.wait is None else args.wait or None,
        "--min-free-memory": args.min_free_memory,
        "--max-utilization": args.max_utilization,
        "--per-rank": "" if args.per_rank else None,
    }
    yield from ((option, value) for option, value in values.items() if value is not None)


def _around(option: str, value: object, ranks: Ranks) -> str:
    """How to claim once for all ranks."""
    given = option if value == "" else f"{option} {value}"
    return (
        f"--per-rank beside it: this is rank {ranks.local_rank} of {ranks.local_size} of a "
        "launcher, and each of them would claim. To claim once for all of them, put it before "
        f"the launcher: gpuaff run {given} -- torchrun ..."
    )


def _listed(names: tuple[int | str, ...] | None) -> str | None:
    return None if names is None else ",".join(map(str, names))


# ``--dry-run``


def _show(job: Job, path: str, words: Sequence[str]) -> None:
    """Print what would be done. This process is pinned for that, and then ends."""
    from shlex import join

    from gpuaff.cli.output import show_lines
    from gpuaff.cpuset import format_cpulist
    from gpuaff.formatting import Span, line, table

    devices = () if job.claim is None else _previewed(job.claim)
    cpus = _pinned(job, devices)
    rows = {
        "claim": ", ".join(f"{device} ({device.uuid})" for device in devices) or "nothing",
        "pin": "nothing" if cpus is None else f"to CPUs {format_cpulist(cpus)}",
        "run": join([path, *words[1:]]),
    }
    show_lines(table([(line(Span(f"would {do}", "head")), line(it)) for do, it in rows.items()]))


def _previewed(claim: Mapping[str, object]) -> tuple[Device, ...]:
    from gpuaff.claims.acquire import preview

    arguments = {name: value for name, value in claim.items() if name not in ("n", "pin")}
    return preview(claim["n"], arguments=arguments)


def _pinned(job: Job, devices: Sequence[Device]) -> CpuSet | None:
    """The CPUs of the command; None when it would not be pinned."""
    if job.pin:
        from gpuaff.pinning.affinity import set_affinity

        affinity = set_affinity()
        return affinity if affinity.pinned else None
    if job.claim is None or not job.claim["pin"]:
        return None
    from gpuaff.pinning.grant import take_grant

    grant = take_grant([device.index for device in devices])
    return grant.cpus if grant.pinned else None


# ``--wait``


@contextmanager
def reporting(interval: float = _INTERVAL) -> Iterator[Reporter]:
    """Report the state of a wait, as long as it lasts."""
    reporter = Reporter(interval)
    try:
        yield reporter
    finally:
        reporter.end()


class Reporter:
    """Prints the state of a wait: at once, but only one line per interval.

    What comes too early is printed at the end of the interval, unless it is outdated by then.
    """

    def __init__(self, interval: float) -> None:
        """Nothing is printed yet."""
        self._interval = interval
        self._lock = threading.Lock()
        self._latest: str | None = None
        self._timer: threading.Timer | None = None
        self._ended = False

    def __call__(self, waiting: Waiting) -> None:
        """Print it, now or at the end of the interval."""
        with self._lock:
            self._latest = in_words(waiting)
            if self._timer is None:
                self._print()

    def end(self) -> None:
        """The wait is over: what is still to be printed is outdated."""
        with self._lock:
            self._ended = True
            if self._timer is not None:
                self._timer.cancel()

    def _print(self) -> None:
        from gpuaff.cli.output import print_stderr

        text, self._latest, self._timer = self._latest, None, None
        if self._ended or text is None:
            return
        print_stderr(text)
        timer = threading.Timer(self._interval, self._when_due)
        timer.daemon = True
        with suppress(RuntimeError):  # no more threads: then each line is printed at once
            timer.start()
            self._timer = timer

    def _when_due(self) -> None:
        with self._lock:
            self._print()


def in_words(waiting: Waiting) -> str:
    """The state of a wait, in one line."""
    place = f"{waiting.position} before us" if waiting.position else "next in line"
    reasons = "".join(f"; {reason}" for reason in waiting.reasons)
    free = waiting.free or "none"
    return f"waiting for {counted(waiting.wanted, 'GPU')}, {place}, {free} free{reasons}"
