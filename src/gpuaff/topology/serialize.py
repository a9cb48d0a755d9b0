"""Topologies as JSON: saved, loaded and shipped; ``docs/topology-json.md`` has the schema.

A file may be written by hand or by a later release, so every member is checked; unknown members
are ignored. The records of :mod:`gpuaff.topology.model` say which members there are: one without
a default is required. ``machines/`` has files of machines, to plan for one that is not at hand;
``docs/machines.md`` says where their figures are from.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

from gpuaff._system.nvml_records import pci_address
from gpuaff.cpuset import CpuSet, format_cpulist, parse_cpulist
from gpuaff.errors import TopologyError
from gpuaff.formatting import one_line
from gpuaff.notices import Notice
from gpuaff.options import suggestion
from gpuaff.topology.model import Accelerator, Gpu, MigInstance, NumaNode, Package, Source, Topology
from gpuaff.topology.pci import address_key

SCHEMA_VERSION = 1
"""Grows when a reader of the version before would misunderstand the file."""

MAX_BYTES = 4 << 20
"""The longest text accepted. A machine of 8192 CPUs needs less than a tenth of it."""

_MOST_GPUS = 256
_PCI = r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]"
_SOURCES = [str(source) for source in Source]
_MAY_BE_EMPTY = {"allowed", "efficiency_cpus", "numa_nodes.cpus"}


@dataclass(slots=True)
class _Document:
    """What the checks of a member need of the whole."""

    source: str  # for messages
    data: Any
    cpus: CpuSet = frozenset()  # empty when unknown
    notes: list[Notice] = field(default_factory=list)
    used: dict[str, set[int | str]] = field(default_factory=dict)  # by members, what they hold


@dataclass(frozen=True, slots=True)
class _Member:
    """A value in parsed JSON and its path, e.g. ``gpus[2].node_cpus``; a missing one is None.

    Each method that returns the value raises :class:`TopologyError` when it is not valid.
    """

    document: _Document
    value: Any
    path: str = ""

    def fail(self, problem: str) -> NoReturn:
        where = f"{self.path}: " if self.path else ""
        raise TopologyError(self.document.source, where + one_line(problem, 200, end="..."))

    def __getitem__(self, key: str) -> _Member:
        path = f"{self.path}.{key}" if self.path else key
        return _Member(self.document, self.expect(dict, "an object").get(key), path)

    def required(self, key: str) -> _Member:
        member = self[key]
        if key not in self.value:
            member.fail("is missing")
        return member

    def record(self, make: type[Any]) -> Any:
        """A record; null stands for a member's default."""
        found = {}
        for one in fields(make):
            if one.default is MISSING:
                found[one.name] = _READERS[one.name](self.required(one.name))
            elif one.name in _READERS and self[one.name].value is not None:
                found[one.name] = _READERS[one.name](self[one.name])
        return make(**found)

    def records(self, make: type[Any]) -> tuple[Any, ...]:
        return tuple(item.record(make) for item in self.items())

    def ordered(self, make: type[Any], most: int | None = None, unit: str = "") -> tuple[Any, ...]:
        """Records that ascend by their first member."""
        items, key = self.items(), fields(make)[0].name
        if most is not None and len(items) > most:
            self.fail(f"{len(items)} {unit} in one machine, expected at most {most}")
        found: list[Any] = []
        for item in items:  # one by one, so that a bad list ends early
            record = item.record(make)
            before, own = getattr(found[-1] if found else None, key, None), getattr(record, key)
            if before is not None and _order(own) <= _order(before):
                item[key].fail(f"{own} stands after {before}: they must ascend, each once")
            found.append(record)
        return tuple(found)

    def items(self) -> list[_Member]:
        values = self.expect(list, "a list")
        return [_Member(self.document, v, f"{self.path}[{i}]") for i, v in enumerate(values)]

    def rows(self, count: int, unit: str) -> list[_Member]:
        items = self.items()
        if len(items) != count:
            self.fail(f"expected {count} {unit}, found {len(items)}")
        return items

    def integer(self, lowest: int = 0, highest: int = 2**31 - 1) -> int:
        number: int = self.expect(int, "a whole number")
        if not lowest <= number <= highest:
            self.fail(f"expected a number from {lowest} to {highest}")
        return number

    def text(self) -> str:
        text: str = self.expect(str, "a text")
        if not text:
            self.fail("is empty; write null for what is not known")
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            self.fail("is not valid Unicode")
        return text

    def name(self, text: str | None = None) -> str:
        """A text that no other of these members has."""
        name, used = text or self.text(), self._used()
        if name.lower() in used:
            self.fail(f"{name!r} stands twice")
        used.add(name.lower())
        return name

    def matching(self, pattern: str, expected: str) -> str:
        if re.fullmatch(pattern, self.text()) is None:
            self.fail(f"expected {expected}")
        return self.text()

    def pci_address(self) -> str:
        """A PCI address as sysfs spells it; nvidia-smi's domain of eight digits is accepted."""
        text = self.matching(_PCI, "a PCI address such as 0000:07:00.0")
        return self.name(pci_address(text))

    def some_cpus(self) -> CpuSet:
        return self._cpus() or self.fail("names no CPU; write null if they are not known")

    def own_cpus(self) -> CpuSet:
        """CPUs of the machine, if those are known, that no other of these members has."""
        cpus, machine, used = self._cpus(), self.document.cpus, self._used()
        if machine and not cpus <= machine:
            self.fail(f"names CPUs that are not in cpus: {format_cpulist(cpus - machine)}")
        if not cpus and self._family() not in _MAY_BE_EMPTY:
            self.fail("names no CPU")
        if twice := cpus & used:
            self.fail(f"names CPUs that stand before it already: {format_cpulist(twice)}")
        used |= cpus
        return cpus

    def near_cpus(self) -> CpuSet | None:
        """The CPUs near a device that the machine has; None when it has none of them (A22)."""
        near, machine = self.some_cpus(), self.document.cpus
        if not machine or near <= machine:
            return near
        outside = format_cpulist(near - machine)
        message = f"{self.path} names CPUs that the machine does not have: {outside}"
        self.document.notes.append(Notice("near-foreign", f"{message}; they are left out"))
        return near & machine or None

    def _family(self) -> str:
        """The path of all members like this one: ``gpus.mig.uuid``."""
        return re.sub(r"\[\d+\]", "", self.path)

    def _used(self) -> set[int | str]:
        """What such members hold already."""
        return self.document.used.setdefault(self._family(), set())

    def _cpus(self) -> CpuSet:
        text = self.expect(str, "CPUs such as '0-3,8'")
        try:
            return parse_cpulist(text)
        except ValueError as error:
            self.fail(str(error))

    def expect(self, kind: type, words: str) -> Any:
        value = self.value
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            found = {type(None): "null", dict: "an object", list: "a list"}.get(type(value))
            if isinstance(value, int) and value.bit_length() > 64:
                found = "a huge number"
            self.fail(f"expected {words}, found {found or one_line(repr(value), 40, end='...')}")
        return value


