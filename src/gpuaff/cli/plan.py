"""``gpuaff plan``: which cores each rank would get, on this machine or another."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from enum import Enum

from gpuaff import settings
from gpuaff.allocator.model import Mode, Multithreading, Partition, Plan, Scope
from gpuaff.allocator.plan import plan
from gpuaff.cli import output, source, views
from gpuaff.cli.arguments import argument
from gpuaff.cpuset import CpuSet
from gpuaff.errors import InvalidOptionError
from gpuaff.notices import Notice, one_reason
from gpuaff.options import cpus

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_IRRELEVANT = {"uuids-unknown", "l3-unknown", "distances-unknown", "links-unknown", "no-gpus"}
"""Notices of a topology that no plan depends on, or that the planner repeats."""


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    parser.description = "Show which cores each rank would get. Nothing is changed."
    source.add_options(parser)
    _add_number(
        parser,
        "--nproc",
        "ranks on the machine; the default is as many as --rank-allowed names, else the number of "
        "visible GPUs, or 1",
    )
    _add_planner_options(parser)
    _add_allowed(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(run=run)


def _add_planner_options(parser: argparse.ArgumentParser) -> None:
    _add_word(parser, "mode", "M", Mode, Mode.UNIQUE_CONTIGUOUS)
    _add_word(parser, "scope", "S", Scope, Scope.NODE)
    _add_word(parser, "multithreading", "T", Multithreading, Multithreading.ALL_LOGICAL)
    parser.add_argument(
        "--unbalanced",
        dest="balanced",
        action="store_const",
        const=False,
        help="let the ranks' numbers of cores differ, so that fewer stay free",
    )
    _add_number(parser, "--min-physical-cores", "fail if a rank gets fewer physical cores than N")
    _add_number(parser, "--max-physical-cores", "give no rank more physical cores than N")
    _add_word(parser, "partition", "P", Partition, Partition.AUTO)
    what = "keep N physical cores of each rank's part free, for helpers"
    _add_number(parser, "--reserve", what, settings.RESERVE)


def _add_number(
    parser: argparse.ArgumentParser,
    option: str,
    meaning: str,
    read: Callable[[str, str], int] = settings.NUMBER,
) -> None:
    parser.add_argument(option, metavar="N", type=argument(read), help=meaning)


def _add_word(
    parser: argparse.ArgumentParser, name: str, metavar: str, words: type[Enum], default: Enum
) -> None:
    parser.add_argument(
        f"--{name}",
        metavar=metavar,
        type=argument(settings.READERS[name]),
        help=f"{', '.join(str(word.value) for word in words)} (default: {default})",
    )


def _add_allowed(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--allowed",
        metavar="CPULIST",
        type=argument(cpus),
        help="plan as if the ranks may use only these CPUs, e.g. 0-3,8",
    )
    which.add_argument(
        "--rank-allowed",
        nargs="+",
        action="extend",
        metavar="CPULIST",
        type=argument(cpus),
        help="plan as if rank 0 may use only the first of these lists of CPUs, rank 1 only the "
        "second, …",
    )


def run(args: argparse.Namespace) -> int:
    """Make and show the plan; returns the exit code."""
    machine = source.observe(
        args.what, visible_devices=args.visible_devices, limit=_limit(args), links=False
    )
    topology = machine.topology
    nproc = _nproc(args, visible=len(topology.visible))
    chosen = _planner_options(args, live=machine.live)
    made = plan(topology, nproc, rank_allowed=args.rank_allowed, **chosen)
    made = _with_notes(made, topology.notes)
    if args.json:
        output.show_json(made.to_dict())
        return 0
    width = output.terminal_width()
    output.show_lines(views.plan_lines(topology, made, machine.name, width=width))
    output.show_notes(made.warnings)
    return 0


def _limit(args: argparse.Namespace) -> source.Limit | None:
    """The CPUs that the ranks may use at most, where an option names them."""
    if args.rank_allowed is not None:
        any_rank: CpuSet = frozenset().union(*args.rank_allowed)
        return source.Limit("--rank-allowed", any_rank)
    return None if args.allowed is None else source.Limit("--allowed", args.allowed)


def _nproc(args: argparse.Namespace, *, visible: int) -> int:
    lists = len(args.rank_allowed or ())
    if lists and args.nproc not in (None, lists):
        expected = f"as many as the {lists} lists of --rank-allowed, one for each rank"
        raise InvalidOptionError("--nproc", args.nproc, expected)
    nproc: int = args.nproc or lists or visible or 1
    return nproc


def _planner_options(args: argparse.Namespace, *, live: bool) -> dict[str, Any]:
    """Those given as arguments or, for the live machine, as variables."""
    chosen = {name: getattr(args, name, None) for name in settings.READERS}
    if live:
        return settings.with_environment(chosen)
    return {name: value for name, value in chosen.items() if value is not None}


def _with_notes(made: Plan, notes: tuple[Notice, ...]) -> Plan:
    """The plan with the topology's notices too: it is only as good as its topology."""
    known = {warning.code for warning in made.warnings} | _IRRELEVANT
    new = tuple(note for note in notes if note.code not in known)
    return replace(made, warnings=tuple(one_reason(made.warnings + new)))
