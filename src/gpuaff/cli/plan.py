"""``gpuaff plan``: which cores each rank would get, on this machine or another."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from functools import partial
from typing import Any

from gpuaff._system import env
from gpuaff.allocator import model
from gpuaff.allocator.plan import plan
from gpuaff.cli import output, views
from gpuaff.cli.dispatch import add_option
from gpuaff.cli.topo import add_options, observe
from gpuaff.errors import InvalidOptionError
from gpuaff.notices import Notice, one_reason
from gpuaff.options import count, cpus, misspelt_variables

# Notices of a topology that no plan depends on, or that the planner repeats.
_IRRELEVANT = {"uuids-unknown", "l3-unknown", "distances-unknown", "links-unknown", "no-gpus"}

# The planner's options: the sign of a value; the default and all words, or what a number does.
_OPTIONS: dict[str, tuple[str, Iterable[str], str]] = {
    "mode": ("M", model.Mode, model.Mode.UNIQUE_CONTIGUOUS),
    "scope": ("S", model.Scope, model.Scope.NODE),
    "multithreading": ("T", model.Multithreading, model.Multithreading.ALL_LOGICAL),
    "partition": ("P", model.Partition, model.Partition.AUTO),
    "min_physical_cores": ("N", (), "fail if a rank gets fewer physical cores than N"),
    "max_physical_cores": ("N", (), "give no rank more physical cores than N"),
    "reserve": ("N", (), "keep N physical cores of each rank's part free, for helpers"),
}


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    parser.description = "Show which cores each rank would get. Nothing is changed."
    add_options(parser)
    ranks = "as many as --rank-allowed names, else the number of visible GPUs, or 1"
    meaning = f"ranks on the machine; the default is {ranks}"
    add_option(parser, "--nproc", "N", partial(count, text=True), meaning)
    for name, (sign, words, meaning) in _OPTIONS.items():
        text = f"{', '.join(words)} (default: {meaning})" if words else meaning
        add_option(parser, f"--{name.replace('_', '-')}", sign, model.TEXT_READERS[name], text)
    meaning = "let the ranks' numbers of cores differ, so that fewer stay free"
    how: dict[str, Any] = {"action": "store_const", "const": False}
    parser.add_argument("--unbalanced", dest="balanced", help=meaning, **how)
    which = parser.add_mutually_exclusive_group()
    meaning = "plan as if the ranks may use only these CPUs, e.g. 0-3,8"
    add_option(which, "--allowed", "CPULIST", cpus, meaning)
    each = "rank 0 may use only the first of these lists of CPUs, rank 1 only the second, …"
    how = {"nargs": "+", "action": "extend"}
    add_option(which, "--rank-allowed", "CPULIST", cpus, f"plan as if {each}", **how)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(args: argparse.Namespace) -> int:
    """Make and show the plan; returns the exit code."""
    limit = None if args.allowed is None else ("--allowed", args.allowed)
    if args.rank_allowed is not None:
        limit = "--rank-allowed", frozenset[int]().union(*args.rank_allowed)
    topology, name, is_live = observe(args, limit=limit, links=False)
    lists = len(args.rank_allowed or ())
    if lists and args.nproc not in (None, lists):
        expected = f"as many as the {lists} lists of --rank-allowed, one for each rank"
        raise InvalidOptionError("--nproc", args.nproc, expected)
    nproc = args.nproc or lists or len(topology.visible) or 1
    misspelt: tuple[Notice, ...] = ()
    chosen: dict[str, Any] = {key: getattr(args, key, None) for key in model.TEXT_READERS}
    if is_live:
        chosen = model.given_options(chosen, env.option)
        misspelt = misspelt_variables(env.names("GPUAFF_"))
    given = {key: value for key, value in chosen.items() if value is not None}
    made = plan(topology, nproc, rank_allowed=args.rank_allowed, **given)
    # A plan is only as good as its topology.
    known = {warning.code for warning in made.warnings} | _IRRELEVANT
    notices = (
        *misspelt,
        *made.warnings,
        *(note for note in topology.notes if note.code not in known),
    )
    made = made._replace(warnings=tuple(one_reason(notices)))
    if args.json:
        output.show_json(made.to_dict())
        return 0
    output.show(views.plan_blocks(topology, made, name))
    output.show_notes(made.warnings)
    return 0