def _order(key: Any) -> Any:
    return address_key(key) if isinstance(key, str) else key


def _groups(member: _Member) -> tuple[CpuSet, ...]:
    return tuple(sorted((item.own_cpus() for item in member.items()), key=min))


def _cores(member: _Member) -> tuple[CpuSet, ...]:
    cores = _groups(member)
    if missing := member.document.cpus.difference(*cores):
        member.fail(f"no core holds these CPUs: {format_cpulist(missing)}")
    return cores


def _distances(member: _Member) -> tuple[int, ...]:
    count = len(member.document.data["numa_nodes"])
    return tuple(cell.integer() for cell in member.rows(count, "distances, one to each node"))


def _gpus(member: _Member) -> tuple[Gpu, ...]:
    def with_source(gpu: Gpu) -> Gpu:
        is_known = gpu.node_cpus or gpu.socket_cpus
        return replace(gpu, source=Source.GIVEN) if is_known and not gpu.source else gpu

    return tuple(map(with_source, member.ordered(Gpu, _MOST_GPUS, "GPUs")))


def _links(member: _Member) -> tuple[tuple[str, ...], ...]:
    count = len(member.document.data["gpus"])
    rows = member.rows(count, "rows, one for each GPU")
    lists = (row.rows(count, "cells, one for each GPU") for row in rows)
    return tuple(tuple(cell.text() for cell in cells) for cells in lists)


def _visible(member: _Member) -> tuple[int, ...]:
    indices = {gpu["index"] for gpu in member.document.data["gpus"]}
    for item in member.items():
        if item.integer() not in indices:
            item.fail(f"there is no GPU {item.value}")
    return tuple(member.value)


_READERS: Mapping[str, Callable[[_Member], Any]] = {
    **dict.fromkeys(("id", "index", "numa_node", "memory_node"), _Member.integer),
    **dict.fromkeys(("gpu_instance", "compute_instance"), lambda member: member.integer(-1)),
    **dict.fromkeys(("code", "message", "name"), _Member.text),
    **dict.fromkeys(("cpus", "allowed", "efficiency_cpus"), _Member.own_cpus),
    **dict.fromkeys(("node_cpus", "socket_cpus", "local_cpus"), _Member.near_cpus),
    "accelerators": lambda member: member.ordered(Accelerator, _MOST_GPUS, "accelerators"),
    "cores": _cores,
    "distances": _distances,
    "gpus": _gpus,
    "has_memory": lambda member: member.expect(bool, "true or false"),
    "l3": _groups,
    "links": _links,
    "mig": lambda member: member.records(MigInstance),
    "notes": lambda member: member.records(Notice),
    "numa_nodes": lambda member: member.ordered(NumaNode),
    "packages": lambda member: member.ordered(Package),
    "pci_bus_id": _Member.pci_address,
    "source": lambda member: Source(
        member.matching("|".join(_SOURCES), f"one of {', '.join(_SOURCES)}")
    ),
    "uuid": _Member.name,
    "vendor": lambda member: member.matching("[0-9a-f]{4}", "a PCI vendor such as 10de"),
    "visible": _visible,
}
"""How to read each member, in whichever record it stands."""


