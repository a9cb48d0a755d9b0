"""``gpuaff run``: claim GPUs, and become a command that uses them alone.

The user's program waits for this, so it imports as little as it can.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from gpuaff import options
from gpuaff._system import execute
from gpuaff.cli import raise_on_interrupt
from gpuaff.cli.dispatch import Parser, add_option
from gpuaff.cli.output import print_stderr, show
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.errors import ClaimTimeoutError, GpusBusyError, InvalidOptionError, NotEnoughGpusError
from gpuaff.formatting import Span, Table, counted
from gpuaff.launch.ranks import Ranks, ranks

if TYPE_CHECKING:
    from gpuaff.claims.model import Waiting

_USAGE = """\
gpuaff run [-n N | --gpus LIST] [--candidates LIST] [--wait [DURATION]]
                  [--min-free-memory SIZE] [--max-utilization PCT] [--per-rank]
                  [--no-claim] [--no-pin] [--dry-run] -- COMMAND ..."""

_ARGUMENTS = ("n", "gpus", "candidates", "wait", "min_free_memory", "max_utilization")
"""The arguments of ``claim_gpus`` that have an option."""

_REMEDY = "to queue: --wait 10m (at most ten minutes) or --wait (no limit)"

_EXAMPLE = "as in: gpuaff run -n 2 -- python train.py"


def register(parser: Parser) -> None:
    """Add the command's options to its parser."""
    parser.usage = _USAGE
    parser.description = (
        "Claim free GPUs, make only these visible to the command, pin it to the CPUs next to them, "
        "and become it: its process id, signals and exit code are the command's own. The GPUs stay "
        "claimed until it and its children have ended. Inside a launcher (a rank of torchrun, "
        "srun, mpirun) nothing is claimed, and the rank is pinned."
    )
    parser.argument_default = argparse.SUPPRESS
    which = parser.add_mutually_exclusive_group()
    meaning = "how many GPUs; 1 by default, auto for as many as the scheduler has granted"
    add_option(which, "-n", "N", gpu_count, meaning)
    meaning = "exactly these GPUs, by index (0,2 or 4-7), UUID or PCI address"
    add_option(which, "--gpus", "LIST", options.gpus, meaning)
    add_option(parser, "--candidates", "LIST", options.gpus, "some of these, named likewise")
    meaning = "wait for busy GPUs, for so long (90, 10m, 1h30m) or without limit"
    add_option(parser, "--wait", "DURATION", wait_time, meaning, nargs="?")
    add_option(parser, "--min-free-memory", "SIZE", options.size, "least free memory of each (40G)")
    add_option(parser, "--max-utilization", "PCT", options.percent, "highest recent load of each")
    for name, meaning in (
        ("--per-rank", "inside a launcher: let each rank claim"),
        ("--no-claim", "claim nothing, and pin"),
        ("--no-pin", "leave the CPUs as they are"),
        ("--dry-run", "show what would be done, and do nothing"),
    ):
        parser.add_argument(name, action="store_true", default=False, help=meaning)
    parser.add_argument("stray", nargs="*", default=[], help=argparse.SUPPRESS)


def gpu_count(name: str, text: str) -> int | str:
    """How many GPUs: a number, or ``auto`` for as many as the scheduler has granted."""
    expected = "a number of GPUs from 1 on, or auto"
    return text if text == "auto" else options.count(name, text, text=True, expected=expected)


wait_time = partial(
    options.duration,  # of a command without ``--`` before it, too
    hint="; --wait alone waits without limit, and -- stands before the command",
)


def run(args: argparse.Namespace) -> int:
    """Claim, pin, and become the command, or undo it all; returns only after ``--dry-run``."""
    if args.stray or not args.words:
        expected = f"-- before it, {_EXAMPLE}" if args.stray else f"a command after --, {_EXAMPLE}"
        raise InvalidOptionError("COMMAND", args.stray[0] if args.stray else "", expected)
    here = ranks()
    if not args.no_claim and not here.is_told:
        is_bad = any(notice.code == "bad-rank" for notice in here.warnings)
        if is_bad or (here.rank is not None and here.size != 1):
            from gpuaff.pinning.state import say

            say(here.warnings, rank=None)  # it may be one of many, and each of them claims
    job = settle(args, here if here.is_told else None)
    path = execute.find(args.words[0])
    with _as_options():
        if args.dry_run:
            _show(job, [path, *args.words[1:]])
            return 0
        claim = None
        if job.claim is not None:
            from gpuaff.claims import claim_gpus

            raise_on_interrupt()
            # Without a context: the command makes its own.
            claim = claim_gpus(placeholder=None, on_wait=_report, **job.claim)
    try:
        if job.pin:
            from gpuaff.pinning import set_affinity

            set_affinity()
        raise_on_interrupt()  # the command gets SIGINT as this process got it
        return execute.become(path, args.words, keeping=() if claim is None else claim.fds)
    except BaseException:
        if claim is not None:
            claim.release()
        raise


