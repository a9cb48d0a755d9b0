"""``gpuaff plan``: who would get which cores, on this machine or another."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpuaff.allocator.model import Mode, Multithreading, Partition, Scope
from gpuaff.cli import options, source
from gpuaff.cpuset import CpuSet
from gpuaff.errors import InvalidOptionError
from gpuaff.notices import Notice, one_reason
from gpuaff.settings import READERS, reserve, whole_number, with_environment

if TYPE_CHECKING:
    from gpuaff.allocator.model import Plan

_NO_MATTER = {"uuids-unknown", "l3-unknown", "distances-unknown", "links-unknown", "no-gpus"}
"""Remarks on a topology that no plan depends on, or that the planner makes itself."""


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    parser.description = "Show which cores each rank would get. Nothing is changed."
    source.add_options(parser)
    parser.add_argument(
        "--nproc",
        metavar="N",
        type=options.argument(whole_number),
        help="ranks on the machine; the default is as many as --rank-allowed names, else the "
        "number of visible GPUs, or 1",
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
    for bound, meaning in (("min", "fail if a rank gets fewer"), ("max", "give no rank more")):
        parser.add_argument(
            f"--{bound}-physical-cores",
            metavar="N",
            type=options.argument(whole_number),
            help=f"{meaning} physical cores than N",
        )
    _add_word(parser, "partition", "P", Partition, Partition.AUTO)
    parser.add_argument(
        "--reserve",
        metavar="N",
        type=options.argument(reserve),
        help="keep N physical cores of each rank's part free, for helpers",
    )


def _add_allowed(parser: argparse.ArgumentParser) -> None:
    whose = parser.add_mutually_exclusive_group()
    whose.add_argument(
        "--allowed",
        metavar="CPULIST",
        type=options.argument(options.cpus),
        help="plan as if the ranks may use only these CPUs, e.g. 0-3,8",
    )
    whose.add_argument(
        "--rank-allowed",
        nargs="+",
        action="extend",
        metavar="CPULIST",
        type=options.argument(options.cpus),
        help="plan as if rank 0 may use only the first of these lists of CPUs, rank 1 only the "
        "second, …",
    )


def _add_word(
    parser: argparse.ArgumentParser, name: str, metavar: str, kind: Any, default: Any
) -> None:
    parser.add_argument(
        f"--{name}",
        metavar=metavar,
        type=options.argument(READERS[name]),
        help=f"{', '.join(str(member.value) for member in kind)} (default: {default})",
    )


def run(args: argparse.Namespace) -> int:
    """Make and show the plan; returns the exit code."""
    from gpuaff.allocator.plan import plan
    from gpuaff.cli import output, views

    limit = _limit(args)
    seen = source.observe(args.what, visible_devices=args.visible_devices, limit=limit, links=False)
    nproc = _nproc(args, visible=len(seen.topology.visible))
    chosen = _planner_options(args, live=seen.live)
    made = plan(seen.topology, nproc, rank_allowed=args.rank_allowed, **chosen)
    made = _with_notes(made, seen.topology.notes)
    if args.json:
        output.show_json(made.to_dict())
        return 0
    width = output.terminal_width()
    output.show_lines(views.plan_lines(seen.topology, made, seen.name, width=width))
    output.show_notes(made.warnings)
    return 0


def _limit(args: argparse.Namespace) -> source.Limit | None:
    """The CPUs outside which nobody is put, where an argument says so."""
    if args.rank_allowed is not None:
        everyones: CpuSet = frozenset().union(*args.rank_allowed)
        return source.Limit("--rank-allowed", everyones)
    return None if args.allowed is None else source.Limit("--allowed", args.allowed)


def _nproc(args: argparse.Namespace, *, visible: int) -> int:
    named = len(args.rank_allowed or ())
    if named and args.nproc not in (None, named):
        expected = f"as many as the {named} lists of --rank-allowed, one for each rank"
        raise InvalidOptionError("--nproc", args.nproc, expected)
    nproc: int = args.nproc or named or visible or 1
    return nproc


def _planner_options(args: argparse.Namespace, *, live: bool) -> dict[str, Any]:
    """Argument, else variable (only for the live machine), else absent: the planner's default."""
    chosen = {name: getattr(args, name, None) for name in READERS}
    if live:
        return with_environment(chosen)
    return {name: value for name, value in chosen.items() if value is not None}


def _with_notes(plan: Plan, notes: tuple[Notice, ...]) -> Plan:
    """The plan with the topology's remarks too: it is no better than what it stands on."""
    told = {warning.code for warning in plan.warnings} | _NO_MATTER
    new = tuple(note for note in notes if note.code not in told)
    return replace(plan, warnings=tuple(one_reason(plan.warnings + new)))
