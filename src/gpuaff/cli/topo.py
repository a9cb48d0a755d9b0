"""``gpuaff topo``: what the machine has, and where its GPUs are."""

from __future__ import annotations

import argparse
from pathlib import Path

from gpuaff.cli import arguments, output, source, views
from gpuaff.cli.interrupt import raise_on_interrupt
from gpuaff.errors import TopologyError
from gpuaff.formatting import counted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuaff.topology.model import Topology


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    parser.description = "Show the CPUs, NUMA nodes and GPUs of a machine, and where each GPU is."
    source.add_options(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print JSON, for programs")
    how.add_argument(
        "--save",
        metavar="FILE",
        type=arguments.argument(arguments.file_name),
        help="write the JSON to FILE, which --from reads on any machine",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show or save the topology; returns the exit code."""
    machine = source.observe(args.what, visible_devices=args.visible_devices, links=True)
    topology = machine.topology
    if args.json:
        output.show_json(topology.to_dict())
        return 0
    if args.save is not None:
        _save(topology, args.save)
    else:
        width = output.terminal_width()
        output.show_lines(views.topology_lines(topology, machine.name, width=width))
    output.show_notes(topology.notes)
    return 0


def _save(topology: Topology, file: str) -> None:
    if Path(file).is_dir():
        raise TopologyError(file, "is a folder; name the file to write")
    raise_on_interrupt()  # no temporary file is left behind
    topology.save(file)
    found = f"{counted(len(topology.cpus), 'CPU')}, {counted(len(topology.gpus), 'GPU')}"
    output.print_stderr(f"saved {file} ({found})")
