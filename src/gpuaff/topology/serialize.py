"""Topologies as JSON: saved and loaded. ``docs/topology-json.md`` tells the schema."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from gpuaff.cpuset import CpuSet, format_cpulist, parse_cpulist
from gpuaff.errors import TopologyError
from gpuaff.notices import Notice
from gpuaff.topology.model import Accelerator, Gpu, MigInstance, NumaNode, Package, Source, Topology
from gpuaff.topology.pci import address_key

# Reading data that others wrote: a value, where it stands, and what it must be.


_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Field:
    """A value out of parsed JSON.

    Every method that reads it raises :class:`TopologyError` with the value's path when it is
    not what it must be.

    Attributes:
        source: what the whole came from, for messages.
        value: the value; a missing member is None, as null is.
        path: how to get to the value, e.g. ``gpus[2].node_cpus``; empty for the whole.
    """

    source: str
    value: Any
    path: str = ""

    def fail(self, problem: str) -> NoReturn:
        """Raise an error about this value.

        Raises:
            TopologyError: always.
        """
        problem = _cut(problem, 200)
        raise TopologyError(self.source, f"{self.path}: {problem}" if self.path else problem)

    def __getitem__(self, key: str) -> Field:
        """The member of an object; null when it is missing."""
        path = f"{self.path}.{key}" if self.path else key
        return Field(self.source, self._expect(dict, "an object").get(key), path)

    def required(self, key: str) -> Field:
        """The member of an object that must be there, though it may be null."""
        member = self[key]
        if key not in self.value:
            member.fail("is missing")
        return member

    def items(self) -> list[Field]:
        """The items of a list."""
        values = self._expect(list, "a list")
        return [Field(self.source, item, f"{self.path}[{i}]") for i, item in enumerate(values)]

    def optional(self, read: Callable[[Field], _T]) -> _T | None:
        """What ``read`` makes of this value; None when it is null or missing."""
        return None if self.value is None else read(self)

    def integer(self, lowest: int = 0, highest: int = 2**31 - 1) -> int:
        """A whole number within limits; true and 1.0 are none."""
        number: int = self._expect(int, "a whole number")
        if not lowest <= number <= highest:
            self.fail(f"expected a number from {lowest} to {highest}")
        return number

    def boolean(self) -> bool:
        """True or false."""
        if not isinstance(self.value, bool):
            self.fail(f"expected true or false, found {self._kind()}")
        return self.value

    def text(self) -> str:
        """A text that is not empty."""
        text: str = self._expect(str, "a text")
        if not text:
            self.fail("is empty; write null for what is not known")
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            self.fail("is not valid Unicode")
        return text

    def cpus(self) -> CpuSet:
        """A cpulist, e.g. ``0-3,8``; ``""`` is the empty set."""
        text = self._expect(str, "CPUs such as '0-3,8'")
        try:
            return parse_cpulist(text)
        except ValueError as error:
            self.fail(str(error))

    def some_cpus(self) -> CpuSet:
        """A cpulist that names at least one CPU."""
        cpus = self.cpus()
        if not cpus:
            self.fail("names no CPU; write null if they are not known")
        return cpus

    def _expect(self, kind: type, words: str) -> Any:
        if not isinstance(self.value, kind) or (kind is int and isinstance(self.value, bool)):
            self.fail(f"expected {words}, found {self._kind()}")
        return self.value

    def _kind(self) -> str:
        """What the value is, for messages."""
        if self.value is None:
            return "null"
        if isinstance(self.value, dict):
            return "an object"
        if isinstance(self.value, list):
            return "a list"
        if isinstance(self.value, int) and self.value.bit_length() > 64:
            return "a huge number"
        return _cut(repr(self.value), 40)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."


# From parsed JSON to a checked topology; :mod:`gpuaff.topology.serialize` is the way back.
#
# A file may be written by hand or by a later release, so nothing in it is taken on trust; but a
# member that we do not know is passed over. Required are ``schema_version``, ``cpus`` and ``gpus``.


SCHEMA_VERSION = 1
"""Grows when a reader of the version before would misunderstand the file."""

_MOST_GPUS = 256
_VENDOR = re.compile(r"[0-9a-f]{4}")
_PCI = re.compile(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])")


def from_dict(data: Any, source: str = "the topology") -> Topology:
    """Read and check a topology: what ``Topology.to_dict`` gave, or what somebody wrote.

    CPUs near a GPU that the machine does not have are left out with the note ``near-foreign``
    (case A22); every other contradiction is an error.

    Args:
        data: parsed JSON.
        source: where it came from, for messages.

    Raises:
        TopologyError: it is not a topology; the message says where the fault is.
    """
    top = Field(source, data)
    _check_version(top)
    cpus = top.required("cpus").optional(Field.some_cpus) or frozenset()
    allowed = top["allowed"].optional(lambda field: _within(field, cpus))
    told = top["notes"].optional(lambda field: [_note(item) for item in field.items()])
    foreign: list[Notice] = []
    gpus = _gpus(top.required("gpus"), cpus, foreign)
    accelerators = top["accelerators"].optional(lambda f: _accelerators(f, cpus, foreign))
    return Topology(
        cpus=cpus,
        allowed=cpus if allowed is None else allowed,
        cores=top["cores"].optional(lambda field: _cores(field, cpus)),
        efficiency_cpus=top["efficiency_cpus"].optional(lambda f: _within(f, cpus)) or frozenset(),
        packages=top["packages"].optional(lambda field: _packages(field, cpus)),
        l3=top["l3"].optional(lambda field: _groups(field, cpus)),
        numa_nodes=top["numa_nodes"].optional(lambda field: _nodes(field, cpus)),
        gpus=gpus,
        links=top["links"].optional(lambda field: _links(field, len(gpus))),
        visible=_visible(top["visible"], [gpu.index for gpu in gpus]),
        accelerators=accelerators,
        notes=(*(told or ()), *foreign),
    )


def _check_version(top: Field) -> None:
    field = top.required("schema_version")
    version = field.integer(1)
    if version > SCHEMA_VERSION:
        field.fail(
            f"{version} is of a later gpuaff, and this one reads {SCHEMA_VERSION}: upgrade gpuaff"
        )


def _within(field: Field, cpus: CpuSet) -> CpuSet:
    """CPUs that must be among the machine's, where those are known."""
    some = field.cpus()
    if cpus and not some <= cpus:
        field.fail(f"names CPUs that are not in cpus: {format_cpulist(some - cpus)}")
    return some


