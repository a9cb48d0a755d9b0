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
    """The machine that a command is about.

    Attributes:
        topology: what it has.
        name: its name in the output.
        live: whether it is this machine, with this process's mask and environment.
    """

    topology: Topology
    name: str
    live: bool


@dataclass(frozen=True, slots=True)
class Limit:
    """CPUs that an option allows.

    Attributes:
        option: the option's name.
        cpus: the CPUs that it names.
    """

    option: str
    cpus: CpuSet


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
    visible_devices: str | None = None,
    limit: Limit | None = None,
    links: bool,
) -> Machine:
    """Observe or read the machine.

    Args:
        what: ``--from``; None is the machine we run on, or the tree of GPUAFF_FSROOT.
        visible_devices: ``--visible-devices``; None when it was not given.
        limit: the CPUs that an option allows; None when none was given.
        links: also find out how the GPUs are connected.

    Raises:
        TopologyError: there is no such file or machine, or it cannot be parsed.
        InvalidOptionError: ``limit`` names only CPUs that the machine lacks.
        OSError: a file cannot be read.
    """
    if what is None and env.fsroot() is None:
        machine = Machine(_live(visible_devices, links=links), "this machine", live=True)
    else:
        topology, name = _tree(links=links) if what is None else _read(what)
        neutral = _neutral(topology, name, visible_devices, limited=limit is not None)
        machine = Machine(neutral, name, live=False)
    return machine if limit is None else _limited(machine, limit)


def _live(visible_devices: str | None, *, links: bool) -> Topology:
    topology = Topology.observe(links=links)
    if visible_devices is None:
        return topology
    order = env.get("CUDA_DEVICE_ORDER")
    return topology.with_visible_devices(visible_devices, device_order=order)


def _tree(*, links: bool) -> tuple[Topology, str]:
    tree = kernel.machine_tree()
    if not tree.exists("sys/devices/system"):
        raise TopologyError(f"GPUAFF_FSROOT={tree.root}", "there is no sys/devices/system below it")
    return Topology.observe(links=links), tree.root


def _neutral(
    topology: Topology, name: str, visible_devices: str | None, *, limited: bool
) -> Topology:
    """The machine with all CPUs allowed and all GPUs visible, not as its saver saw it.

    Args:
        topology: what was read.
        name: where it came from.
        visible_devices: ``--visible-devices``; None when it was not given.
        limited: whether an option names the allowed CPUs.
    """
    whole = topology.with_allowed(topology.cpus).with_visible_devices(None)
    notes: list[Notice] = []
    if not limited and topology.allowed != whole.allowed:
        notes.append(_saved_allowed(name, format_cpulist(topology.allowed)))
    if visible_devices is not None:
        whole = whole.with_visible_devices(visible_devices)
    elif topology.visible != whole.visible:
        notes.append(_saved_visible(name, ",".join(map(str, topology.visible))))
    return replace(whole, notes=(*whole.notes, *notes))


def _saved_allowed(name: str, cpus: str) -> Notice:
    return Notice(
        "saved-allowed",
        f"{name} was saved by a process allowed {cpus or 'no CPU'} only"
        + (f"; gpuaff plan --allowed {cpus} plans for it" if cpus else ""),
    )


def _saved_visible(name: str, indices: str) -> Notice:
    return Notice(
        "saved-visible",
        f"{name} was saved by a process that saw {f'GPU {indices}' if indices else 'no GPU'}"
        f" only; --visible-devices '{indices}' shows it so",
    )


def _limited(machine: Machine, limit: Limit) -> Machine:
    topology = machine.topology.with_allowed(limit.cpus)
    if not topology.allowed:
        expected = f"some of the CPUs of {machine.name}, {format_cpulist(topology.cpus)}"
        raise InvalidOptionError(limit.option, format_cpulist(limit.cpus), expected)
    absent = format_cpulist(limit.cpus - topology.allowed)
    if absent:
        message = f"{limit.option}: {machine.name} has no CPU {absent} online"
        note = Notice("allowed-absent", message)
        topology = replace(topology, notes=(*topology.notes, note))
    return replace(machine, topology=topology)


def _read(what: str) -> tuple[Topology, str]:
    """What ``--from`` names, and its name in the output; a file wins over a machine."""
    name = "standard input" if what == "-" else what
    data = _standard_input() if what == "-" else _file(what)
    return (_shipped(what) if data is None else _parsed(data, name)), name


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


def _parsed(data: bytes, name: str) -> Topology:
    try:
        text = _text(data)
        return _from_json(text) if _JSON.match(text) else Topology.parse(text)
    except TopologyError as error:
        raise TopologyError(name, error.problem) from error


def _text(data: bytes) -> str:
    """The bytes as text.

    Raises:
        TopologyError: they are not text, or too many, or none.
    """
    if len(data) > _LONGEST:
        raise TopologyError("", f"more than {_LONGEST >> 20} MiB: not a topology, nor pasted text")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):  # what PowerShell's > writes
        return data.decode("utf-16", "replace")
    if _BINARY.search(data):
        raise TopologyError("", "binary; expected a saved JSON or pasted text")
    text = data.decode("utf-8-sig", "replace")
    if not text.strip():
        raise TopologyError("", "empty; expected a saved JSON or pasted text")
    return text


def _from_json(text: str) -> Topology:
    try:
        data = serialize.parse_json(text)
    except ValueError as error:
        raise TopologyError("", str(error)) from None
    return Topology.from_dict(data)