@contextmanager
def _as_options() -> Iterator[None]:
    """Errors of ``claim_gpus`` with options in the place of its arguments."""
    try:
        yield
    except InvalidOptionError as error:
        if error.option in _ARGUMENTS:
            error.option = _option(error.option)
        raise
    except NotEnoughGpusError as error:
        error.reason = _spelled(error.reason)
        raise
    except GpusBusyError as error:
        error.narrowed, error.remedy = _spelled(error.narrowed), _REMEDY
        raise
    except ClaimTimeoutError as error:
        error.busy.narrowed, error.busy.remedy = _spelled(error.busy.narrowed), ""
        raise


def _spelled(text: str) -> str:
    return text.replace("candidates=", "--candidates").replace("gpus=", "--gpus")


def _report(waiting: Waiting) -> None:
    place = f"{waiting.position} before us" if waiting.position else "next in line"
    reasons = "".join(f"; {reason}" for reason in waiting.reasons)
    free = waiting.free or "none"
    print_stderr(f"waiting for {counted(waiting.wanted, 'GPU')}, {place}, {free} free{reasons}")


class Job(NamedTuple):
    """What is done before the command starts."""

    claim: Mapping[str, Any] | None  # the arguments of ``claim_gpus``
    pin: bool  # this process, as its rank; a claim pins by an argument of its own


def settle(args: argparse.Namespace, here: Ranks | None) -> Job:
    """Decide what is done. Pure."""
    # Outside of a launcher (``here`` is None) GPUs are claimed. Inside one, every rank runs this
    # command, and each would claim as many GPUs: a rank claims with ``--per-rank`` only, and is
    # pinned otherwise. Options that contradict each other, or the launcher, are errors.
    given = {name: value for name, value in vars(args).items() if name in _ARGUMENTS}
    if not args.no_claim and (here is None or args.per_rank):
        if "gpus" in given and here is not None and here.local_size > 1:
            why = f"each of the {here.local_size} ranks here would claim the same GPUs"
            raise InvalidOptionError("--gpus", _typed(args.gpus), f"--candidates instead: {why}")
        return Job(claim={"n": 1, **given, "pin": not args.no_pin}, pin=False)
    about_claims = [(_option(name), _typed(value)) for name, value in given.items()]
    if args.per_rank:
        about_claims.append(("--per-rank", ""))
    for option, typed in about_claims:
        expected = "no --no-claim beside it: it is about a claim"
        if not args.no_claim and here is not None:
            words = f"{option} {typed}".rstrip()
            expected = (
                f"--per-rank beside it: this is rank {here.local_rank} of {here.local_size} of a "
                "launcher, and each of them would claim. To claim once for all of them, put it "
                f"before the launcher: gpuaff run {words} -- torchrun ..."
            )
        raise InvalidOptionError(option, typed, expected)
    return Job(claim=None, pin=not args.no_pin)


def _option(argument: str) -> str:
    """The option for an argument of ``claim_gpus``."""
    return "-n" if argument == "n" else f"--{argument.replace('_', '-')}"


def _typed(value: object) -> object:
    """An option's value as it is typed; ``--wait`` may have none."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return "" if value is None else value


def _show(job: Job, words: Sequence[str]) -> None:
    """Print what would be done. This process is pinned for that, and then ends."""
    from shlex import join

    from gpuaff.claims.acquire import preview
    from gpuaff.pinning import set_affinity
    from gpuaff.pinning.grant import take_grant

    claim = dict(job.claim or {})
    is_pinned = claim.pop("pin", False)
    cpus: CpuSet | None = None
    devices = preview(claim) if claim else ()
    if job.pin:
        affinity = set_affinity()
        cpus = affinity if affinity.pinned else None
    elif is_pinned:
        grant = take_grant([device.index for device in devices])
        cpus = grant.cpus if grant.pinned else None
    rows = {
        "claim": ", ".join(f"{device} ({device.uuid})" for device in devices) or "nothing",
        "pin": "nothing" if cpus is None else f"to CPUs {format_cpulist(cpus)}",
        "run": join(words),
    }
    show([Table([(Span(f"would {step}", "head"), what) for step, what in rows.items()])])