def _disjoint(fields: Sequence[Field], cpus: CpuSet, *, empty: bool = False) -> list[CpuSet]:
    """CPU sets of which no two share a CPU. Checked one by one, so that a bad list ends early."""
    sets: list[CpuSet] = []
    seen: set[int] = set()
    for field in fields:
        some = _within(field, cpus)
        if not some and not empty:
            field.fail("names no CPU")
        if not seen.isdisjoint(some):
            field.fail(f"names CPUs that stand before it already: {format_cpulist(some & seen)}")
        seen |= some
        sets.append(some)
    return sets


def _groups(field: Field, cpus: CpuSet) -> tuple[CpuSet, ...]:
    return tuple(sorted(_disjoint(field.items(), cpus), key=min))


def _cores(field: Field, cpus: CpuSet) -> tuple[CpuSet, ...]:
    cores = _groups(field, cpus)
    missing = cpus.difference(*cores)
    if missing:
        field.fail(f"no core holds these CPUs: {format_cpulist(missing)}")
    return cores


def _ids(items: Sequence[Field], key: str) -> list[int]:
    """The ids of a list's objects, which must ascend (so that none stands twice)."""
    ids: list[int] = []
    for item in items:
        field = item.required(key)
        number = field.integer()
        if ids and number <= ids[-1]:
            field.fail(f"{number} stands after {ids[-1]}: they must ascend, each once")
        ids.append(number)
    return ids


def _packages(field: Field, cpus: CpuSet) -> tuple[Package, ...]:
    items = field.items()
    sets = _disjoint([item.required("cpus") for item in items], cpus)
    pairs = zip(_ids(items, "id"), sets, strict=True)
    return tuple(Package(id=number, cpus=some) for number, some in pairs)


def _nodes(field: Field, cpus: CpuSet) -> tuple[NumaNode, ...]:
    items = field.items()
    sets = _disjoint([item.required("cpus") for item in items], cpus, empty=True)
    return tuple(
        NumaNode(
            id=number,
            cpus=some,
            has_memory=item["has_memory"].optional(Field.boolean),
            distances=item["distances"].optional(lambda f: _distances(f, len(items))),
        )
        for item, number, some in zip(items, _ids(items, "id"), sets, strict=True)
    )


