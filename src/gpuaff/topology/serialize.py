"""Topologies as JSON: saved and loaded; ``docs/topology-json.md`` has the schema.

A file may be written by hand or by a later release, so every member is checked; unknown members
are ignored. Required are ``schema_version``, ``cpus`` and ``gpus``.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from gpuaff.cpuset import CpuSet, format_cpulist, parse_cpulist
from gpuaff.errors import TopologyError
from gpuaff.notices import Notice
from gpuaff.topology.model import Accelerator, Gpu, MigInstance, NumaNode, Package, Source, Topology
from gpuaff.topology.pci import address_key

SCHEMA_VERSION = 1
"""Grows when a reader of the version before would misunderstand the file."""

MAX_BYTES = 4 << 20
"""The longest text accepted. A machine of 8192 CPUs needs less than a tenth of it."""

_MOST_GPUS = 256
_VENDOR = re.compile(r"[0-9a-f]{4}")
_PCI = re.compile(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])")

_T = TypeVar("_T")


@dataclass(slots=True)
class _Document:
    """What the checks of a member need of the whole: its name, its CPUs, the notes so far."""

    source: str
    cpus: CpuSet = frozenset()
    notes: list[Notice] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Member:
    """A value in parsed JSON and its path, e.g. ``gpus[2].node_cpus``; a missing one is None.

    Each method that returns the value raises :class:`TopologyError` when it is not valid.
    """

    document: _Document
    value: Any
    path: str = ""

    def fail(self, problem: str) -> NoReturn:
        problem = _shortened(problem, 200)
        where = f"{self.path}: " if self.path else ""
        raise TopologyError(self.document.source, where + problem)

    def __getitem__(self, key: str) -> _Member:
        path = f"{self.path}.{key}" if self.path else key
        return _Member(self.document, self._expect(dict, "an object").get(key), path)

    def required(self, key: str) -> _Member:
        member = self[key]
        if key not in self.value:
            member.fail("is missing")
        return member

    def optional(self, convert: Callable[[_Member], _T]) -> _T | None:
        return None if self.value is None else convert(self)

    def items(self, most: int | None = None) -> list[_Member]:
        values = self._expect(list, "a list")
        if most is not None and len(values) > most:
            self.fail(f"{len(values)} {_UNITS[self.path]} in one machine, expected at most {most}")
        return [_Member(self.document, v, f"{self.path}[{i}]") for i, v in enumerate(values)]

    def rows(self, count: int, unit: str) -> list[_Member]:
        items = self.items()
        if len(items) != count:
            self.fail(f"expected {count} {unit}, found {len(items)}")
        return items

    def integer(self, lowest: int = 0, highest: int = 2**31 - 1) -> int:
        number: int = self._expect(int, "a whole number")
        if not lowest <= number <= highest:
            self.fail(f"expected a number from {lowest} to {highest}")
        return number

    def boolean(self) -> bool:
        return bool(self._expect(bool, "true or false"))

    def text(self) -> str:
        text: str = self._expect(str, "a text")
        if not text:
            self.fail("is empty; write null for what is not known")
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            self.fail("is not valid Unicode")
        return text

    def cpus(self) -> CpuSet:
        text = self._expect(str, "CPUs such as '0-3,8'")
        try:
            return parse_cpulist(text)
        except ValueError as error:
            self.fail(str(error))

    def some_cpus(self) -> CpuSet:
        return self.cpus() or self.fail("names no CPU; write null if they are not known")

    def own_cpus(self) -> CpuSet:
        """CPUs that must be among the machine's, where those are known."""
        cpus, machine = self.cpus(), self.document.cpus
        if machine and not cpus <= machine:
            self.fail(f"names CPUs that are not in cpus: {format_cpulist(cpus - machine)}")
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

    def source(self) -> Source:
        if self.text() not in [str(source) for source in Source]:
            self.fail(f"expected one of {', '.join(Source)}")
        return Source(self.value)

    def pci_address(self) -> str:
        """A PCI address as sysfs spells it; nvidia-smi's domain of eight digits is accepted."""
        match = _PCI.fullmatch(self.text())
        if match is None:
            self.fail("expected a PCI address such as 0000:07:00.0")
        return f"{int(match[1], 16):04x}:{match[2].lower()}"

    def vendor(self) -> str:
        if _VENDOR.fullmatch(self.text()) is None:
            self.fail("expected a PCI vendor such as 10de")
        return self.text()

    def record(self, make: Callable[..., _T], needed: _Converters, others: _Converters) -> _T:
        """A record of members: those that must be there, and those that may be left out."""
        found = {name: convert(self.required(name)) for name, convert in needed.items()}
        return make(**found, **{name: self[name].optional(do) for name, do in others.items()})

    def _expect(self, kind: type, words: str) -> Any:
        if not isinstance(self.value, kind) or (kind is int and isinstance(self.value, bool)):
            self.fail(f"expected {words}, found {self._description()}")
        return self.value

    def _description(self) -> str:
        if isinstance(self.value, int) and self.value.bit_length() > 64:
            return "a huge number"
        names = {type(None): "null", dict: "an object", list: "a list"}
        return names.get(type(self.value)) or _shortened(repr(self.value), 40)


