"""``gpuaff topo``: what the machine has, and where its GPUs are."""

from __future__ import annotations

import argparse
from pathlib import Path

from gpuaff.cli import output, raise_on_interrupt, source, views
from gpuaff.errors import InvalidOptionError, TopologyError
from gpuaff.formatting import counted


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    parser.description = "Show the CPUs, NUMA nodes and GPUs of a machine, and where each GPU is."
    source.add_options(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print JSON, for programs")
    how.add_argument(
        "--save",
        metavar="FILE",
        help="write the JSON to FILE, which --from reads on any machine",
    )


def run(args: argparse.Namespace) -> int:
    """Show or save the topology; returns the exit code."""
    if args.save in ("", "-"):
        expected = "the name of a file; --json prints to standard output"
        raise InvalidOptionError("--save", args.save, expected)
    machine = source.observe(args, links=True)
    topology = machine.topology
    if args.json:
        output.show_json(topology.to_dict())
        return 0
    if args.save is None:
        output.show(views.topology_blocks(topology, machine.name))
    else:
        if Path(args.save).is_dir():
            raise TopologyError(args.save, "is a folder; name the file to write")
        raise_on_interrupt()  # no temporary file is left behind
        topology.save(args.save)
        found = f"{counted(len(topology.cpus), 'CPU')}, {counted(len(topology.gpus), 'GPU')}"
        output.print_stderr(f"saved {args.save} ({found})")
    output.show_notes(topology.notes)
    return 0