def _distances(field: Field, count: int) -> tuple[int, ...]:
    items = field.items()
    if len(items) != count:
        field.fail(f"expected {count} distances, one to each node, found {len(items)}")
    return tuple(item.integer() for item in items)


def _gpus(field: Field, cpus: CpuSet, foreign: list[Notice]) -> tuple[Gpu, ...]:
    items = _not_too_many(field, "GPUs")
    _ids(items, "index")
    gpus = tuple(_gpu(item, cpus, foreign) for item in items)
    pairs = list(zip(items, gpus, strict=True))
    _check_unique([(item["uuid"], gpu.uuid) for item, gpu in pairs])
    _check_unique([(item["pci_bus_id"], gpu.pci_bus_id) for item, gpu in pairs])
    _check_unique([(item["mig"], one.uuid) for item, gpu in pairs for one in gpu.mig or ()])
    return gpus


def _not_too_many(field: Field, words: str) -> list[Field]:
    items = field.items()
    if len(items) > _MOST_GPUS:
        field.fail(f"{len(items)} {words} in one machine, expected at most {_MOST_GPUS}")
    return items


def _accelerators(field: Field, cpus: CpuSet, foreign: list[Notice]) -> tuple[Accelerator, ...]:
    found: list[Accelerator] = []
    for item in _not_too_many(field, "accelerators"):
        address = item.required("pci_bus_id")
        one = _accelerator(item, _pci_address(address), cpus, foreign)
        if found and address_key(one.pci_bus_id) <= address_key(found[-1].pci_bus_id):
            before = found[-1].pci_bus_id
            address.fail(f"{one.pci_bus_id} stands after {before}: they must ascend, each once")
        found.append(one)
    return tuple(found)


def _accelerator(field: Field, address: str, cpus: CpuSet, foreign: list[Notice]) -> Accelerator:
    return Accelerator(
        pci_bus_id=address,
        vendor=_vendor(field.required("vendor")),
        local_cpus=_near(field["local_cpus"], cpus, foreign),
        numa_node=field["numa_node"].optional(Field.integer),
    )


def _vendor(field: Field) -> str:
    if _VENDOR.fullmatch(field.text()) is None:
        field.fail("expected a PCI vendor such as 10de")
    return field.text()


def _check_unique(names: Sequence[tuple[Field, str | None]]) -> None:
    seen: set[str] = set()
    for field, name in names:
        if name is None:
            continue
        if name.lower() in seen:
            field.fail(f"{name!r} stands twice")
        seen.add(name.lower())


def _gpu(field: Field, cpus: CpuSet, foreign: list[Notice]) -> Gpu:
    node = _near(field["node_cpus"], cpus, foreign)
    socket = _near(field["socket_cpus"], cpus, foreign)
    source = field["source"].optional(_source)
    return Gpu(
        index=field["index"].integer(),
        uuid=field["uuid"].optional(Field.text),
        pci_bus_id=field["pci_bus_id"].optional(_pci_address),
        name=field["name"].optional(Field.text),
        node_cpus=node,
        socket_cpus=socket,
        local_cpus=_near(field["local_cpus"], cpus, foreign),
        numa_node=field["numa_node"].optional(Field.integer),
        memory_node=field["memory_node"].optional(Field.integer),
        source=source or (Source.GIVEN if node or socket else None),
        mig=field["mig"].optional(lambda f: tuple(_instance(item) for item in f.items())),
    )


def _near(field: Field, cpus: CpuSet, foreign: list[Notice]) -> CpuSet | None:
    """The CPUs near a GPU that the machine has; None when it has none of them (case A22)."""
    near = field.optional(Field.some_cpus)
    if near is None or not cpus or near <= cpus:
        return near
    outside = format_cpulist(near - cpus)
    message = (
        f"{field.path} names CPUs that the machine does not have: {outside}; they are left out"
    )
    foreign.append(Notice("near-foreign", message))
    return near & cpus or None


def _source(field: Field) -> Source:
    word = field.text()
    if word not in [str(source) for source in Source]:
        field.fail(f"expected one of {', '.join(Source)}")
    return Source(word)


