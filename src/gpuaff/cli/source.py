"""Which machine a command is about: the one it runs on, or what ``--from`` names."""

from __future__ import annotations

import argparse
import errno
import os
import re
import sys
from dataclasses import dataclass, replace

from gpuaff._system import env, kernel
from gpuaff.cli.output import print_stderr
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.errors import InvalidOptionError, TopologyError
from gpuaff.notices import Notice
from gpuaff.options import suggestion
from gpuaff.topology import serialize
from gpuaff.topology.model import Topology

_LONGEST = 4 << 20
"""The longest input, in bytes. The JSON of a machine with 8192 CPUs takes less than a tenth."""

_JSON = re.compile(r'\s*(?:\{|\[\s*[\[{"\]])')
"""How JSON begins. A paste may begin with a prompt: ``[me@node ~]$ lscpu``."""

_BINARY = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f]")
"""What text does not contain; the escapes (1b) by which nvidia-smi underlines are text."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What a machine has, and its name in the output.

    ``live``: it is this machine, with this process's mask and environment.
    """

    topology: Topology
    name: str
    live: bool


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the machine."""
    parser.add_argument(
        "--from",
        dest="what",
        metavar="WHAT",
        help='a saved JSON or pasted text ("-": standard input), or a machine that ships',
    )
    parser.add_argument(
        "--visible-devices",
        metavar="STR",
        help="read STR as CUDA_VISIBLE_DEVICES; write --visible-devices=-1 for one that "
        "begins with a dash",
    )


def observe(
    what: str | None,
    *,
    visible_devices: str | None,
    limit: tuple[str, CpuSet] | None = None,
    links: bool,
) -> Machine:
    """Observe or read the machine.

    Args:
        what: ``--from``; None is the machine we run on, or the tree of GPUAFF_FSROOT.
        visible_devices: ``--visible-devices``; None when it was not given.
        limit: an option, and the CPUs that it allows; None when none was given.
        links: also find out how the GPUs are connected.
    """
    live = what is None and env.fsroot() is None
    if live:
        name, topology = "this machine", Topology.observe(links=links)
        if visible_devices is not None:
            order = env.get("CUDA_DEVICE_ORDER")
            topology = topology.with_visible_devices(visible_devices, device_order=order)
    else:
        name, topology = _read_tree(links=links) if what is None else _read(what)
        topology = _neutral(topology, name, visible_devices, is_limited=limit is not None)
    if limit is not None:
        topology = _limited(topology, name, *limit)
    return Machine(topology, name, live)


def _read_tree(*, links: bool) -> tuple[str, Topology]:
    tree = kernel.machine_tree()
    if not tree.exists("sys/devices/system"):
        raise TopologyError(f"GPUAFF_FSROOT={tree.root}", "there is no sys/devices/system below it")
    return tree.root, Topology.observe(links=links)


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
    return replace(whole, notes=(*whole.notes, *notes))


def _limited(topology: Topology, name: str, option: str, cpus: CpuSet) -> Topology:
    topology = topology.with_allowed(cpus)
    if not topology.allowed:
        expected = f"some of the CPUs of {name}, {format_cpulist(topology.cpus)}"
        raise InvalidOptionError(option, format_cpulist(cpus), expected)
    absent = format_cpulist(cpus - topology.allowed)
    if not absent:
        return topology
    note = Notice("allowed-absent", f"{option}: {name} has no CPU {absent} online")
    return replace(topology, notes=(*topology.notes, note))


def _read(what: str) -> tuple[str, Topology]:
    """What ``--from`` names, and its name in the output; a file wins over a machine."""
    name = "standard input" if what == "-" else what
    data = _standard_input() if what == "-" else _file(what)
    if data is None:
        return name, _shipped(what)
    text = _text(data, name)
    if _JSON.match(text):
        return name, serialize.loads(text, name)
    try:
        return name, Topology.parse(text)
    except TopologyError as error:
        raise TopologyError(name, error.problem) from error


def _standard_input() -> bytes:
    if sys.stdin is None:
        raise TopologyError("standard input", "is closed")
    if sys.stdin.isatty():
        print_stderr("paste the text here, then press Ctrl-D")
    return sys.stdin.buffer.read(_LONGEST + 1)


def _file(name: str) -> bytes | None:
    """The contents of a file; None when there is no file of that name.

    It is read once and from one descriptor: it may be a pipe (``--from <(nvidia-smi topo -m)``).
    """
    try:
        with open(name, "rb") as stream:  # noqa: PTH123 - "" is no file, Path("") is a folder
            return stream.read(_LONGEST + 1)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
        return None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return None
        raise TopologyError(name, f"cannot be read: {error.strerror}") from None


def _shipped(name: str) -> Topology:
    names = list(serialize.machine_names())
    if name in names:
        return Topology.named(name)
    is_folder = os.path.isdir(name)  # noqa: PTH112 - Path raises for names that cannot be
    raise TopologyError(
        f"--from {name[:80]!r}",
        f"{'a folder' if is_folder else 'no such file'}; expected a file, - or a machine that "
        f"ships ({', '.join(names)}){suggestion(name, names)}",
    )


def _text(data: bytes, name: str) -> str:
    if len(data) > _LONGEST:
        problem = f"more than {_LONGEST >> 20} MiB: not a topology, nor pasted text"
        raise TopologyError(name, problem)
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):  # what PowerShell's > writes
        return data.decode("utf-16", "replace")
    text = data.decode("utf-8-sig", "replace")
    problem = "binary" if _BINARY.search(data) else "" if text.strip() else "empty"
    if problem:
        raise TopologyError(name, f"{problem}; expected a saved JSON or pasted text")
    return text
