"""``gpuaff topo``: what the machine has, and where its GPUs sit."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from gpuaff.cli import options, source
from gpuaff.errors import TopologyError

if TYPE_CHECKING:
    from gpuaff.topology.model import Topology


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    parser.description = "Show the CPUs, NUMA nodes and GPUs of a machine, and who sits where."
    source.add_options(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print JSON, for programs")
    how.add_argument(
        "--save",
        metavar="FILE",
        type=options.argument(options.file_name),
        help="write the JSON to FILE, which --from reads on any machine",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show or save the topology; returns the exit code."""
    from gpuaff.cli import output, views

    seen = source.observe(args.what, visible_devices=args.visible_devices, links=True)
    if args.json:
        output.show_json(seen.topology.to_dict())
        return 0
    if args.save is not None:
        _save(seen.topology, args.save)
    else:
        output.show_lines(
            views.topology_lines(seen.topology, seen.name, width=output.terminal_width())
        )
    output.show_notes(seen.topology.notes)
    return 0


def _save(topology: Topology, file: str) -> None:
    from gpuaff.cli import output
    from gpuaff.formatting import counted

    if Path(file).is_dir():
        raise TopologyError(file, "is a folder; name the file to write")
    topology.save(file)
    found = f"{counted(len(topology.cpus), 'CPU')}, {counted(len(topology.gpus), 'GPU')}"
    output.print_stderr(f"saved {file} ({found})")
