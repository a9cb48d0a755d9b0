"""``gpuaff check``: is everybody still where they should be?"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from gpuaff.cli import options
from gpuaff.notices import Notice
from gpuaff.system import environ

if TYPE_CHECKING:
    from gpuaff.checking.check import Check

CHECK_SCHEMA_VERSION = 1

_OTHER_MACHINE = Notice(
    "other-machine", "GPUAFF_FSROOT describes another machine, so GPUs are not looked at: unset it"
)


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    parser.description = (
        "Check the CPUs of every thread of running processes: against those of the process's "
        "other threads, and against the CPUs near the GPUs that it is on. Nothing is changed. "
        "Exit code 1 if anything is off."
    )
    parser.add_argument(
        "--pid",
        metavar="PID",
        type=options.argument(options.process_id),
        help="this process; the default is the process that called gpuaff (a shell, a job "
        "script) and all that it has started",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Look, and show what was found; returns the exit code."""
    from gpuaff.cli import processes

    found = processes.one(args.pid) if args.pid is not None else processes.family()
    checks, notices = _with_gpus(found)
    _show(checks, notices, json=args.json)
    return 0 if all(check.ok for check in checks) else 1


def _with_gpus(checks: list[Check]) -> tuple[list[Check], tuple[Notice, ...]]:
    if environ.fsroot() is not None:
        return checks, (_OTHER_MACHINE,)
    from gpuaff.cli import placement
    from gpuaff.system import kernel

    seen = placement.look()
    return [seen.of(check, kernel.open_files(check.pid)) for check in checks], seen.notices


def _show(checks: list[Check], notices: tuple[Notice, ...], *, json: bool) -> None:
    from gpuaff.checking.findings import lines
    from gpuaff.cli import render

    if json:
        render.show_json(_as_json(checks, notices))
        return
    render.show_lines(lines(checks, width=render.terminal_width()))
    render.show_notes(notices)


def _as_json(checks: list[Check], notices: tuple[Notice, ...]) -> dict[str, Any]:
    """``docs/check-json.md`` tells the schema."""
    return {
        "schema_version": CHECK_SCHEMA_VERSION,
        "ok": all(check.ok for check in checks),
        "processes": [check.to_dict() for check in checks],
        "warnings": [notice.to_dict() for notice in notices],
    }
