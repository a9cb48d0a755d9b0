"""``gpuaff topo``: what a machine has; and which one: that we run on, or what ``--from`` names."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gpuaff._system import env, kernel
from gpuaff.cli import output, raise_on_interrupt, views
from gpuaff.cli.output import print_stderr
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.errors import InvalidOptionError, TopologyError
from gpuaff.formatting import counted
from gpuaff.notices import Notice
from gpuaff.options import suggestion
from gpuaff.topology import serialize
from gpuaff.topology.model import Topology

_LONGEST = 4 << 20
"""The longest input, in bytes. The JSON of a machine with 8192 CPUs takes less than a tenth."""

_PICTURES = (".gif", ".html", ".jpg", ".pdf", ".png", ".svg")
"""Names of files that would mislead: JSON is written."""


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    parser.description = "Show the CPUs, NUMA nodes and GPUs of a machine, and where each GPU is."
    add_options(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print JSON, for programs")
    meaning = "write the JSON to FILE, which --from reads on any machine"
    how.add_argument("--save", metavar="FILE", help=meaning)


def run(args: argparse.Namespace) -> int:
    """Show or save the topology; returns the exit code."""
    if Path(args.save or "").suffix.lower() in _PICTURES:
        raise InvalidOptionError("--save", args.save, "a file for JSON, such as node17.json")
    if args.save in ("", "-"):
        expected = "the name of a file; --json prints to standard output"
        raise InvalidOptionError("--save", args.save, expected)
    topology, name, _ = observe(args, links=True)
    if args.json:
        output.show_json(topology.to_dict())
        return 0
    if args.save is None:
        output.show(views.topology_blocks(topology, name))
    else:
        if Path(args.save).is_dir():
            raise TopologyError(args.save, "is a folder; name the file to write")
        raise_on_interrupt()  # no temporary file is left behind
        topology.save(args.save)
        found = f"{counted(len(topology.cpus), 'CPU')}, {counted(len(topology.gpus), 'GPU')}"
        print_stderr(f"saved {args.save} ({found})")
    output.show_notes(topology.notes)
    return 0


# Which machine.


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the machine."""
    meaning = 'a saved JSON or pasted text ("-": standard input), or a machine that ships'
    parser.add_argument("--from", dest="what", metavar="WHAT", help=meaning)
    meaning = "read STR as CUDA_VISIBLE_DEVICES; --visible-devices=-1 where it begins with a dash"
    parser.add_argument("--visible-devices", metavar="STR", help=meaning)


def observe(
    args: argparse.Namespace, *, limit: tuple[str, CpuSet] | None = None, links: bool
) -> tuple[Topology, str, bool]:
    """Observe the machine we run on, or read that of ``--from`` or GPUAFF_FSROOT.

    ``limit`` is an option, and the CPUs that it allows; ``links``: also find out how the GPUs are
    connected. Returns the machine, its name in the output, and whether it is this one, with this
    process's mask and environment.
    """
    what, shown = args.what, args.visible_devices
    live = what is None and env.fsroot() is None
    if live:
        name, topology = "this machine", Topology.observe(links=links)
        if shown is not None:
            order = env.get("CUDA_DEVICE_ORDER")
            topology = topology.with_visible_devices(shown, device_order=order)
    else:
        tree = kernel.machine_tree()
        if what is None and not tree.exists("sys/devices/system"):
            problem = "there is no sys/devices/system below it"
            raise TopologyError(f"GPUAFF_FSROOT={tree.root}", problem)
        name, seen = (tree.root, Topology.observe(links=links)) if what is None else _read(what)
        topology = _neutral(seen, name, shown, is_limited=limit is not None)
    if limit is not None:
        topology = _limited(topology, name, *limit)
    return topology, name, live


def _neutral(
    topology: Topology, name: str, visible_devices: str | None, *, is_limited: bool
) -> Topology:
    """The machine with all CPUs allowed and all GPUs visible, not as its saver saw it."""
    whole = topology.with_allowed(topology.cpus).with_visible_devices(visible_devices)
    saved = f"{name} was saved by a process"
    notes: list[Notice] = []
    if not is_limited and topology.allowed != whole.allowed:
        cpus = format_cpulist(topology.allowed)
        remedy = f"; gpuaff plan --allowed {cpus} plans for it" if cpus else ""
        notes.append(Notice("saved-allowed", f"{saved} allowed {cpus or 'no CPU'} only{remedy}"))
    if visible_devices is None and topology.visible != whole.visible:
        gpus = ",".join(map(str, topology.visible))
        remedy = f"--visible-devices '{gpus}' shows it so"
        seen = f"GPU {gpus}" if gpus else "no GPU"
        notes.append(Notice("saved-visible", f"{saved} that saw {seen} only; {remedy}"))
    return whole._replace(notes=(*whole.notes, *notes))


def _limited(topology: Topology, name: str, option: str, cpus: CpuSet) -> Topology:
    topology = topology.with_allowed(cpus)
    if not topology.allowed:
        expected = f"some of the CPUs of {name}, {format_cpulist(topology.cpus)}"
        raise InvalidOptionError(option, format_cpulist(cpus), expected)
    absent = format_cpulist(cpus - topology.allowed)
    if not absent:
        return topology
    note = Notice("allowed-absent", f"{option}: {name} has no CPU {absent} online")
    return topology._replace(notes=(*topology.notes, note))


def _read(what: str) -> tuple[str, Topology]:
    """What ``--from`` names, and its name in the output; a file wins over a machine."""
    name = "standard input" if what == "-" else what
    if what == "-" and sys.stdin is not None and sys.stdin.isatty():
        print_stderr("paste the text here, then press Ctrl-D")
    try:
        # Once and from one descriptor: it may be a pipe (``--from <(nvidia-smi topo -m)``).
        with open(0 if what == "-" else what, "rb", closefd=what != "-") as stream:
            data = stream.read(_LONGEST + 1)
    except (OSError, ValueError) as error:
        names = list(serialize.machine_names())
        if what in names:
            return name, Topology.named(what)
        why = error.strerror if isinstance(error, OSError) else error
        ships = f"a machine that ships ({', '.join(names)}){suggestion(what, names)}"
        problem = f"{why}; expected a file, - or {ships}"
        raise TopologyError(f"--from {what[:80]!r}", problem) from None
    if len(data) > _LONGEST:
        problem = f"more than {_LONGEST >> 20} MiB; expected a saved JSON or pasted text"
        raise TopologyError(name, problem)
    is_utf16 = data.startswith((b"\xff\xfe", b"\xfe\xff"))  # what PowerShell's > writes
    text = data.decode("utf-16" if is_utf16 else "utf-8-sig", "replace")
    if text.lstrip().startswith("{"):
        return name, serialize.loads(text, name)
    try:
        return name, Topology.parse(text)
    except TopologyError as error:
        raise TopologyError(name, error.problem) from error
