"""What a call of ``gpuaff run`` means: what it claims, and how it pins. Pure."""

from __future__ import annotations

from gpuaff.errors import InvalidOptionError
from gpuaff.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping

    from gpuaff.launch.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
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
        return Job(claim=_claim(args), pin=False)
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


def _claim(args: argparse.Namespace) -> dict[str, object]:
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
