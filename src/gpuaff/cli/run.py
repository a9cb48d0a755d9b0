"""``gpuaff run``: claim GPUs, and become a command that has them to itself.

It stands between a user and their program, so it imports as little as it can.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpuaff._system import execute
from gpuaff.cli import options
from gpuaff.errors import ClaimTimeoutError, GpusBusyError, InvalidOptionError, NotEnoughGpusError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any

    from gpuaff.claims.claim import Claim
    from gpuaff.claims.model import Waiting
    from gpuaff.cli.dispatch import Parser
    from gpuaff.launch.ranks import Ranks

_USAGE = """\
gpuaff run [-n N | --gpus LIST] [--candidates LIST] [--wait [DURATION]]
                  [--min-free-memory SIZE] [--max-utilization PCT] [--per-rank]
                  [--no-claim] [--no-pin] [--dry-run] -- COMMAND ..."""

_SPELLED = {
    "n": "-n",
    "gpus": "--gpus",
    "candidates": "--candidates",
    "wait": "--wait",
    "min_free_memory": "--min-free-memory",
    "max_utilization": "--max-utilization",
}
"""What the arguments of ``claim_gpus`` are called here."""

_WAIT = "--wait 10m waits for them in order, for so long, and --wait as long as it takes"

_EXAMPLE = "as in: gpuaff run -n 2 -- python train.py"


def register(parser: Parser) -> None:
    """Add the command's options to its parser."""
    parser.one_line = True
    parser.usage = _USAGE
    parser.description = (
        "Claim free GPUs, show the command no others, put it on the CPUs next to them, and become "
        "it: its process id, signals and exit code are the command's own. The GPUs stay claimed "
        "until it and its children have ended. Inside a launcher (a rank of torchrun, srun, "
        "mpirun) nothing is claimed, and the rank is pinned."
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
        "--dry-run", action="store_true", help="tell what would be done, and do nothing"
    )
    parser.add_argument("stray", nargs="*", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def _add_which(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "-n",
        dest="count",
        metavar="N",
        type=options.argument(options.gpu_count),
        help="how many GPUs; 1 by default, auto for as many as the scheduler has granted",
    )
    which.add_argument(
        "--gpus",
        metavar="LIST",
        type=options.argument(options.devices),
        help="exactly these GPUs, by index (0,2 or 4-7), UUID or PCI address",
    )
    parser.add_argument(
        "--candidates",
        metavar="LIST",
        type=options.argument(options.devices),
        help="some of these GPUs, named likewise",
    )


def _add_conditions(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--wait",
        metavar="DURATION",
        nargs="?",
        default=0.0,
        const=None,
        type=options.argument(options.duration),
        help="wait for GPUs that are busy, so long (90, 10m, 1h30m) or without limit",
    )
    parser.add_argument(
        "--min-free-memory",
        metavar="SIZE",
        type=options.argument(options.size),
        help="memory that must be free on each (40G)",
    )
    parser.add_argument(
        "--max-utilization",
        metavar="PCT",
        type=options.argument(options.percent),
        help="how busy each may have been lately, in percent",
    )


def run(args: argparse.Namespace) -> int:
    """Claim, pin, and become the command; returns only when that is not asked for.

    Raises:
        GpuaffError: something of it cannot be done; then nothing was.
    """
    from gpuaff.launch.ranks import ranks

    words = _command(args)
    here = ranks()
    if args.claim and not here.is_told and _tells_of_others(here):
        from gpuaff.pinning.report import say

        say(here.warnings, rank=None)  # it may be one of many, and each of them claims
    job = settle(args, here if here.is_told else None)
    path = execute.find(words[0])
    try:
        if args.dry_run:
            from gpuaff.cli.dry_run import show

            show(job, path, words)
            return 0
        claim = None if job.claim is None else _claimed(job.claim)
    except InvalidOptionError as error:
        spelled = _SPELLED.get(error.option, error.option)
        raise InvalidOptionError(spelled, error.value, error.expected) from None
    except NotEnoughGpusError as error:
        raise NotEnoughGpusError(error.wanted, error.found, _in_options(error.reason)) from None
    except GpusBusyError as error:
        raise _spelled(error, _WAIT) from None
    except ClaimTimeoutError as error:
        raise ClaimTimeoutError(error.waited, _spelled(error.busy, "")) from None
    try:
        if job.pin:
            from gpuaff.pinning.affinity import set_affinity

            set_affinity()
        return execute.become(path, words, keeping=() if claim is None else claim.fds)
    except BaseException:
        if claim is not None:
            claim.release()
        raise


def _tells_of_others(here: Ranks) -> bool:
    """Whether variables tell of ranks, though not which one of this node this is."""
    is_bad = any(notice.code == "bad-rank" for notice in here.warnings)
    return is_bad or (here.rank is not None and here.size != 1)


def _spelled(error: GpusBusyError, remedy: str) -> GpusBusyError:
    """The same in the words of the command line."""
    narrowed = _in_options(error.narrowed)
    return GpusBusyError(error.wanted, error.free, error.reasons, narrowed, remedy)


def _in_options(words: str) -> str:
    return words.replace("candidates=", "--candidates").replace("gpus=", "--gpus")


def _command(args: argparse.Namespace) -> list[str]:
    words: list[str] = args.words
    if args.stray:
        raise InvalidOptionError("COMMAND", args.stray[0], f"-- before it, {_EXAMPLE}")
    if not words:
        raise InvalidOptionError("COMMAND", "", f"a command after --, {_EXAMPLE}")
    return words


def _claimed(arguments: Mapping[str, Any]) -> Claim:
    if arguments["wait"] == 0:
        return _claim_gpus(arguments, None)

    from gpuaff.cli.waiting import telling

    with telling() as on_wait:
        return _claim_gpus(arguments, on_wait)


def _claim_gpus(arguments: Mapping[str, Any], on_wait: Callable[[Waiting], object] | None) -> Claim:
    """Claim without a context: those who only hold GPUs for a program need none."""
    from gpuaff.claims.claiming import claim_gpus

    return claim_gpus(placeholder=None, on_wait=on_wait, **arguments)


# What a call of ``gpuaff run`` means: what it claims, and how it pins. Pure.


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to be done before the command starts.

    Attributes:
        claim: what GPUs are claimed, as arguments of ``claim_gpus``; None when none are.
        pin: whether this process is put on its rank's share of the CPUs. A claim brings CPUs with
            it, or does not: that is among its arguments.
    """

    claim: Mapping[str, object] | None
    pin: bool


def settle(args: argparse.Namespace, ranks: Ranks | None) -> Job:
    """Find out what is to be done.

    Outside of a launcher, GPUs are claimed. Inside one, the command is one of several ranks, each
    of which has called us: each would claim as many, so it claims only when that is said
    (``--per-rank``), and is pinned otherwise.

    Args:
        args: what was asked for.
        ranks: which rank of a launcher this process is; None when it is none.

    Raises:
        InvalidOptionError: options contradict each other, or the launcher.
    """
    about_claims = list(_about_claims(args))
    if not args.claim:
        for option, value in about_claims:
            raise InvalidOptionError(option, value, "no --no-claim beside it: it is about a claim")
    if ranks is not None and not args.per_rank:
        for option, value in about_claims:
            raise InvalidOptionError(option, value, _around(option, value, ranks))
    if args.claim and (ranks is None or args.per_rank):
        if args.gpus is not None and ranks is not None and ranks.local_size > 1:
            expected = (
                f"--candidates instead: each of the {ranks.local_size} ranks here would claim the "
                "same GPUs"
            )
            raise InvalidOptionError("--gpus", _listed(args.gpus), expected)
        return Job(claim=_claim_arguments(args), pin=False)
    return Job(claim=None, pin=args.pin)


def _about_claims(args: argparse.Namespace) -> Iterator[tuple[str, object]]:
    """The options that were given and ask for something of a claim."""
    yield from (
        (option, value)
        for option, value in (
            ("-n", args.count),
            ("--gpus", _listed(args.gpus)),
            ("--candidates", _listed(args.candidates)),
            ("--wait", "" if args.wait is None else args.wait or None),
            ("--min-free-memory", args.min_free_memory),
            ("--max-utilization", args.max_utilization),
            ("--per-rank", "" if args.per_rank else None),
        )
        if value is not None
    )


def _around(option: str, value: object, ranks: Ranks) -> str:
    """What to do about a claim that each rank would make."""
    said = option if value == "" else f"{option} {value}"
    return (
        f"--per-rank beside it: this is rank {ranks.local_rank} of {ranks.local_size} of a "
        "launcher, and each of them would claim. To claim once for all of them, put it before "
        f"the launcher: gpuaff run {said} -- torchrun ..."
    )


def _claim_arguments(args: argparse.Namespace) -> dict[str, object]:
    return {
        "n": 1 if args.count is None else args.count,
        "gpus": args.gpus,
        "candidates": args.candidates,
        "wait": args.wait,
        "min_free_memory": args.min_free_memory,
        "max_utilization": args.max_utilization,
        "pin": args.pin,
    }


def _listed(names: tuple[int | str, ...] | None) -> str | None:
    return None if names is None else ",".join(map(str, names))