def _pci_address(field: Field) -> str:
    """A PCI address as sysfs spells it; nvidia-smi's eight-digit domain is taken too."""
    match = _PCI.fullmatch(field.text())
    if match is None:
        field.fail("expected a PCI address such as 0000:07:00.0")
    return f"{int(match[1], 16):04x}:{match[2].lower()}"


def _instance(field: Field) -> MigInstance:
    return MigInstance(
        uuid=field.required("uuid").text(),
        gpu_instance=field.required("gpu_instance").integer(-1),
        compute_instance=field.required("compute_instance").integer(-1),
    )


def _links(field: Field, count: int) -> tuple[tuple[str, ...], ...]:
    rows = field.items()
    if len(rows) != count:
        field.fail(f"expected {count} rows, one for each GPU, found {len(rows)}")
    return tuple(_link_row(row, count) for row in rows)


def _link_row(field: Field, count: int) -> tuple[str, ...]:
    cells = field.items()
    if len(cells) != count:
        field.fail(f"expected {count} cells, one for each GPU, found {len(cells)}")
    return tuple(cell.text() for cell in cells)


def _visible(field: Field, indices: Sequence[int]) -> tuple[int, ...]:
    """The GPUs that CUDA shows; all of them when nothing is said."""
    items = field.optional(Field.items)
    if items is None:
        return tuple(indices)
    for item in items:
        if item.integer() not in indices:
            item.fail(f"there is no GPU {item.value}")
    return tuple(item.integer() for item in items)


def _note(field: Field) -> Notice:
    return Notice(field.required("code").text(), field.required("message").text())


# JSON as we take it from files, and as we write it: strict in, compact and readable out.


MAX_BYTES = 4 << 20
"""The longest text taken. A machine of 8192 CPUs needs less than a tenth of it."""

_WIDTH = 100


def parse_json(data: bytes | str) -> Any:
    """Read JSON (RFC 8259): UTF-8 with or without a BOM, no NaN, no key twice.

    Raises:
        ValueError: it is not that; the message is one line and says where.
    """
    if len(data) > MAX_BYTES:
        raise ValueError(f"longer than {MAX_BYTES >> 20} MiB: not a topology")
    text = _decode(data)
    if not text.strip():
        raise ValueError("empty")
    try:
        return json.loads(text, parse_constant=_refuse, object_pairs_hook=_members)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"not JSON: {error.msg} at {where}; was it cut?") from None
    except RecursionError:
        raise ValueError("not a topology: nested too deeply") from None


def _decode(data: bytes | str) -> str:
    if isinstance(data, str):
        return data.removeprefix("\N{BYTE ORDER MARK}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text (byte {error.start})") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"not JSON: {constant} is not a JSON number")


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice[:40]!r} stands twice in one object")
    return members


def format_json(value: Any) -> str:
    """Write JSON with one line for whatever fits on it, in ASCII, with a newline at the end."""
    return _layout(value, "", 0) + "\n"


def _layout(value: Any, indent: str, lead: int) -> str:
    """A value's text.

    Args:
        value: what to write.
        indent: the blanks before the line that it stands on.
        lead: how much of that line is taken already (its key).
    """
    flat = json.dumps(value, allow_nan=False)
    if len(indent) + lead + len(flat) < _WIDTH or not isinstance(value, (dict, list)):
        return flat
    inner = f"{indent}  "
    if isinstance(value, dict):
        keys = [f"{json.dumps(key)}: " for key in value]
        parts = [
            key + _layout(member, inner, len(key))
            for key, member in zip(keys, value.values(), strict=True)
        ]
    elif any(isinstance(item, (dict, list)) for item in value):
        parts = [_layout(item, inner, 0) for item in value]
    else:
        parts = _filled([json.dumps(item) for item in value], _WIDTH - len(inner) - 1)
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    body = f",\n{inner}".join(parts)
    return f"{opening}\n{inner}{body}\n{indent}{closing}"


def _filled(items: list[str], room: int) -> list[str]:
    """Put as many items on a line as fit."""
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + len(item) + 2 <= room:
            lines[-1] += f", {item}"
        else:
            lines.append(item)
    return lines


__all__ = ["SCHEMA_VERSION", "from_dict", "load", "loads", "save", "to_dict"]


