"""``gpuaff status``: who has which GPU, and who waits."""

from __future__ import annotations

from gpuaff.system import environ

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

STATUS_SCHEMA_VERSION = 1


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    parser.description = (
        "Show each GPU: whether it is free, who has leased it, which processes are on it; and who "
        "waits for GPUs. Nothing is changed, and no lock is taken to look."
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Look, and show what was found; returns the exit code."""
    from gpuaff.claims.sight import look
    from gpuaff.claims.status import status_of
    from gpuaff.cli import render
    from gpuaff.cli.status_lines import lines
    from gpuaff.errors import GpuaffError

    if environ.fsroot() is not None:
        raise GpuaffError(
            "GPUAFF_FSROOT describes another machine, whose GPUs cannot be seen: unset it"
        )
    status = status_of(look())
    if args.json:
        render.show_json({"schema_version": STATUS_SCHEMA_VERSION, **status.to_dict()})
    else:
        render.show_lines(lines(status, width=render.terminal_width()))
        render.show_notes(status.warnings)
    return 0
