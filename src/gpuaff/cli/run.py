"""``gpuaff run``: claim GPUs, and become a command that has them to itself.

It stands between a user and their program, so it imports as little as it can.
"""

from __future__ import annotations

import argparse

from gpuaff.cli import options, quantities
from gpuaff.errors import (
    ClaimTimeoutError,
    GpusBusyError,
    InvalidOptionError,
    NotEnoughGpusError,
)
from gpuaff.system import program

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from gpuaff.claims.claim import Claim
    from gpuaff.claims.model import Waiting
    from gpuaff.cli.parser import Parser
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
        type=options.argument(quantities.gpu_count),
        help="how many GPUs; 1 by default, auto for as many as the scheduler has granted",
    )
    which.add_argument(
        "--gpus",
        metavar="LIST",
        type=options.argument(quantities.devices),
        help="exactly these GPUs, by index (0,2 or 4-7), UUID or PCI address",
    )
    parser.add_argument(
        "--candidates",
        metavar="LIST",
        type=options.argument(quantities.devices),
        help="some of these GPUs, named likewise",
    )


def _add_conditions(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--wait",
        metavar="DURATION",
        nargs="?",
        default=0.0,
        const=None,
        type=options.argument(quantities.duration),
        help="wait for GPUs that are busy, so long (90, 10m, 1h30m) or without limit",
    )
    parser.add_argument(
        "--min-free-memory",
        metavar="SIZE",
        type=options.argument(quantities.size),
        help="memory that must be free on each (40G)",
    )
    parser.add_argument(
        "--max-utilization",
        metavar="PCT",
        type=options.argument(quantities.percent),
        help="how busy each may have been lately, in percent",
    )


def run(args: argparse.Namespace) -> int:
    """Claim, pin, and become the command; returns only when that is not asked for.

    Raises:
        GpuaffError: something of it cannot be done; then nothing was.
    """
    from gpuaff.cli.job import settle
    from gpuaff.launch.ranks import ranks

    words = _command(args)
    here = ranks()
    if args.claim and not here.is_told and _tells_of_others(here):
        from gpuaff.binding.report import say

        say(here.warnings, rank=None)  # it may be one of many, and each of them claims
    job = settle(args, here if here.is_told else None)
    path = program.find(words[0])
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
            from gpuaff.binding.affinity import set_affinity

            set_affinity()
        return program.become(path, words, keeping=() if claim is None else claim.fds)
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
        return _claim(arguments, None)
    from gpuaff.cli.waiting import telling

    with telling() as on_wait:
        return _claim(arguments, on_wait)


def _claim(arguments: Mapping[str, Any], on_wait: Callable[[Waiting], object] | None) -> Claim:
    """Claim without a context: those who only hold GPUs for a program need none."""
    from gpuaff.claims.claimer import claim_gpus

    return claim_gpus(placeholder=None, on_wait=on_wait, **arguments)