_Converters = Mapping[str, Callable[[_Member], Any]]

_UNITS = {"gpus": "GPUs", "accelerators": "accelerators"}
_MIG: _Converters = {
    "uuid": _Member.text,
    "gpu_instance": lambda member: member.integer(-1),
    "compute_instance": lambda member: member.integer(-1),
}
_GPU: _Converters = {
    "uuid": _Member.text,
    "pci_bus_id": _Member.pci_address,
    "name": _Member.text,
    "node_cpus": _Member.near_cpus,
    "socket_cpus": _Member.near_cpus,
    "local_cpus": _Member.near_cpus,
    "numa_node": _Member.integer,
    "memory_node": _Member.integer,
    "source": _Member.source,
    "mig": lambda member: tuple(item.record(MigInstance, _MIG, {}) for item in member.items()),
}
_ACCELERATOR: _Converters = {"local_cpus": _Member.near_cpus, "numa_node": _Member.integer}


def from_dict(data: Any, source: str = "the topology") -> Topology:
    """Check and convert a topology: what ``Topology.to_dict`` wrote, or a user.

    CPUs near a GPU that the machine does not have are left out with the note ``near-foreign``
    (case A22); every other contradiction is an error.

    Args:
        data: parsed JSON.
        source: where it came from, for messages.

    Raises:
        TopologyError: it is not a topology; the message names the member.
    """
    document = _Document(source)
    top = _Member(document, data)
    _check_version(top.required("schema_version"))
    cpus = document.cpus = top.required("cpus").optional(_Member.some_cpus) or frozenset()
    allowed = top["allowed"].optional(_Member.own_cpus)
    document.notes += top["notes"].optional(_notes) or ()
    gpus = _gpus(top.required("gpus"))
    return Topology(
        cpus=cpus,
        allowed=cpus if allowed is None else allowed,
        cores=top["cores"].optional(_cores),
        efficiency_cpus=top["efficiency_cpus"].optional(_Member.own_cpus) or frozenset(),
        packages=top["packages"].optional(_packages),
        l3=top["l3"].optional(_groups),
        numa_nodes=top["numa_nodes"].optional(_numa_nodes),
        gpus=gpus,
        links=top["links"].optional(lambda member: _links(member, len(gpus))),
        visible=_visible(top["visible"], [gpu.index for gpu in gpus]),
        accelerators=top["accelerators"].optional(_accelerators),
        notes=tuple(document.notes),
    )


def _check_version(member: _Member) -> None:
    version = member.integer(1)
    if version > SCHEMA_VERSION:
        member.fail(
            f"{version} is of a later gpuaff, and this one reads {SCHEMA_VERSION}: upgrade gpuaff"
        )


def _notes(member: _Member) -> list[Notice]:
    needed = {"code": _Member.text, "message": _Member.text}
    return [item.record(Notice, needed, {}) for item in member.items()]


def _disjoint(members: Iterable[_Member], *, empty: bool = False) -> list[CpuSet]:
    """CPU sets of which no two share a CPU. Checked one by one, so that a bad list ends early."""
    sets: list[CpuSet] = []
    seen: set[int] = set()
    for member in members:
        cpus = member.own_cpus()
        if not cpus and not empty:
            member.fail("names no CPU")
        if not seen.isdisjoint(cpus):
            member.fail(f"names CPUs that stand before it already: {format_cpulist(cpus & seen)}")
        seen |= cpus
        sets.append(cpus)
    return sets


def _groups(member: _Member) -> tuple[CpuSet, ...]:
    return tuple(sorted(_disjoint(member.items()), key=min))


def _cores(member: _Member) -> tuple[CpuSet, ...]:
    cores = _groups(member)
    if missing := member.document.cpus.difference(*cores):
        member.fail(f"no core holds these CPUs: {format_cpulist(missing)}")
    return cores