def load(path: str | Path) -> Topology:
    """Read a topology from a file.

    Raises:
        TopologyError: it does not hold one.
        OSError: it cannot be read.
    """
    file = Path(path)
    if not stat.S_ISREG(file.stat().st_mode):  # opening a pipe could wait for ever
        raise TopologyError(str(path), "not a file: expected a topology that gpuaff saved")
    with file.open("rb") as stream:
        return loads(stream.read(MAX_BYTES + 1), str(path))


def loads(data: bytes | str, source: str = "the topology") -> Topology:
    """Read a topology from JSON text.

    Args:
        data: the text.
        source: where it came from, for messages.

    Raises:
        TopologyError: it is not one.
    """
    try:
        parsed = parse_json(data)
    except ValueError as error:
        raise TopologyError(source, str(error)) from None
    return from_dict(parsed, source)


def save(topology: Topology, path: str | Path) -> None:
    """Write a topology to a file, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    text = format_json(to_dict(topology))
    target = Path(os.path.realpath(path))  # behind a link it is the file that changes
    if target.exists() and not target.is_file():
        target.write_text(text, "utf-8")  # a pipe or a terminal cannot be replaced
        return
    temporary = target.with_name(f".gpuaff-{os.urandom(8).hex()}.tmp")
    try:
        with temporary.open("x", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
        temporary.replace(target)
    except OSError as error:  # about the file that was asked for, not the temporary one
        error.filename, error.filename2 = str(path), None
        raise
    finally:
        temporary.unlink(missing_ok=True)


def to_dict(topology: Topology) -> dict[str, Any]:
    """The topology as JSON has it. Every member is there; null is what is not known."""
    cpus_known = bool(topology.cpus)
    return {
        "schema_version": SCHEMA_VERSION,
        "cpus": _cpulist(topology.cpus or None),
        "allowed": _cpulist(topology.allowed if cpus_known else topology.allowed or None),
        "cores": _cpulists(topology.cores),
        "efficiency_cpus": format_cpulist(topology.efficiency_cpus),
        "packages": _each(
            topology.packages, lambda one: {"id": one.id, "cpus": _cpulist(one.cpus)}
        ),
        "l3": _cpulists(topology.l3),
        "numa_nodes": _each(topology.numa_nodes, _node_to_dict),
        "gpus": [_gpu_to_dict(gpu) for gpu in topology.gpus],
        "links": _each(topology.links, list),
        "visible": list(topology.visible),
        "accelerators": _each(topology.accelerators, _accelerator_to_dict),
        "notes": [note.to_dict() for note in topology.notes],
    }


def _node_to_dict(node: NumaNode) -> dict[str, Any]:
    return {
        "id": node.id,
        "cpus": format_cpulist(node.cpus),
        "has_memory": node.has_memory,
        "distances": None if node.distances is None else list(node.distances),
    }


def _gpu_to_dict(gpu: Gpu) -> dict[str, Any]:
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "pci_bus_id": gpu.pci_bus_id,
        "name": gpu.name,
        "node_cpus": _cpulist(gpu.node_cpus),
        "socket_cpus": _cpulist(gpu.socket_cpus),
        "local_cpus": _cpulist(gpu.local_cpus),
        "numa_node": gpu.numa_node,
        "memory_node": gpu.memory_node,
        "source": None if gpu.source is None else str(gpu.source),
        "mig": _each(gpu.mig, _instance_to_dict),
    }


def _instance_to_dict(instance: MigInstance) -> dict[str, Any]:
    return {
        "uuid": instance.uuid,
        "gpu_instance": instance.gpu_instance,
        "compute_instance": instance.compute_instance,
    }


def _accelerator_to_dict(accelerator: Accelerator) -> dict[str, Any]:
    return {
        "pci_bus_id": accelerator.pci_bus_id,
        "vendor": accelerator.vendor,
        "local_cpus": _cpulist(accelerator.local_cpus),
        "numa_node": accelerator.numa_node,
    }


def _cpulist(cpus: CpuSet | None) -> str | None:
    return None if cpus is None else format_cpulist(cpus)


def _cpulists(groups: Sequence[CpuSet] | None) -> list[str] | None:
    return None if groups is None else [format_cpulist(group) for group in groups]


def _each(items: Sequence[Any] | None, write: Callable[[Any], Any]) -> list[Any] | None:
    return None if items is None else [write(item) for item in items]