def from_dict(data: Any, source: str = "the topology") -> Topology:
    """Check and convert a topology, as :meth:`gpuaff.Topology.from_dict` does.

    CPUs near a GPU that the machine does not have are left out with the note ``near-foreign``
    (case A22); every other contradiction is an error, which names ``source``.
    """
    document = _Document(source, data)
    top = _Member(document, data)
    version = top.required("schema_version")
    if version.integer(1) > SCHEMA_VERSION:
        reads = f"this one reads {SCHEMA_VERSION}: upgrade gpuaff"
        version.fail(f"{version.value} is of a later gpuaff, and {reads}")
    if top.required("cpus").value is not None:
        document.cpus = top["cpus"].some_cpus()
    top.required("gpus").items()
    found: Topology = top.record(Topology)
    return replace(
        found,
        allowed=found.cpus if top["allowed"].value is None else found.allowed,
        visible=tuple(found.gpu_by_index) if top["visible"].value is None else found.visible,
        notes=(*found.notes, *document.notes),
    )


def to_dict(topology: Topology) -> dict[str, Any]:
    """The topology as parsed JSON. Every member is there; null is what is not known."""
    data = {"schema_version": SCHEMA_VERSION, **_plain(topology)}
    if not topology.cpus:
        data["cpus"], data["allowed"] = None, data["allowed"] or None
    data["notes"] = [note.to_dict() for note in topology.notes]
    return data


def _plain(value: Any) -> Any:
    if isinstance(value, frozenset):
        return format_cpulist(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    return str(value) if isinstance(value, Source) else value


def machine_names() -> tuple[str, ...]:
    """The names of the machines that ship, sorted."""
    files = (resources.files("gpuaff.topology") / "machines").iterdir()
    return tuple(sorted(file.name.removesuffix(".json") for file in files))


def named(name: str) -> Topology:
    """A machine that ships by its name, in upper or lower case."""
    known, wanted = machine_names(), name.strip().lower()
    if wanted not in known:
        problem = f"no such machine; there are {', '.join(known)}{suggestion(wanted, known)}"
        raise TopologyError(one_line(name, 80) or "''", problem)
    file = resources.files("gpuaff.topology") / "machines" / f"{wanted}.json"
    return loads(file.read_bytes(), wanted)


def load(path: str | Path) -> Topology:
    """Load a topology from a file."""
    file = Path(path)
    if not stat.S_ISREG(file.stat().st_mode):  # opening a pipe could wait for ever
        raise TopologyError(str(path), "not a file: expected a topology that gpuaff saved")
    with file.open("rb") as stream:
        return loads(stream.read(MAX_BYTES + 1), str(path))


def loads(data: bytes | str, source: str = "the topology") -> Topology:
    """A topology from JSON text; errors name ``source``."""
    try:
        parsed = parse_json(data)
    except ValueError as error:
        raise TopologyError(source, str(error)) from None
    return from_dict(parsed, source)


def parse_json(data: bytes | str) -> Any:
    """Parse JSON (RFC 8259): UTF-8 with or without a BOM, no NaN, no key twice.

    Raises:
        ValueError: it is not valid; the message is one line and says where.
    """
    if len(data) > MAX_BYTES:
        raise ValueError(f"longer than {MAX_BYTES >> 20} MiB: not a topology")
    try:
        text = data.decode("utf-8-sig") if isinstance(data, bytes) else data.removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text (byte {error.start})") from None
    if not text.strip():
        raise ValueError("empty")
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"not JSON: {error.msg} at {where}; was it cut?") from None
    except RecursionError:
        raise ValueError("not a topology: nested too deeply") from None


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"not JSON: {constant} is not a JSON number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for key, value in pairs:
        if key in members:
            raise ValueError(f"the key {key[:40]!r} stands twice in one object")
        members[key] = value
    return members


def dumps(topology: Topology) -> str:
    """The topology as JSON text, as :func:`save` writes it."""
    return json.dumps(to_dict(topology), indent=2, allow_nan=False) + "\n"


def save(topology: Topology, path: str | Path) -> None:
    """Write a topology to a file, whole or not at all."""
    text = dumps(topology)
    target = Path(os.path.realpath(path))  # a link stays, and the file behind it changes
    if target.exists() and not target.is_file():
        target.write_text(text, "utf-8")  # a pipe or a terminal cannot be replaced
        return
    temporary = target.with_name(f".gpuaff-{os.urandom(8).hex()}.tmp")
    try:
        with temporary.open("x", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
        temporary.replace(target)
    except OSError as error:  # name the file that was requested, not the temporary one
        error.filename, error.filename2 = str(path), None
        raise
    finally:
        temporary.unlink(missing_ok=True)