def _check_ascending(
    members: Sequence[_Member], values: Sequence[Any], keys: Sequence[Any]
) -> None:
    for place in range(1, len(members)):
        if keys[place] <= keys[place - 1]:
            problem = f"{values[place]} stands after {values[place - 1]}"
            members[place].fail(f"{problem}: they must ascend, each once")


def _check_ids(items: Sequence[_Member], key: str) -> None:
    members = [item.required(key) for item in items]
    ids = [member.integer() for member in members]
    _check_ascending(members, ids, ids)


def _packages(member: _Member) -> tuple[Package, ...]:
    items = member.items()
    _disjoint(item.required("cpus") for item in items)
    _check_ids(items, "id")
    needed: _Converters = {"id": _Member.integer, "cpus": _Member.cpus}
    return tuple(item.record(Package, needed, {}) for item in items)


def _numa_nodes(member: _Member) -> tuple[NumaNode, ...]:
    items = member.items()
    _disjoint((item.required("cpus") for item in items), empty=True)
    _check_ids(items, "id")

    def distances(row: _Member) -> tuple[int, ...]:
        cells = row.rows(len(items), "distances, one to each node")
        return tuple(cell.integer() for cell in cells)

    needed: _Converters = {"id": _Member.integer, "cpus": _Member.cpus}
    others: _Converters = {"has_memory": _Member.boolean, "distances": distances}
    return tuple(item.record(NumaNode, needed, others) for item in items)


def _gpus(member: _Member) -> tuple[Gpu, ...]:
    items = member.items(_MOST_GPUS)
    _check_ids(items, "index")
    gpus = tuple(item.record(_gpu, {"index": _Member.integer}, _GPU) for item in items)
    pairs = list(zip(items, gpus, strict=True))
    _check_unique((item["uuid"], gpu.uuid) for item, gpu in pairs)
    _check_unique((item["pci_bus_id"], gpu.pci_bus_id) for item, gpu in pairs)
    _check_unique((item["mig"], one.uuid) for item, gpu in pairs for one in gpu.mig or ())
    return gpus


def _gpu(source: Source | None, **members: Any) -> Gpu:
    known = members["node_cpus"] or members["socket_cpus"]
    return Gpu(source=source or (Source.GIVEN if known else None), **members)


def _check_unique(names: Iterable[tuple[_Member, str | None]]) -> None:
    seen: set[str] = set()
    for member, name in names:
        if name is not None and name.lower() in seen:
            member.fail(f"{name!r} stands twice")
        seen |= {name.lower()} if name else set()


def _accelerators(member: _Member) -> tuple[Accelerator, ...]:
    needed: _Converters = {"pci_bus_id": _Member.pci_address, "vendor": _Member.vendor}
    items = member.items(_MOST_GPUS)
    found = tuple(item.record(Accelerator, needed, _ACCELERATOR) for item in items)
    addresses = [one.pci_bus_id for one in found]
    members = [item["pci_bus_id"] for item in items]
    _check_ascending(members, addresses, [address_key(address) for address in addresses])
    return found


def _links(member: _Member, count: int) -> tuple[tuple[str, ...], ...]:
    rows = member.rows(count, "rows, one for each GPU")
    return tuple(
        tuple(cell.text() for cell in row.rows(count, "cells, one for each GPU")) for row in rows
    )


def _visible(member: _Member, indices: Sequence[int]) -> tuple[int, ...]:
    """The GPUs that CUDA shows; all of them when the member is missing."""
    items = member.optional(_Member.items)
    for item in items or ():
        if item.integer() not in indices:
            item.fail(f"there is no GPU {item.value}")
    return tuple(indices) if items is None else tuple(item.integer() for item in items)


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


def load(path: str | Path) -> Topology:
    """Load a topology from a file.

    Raises:
        TopologyError: it holds none.
        OSError: it cannot be read.
    """
    file = Path(path)
    if not stat.S_ISREG(file.stat().st_mode):  # opening a pipe could wait for ever
        raise TopologyError(str(path), "not a file: expected a topology that gpuaff saved")
    with file.open("rb") as stream:
        return loads(stream.read(MAX_BYTES + 1), str(path))


def loads(data: bytes | str, source: str = "the topology") -> Topology:
    """A topology from JSON text; ``source`` is where it came from, for messages.

    Raises:
        TopologyError: the text is no topology.
    """
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
    members = dict(pairs)
    if len(members) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice[:40]!r} stands twice in one object")
    return members


def dumps(topology: Topology) -> str:
    """The topology as JSON text, as :func:`save` writes it."""
    return json.dumps(to_dict(topology), indent=2, allow_nan=False) + "\n"


def save(topology: Topology, path: str | Path) -> None:
    """Write a topology to a file, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
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


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."
