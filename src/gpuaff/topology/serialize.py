"""Topologies as JSON: saved, loaded and shipped; ``docs/topology-json.md`` has the schema.

A file may be written by hand or by a later release, so every member is checked by the types of the
records in :mod:`gpuaff.topology.model`; one without a default is required, unknown ones are
ignored. ``docs/machines.md`` says where the figures of the machines that ship are from.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sized
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import cache
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from gpuaff._system.nvml_records import pci_address
from gpuaff.cpuset import CpuSet, format_cpulist, parse_cpulist
from gpuaff.errors import TopologyError
from gpuaff.formatting import one_line
from gpuaff.notices import Notice
from gpuaff.options import suggestion
from gpuaff.topology.model import Gpu, Source, Topology
from gpuaff.topology.sysfs import address_key

SCHEMA_VERSION = 1
"""Grows when a reader of the version before would misunderstand the file."""

MAX_BYTES = 4 << 20
"""The longest text accepted. A machine of 8192 CPUs needs less than a tenth of it."""

_MAY_BE_EMPTY = ("allowed", "efficiency_cpus", "numa_nodes.cpus")
_NEAR = ("node_cpus", "socket_cpus", "local_cpus")
_ORDERED = ("packages", "numa_nodes", "gpus", "accelerators")

_PCI = r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]"
_PATTERNS = {
    "pci_bus_id": (_PCI, "a PCI address such as 0000:07:00.0"),
    "vendor": ("[0-9a-f]{4}", "a PCI vendor such as 10de"),
    "source": ("|".join(Source), f"one of {', '.join(Source)}"),
}
_KINDS = {
    dict: "an object",
    list: "a list",
    int: "a whole number",
    str: "a text",
    bool: "true or false",
    float: "a number",
    type(None): "null",
}


class _Reader:
    """Checks parsed JSON and converts it to records, by the types of their members.

    A member is called by its path, e.g. ``gpus[2].node_cpus``; the family of a path is that of all
    members like it, ``gpus.node_cpus``.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._cpus: CpuSet = frozenset()  # the machine's; empty when unknown
        self._used: dict[str, set[int | str]] = defaultdict(set)  # what a family's members hold
        self.notes: list[Notice] = []  # what was left out

    def fail(self, path: str, problem: str) -> NoReturn:
        where = f"{path}: " if path else ""
        raise TopologyError(self._source, where + one_line(problem, 200, end="..."))

    def expect(self, kind: type, value: Any, path: str) -> Any:
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            found = _KINDS.get(type(value), type(value).__name__)
            self.fail(path, f"expected {_KINDS[kind]}, found {found}")
        return value

    def read(self, kind: Any, value: Any, path: str) -> Any:
        """A value of a type that members of records have."""
        family = re.sub(r"\[\d+\]", "", path)
        if get_origin(kind) is tuple:
            return self._items(get_args(kind)[0], self.expect(list, value, path), path)
        if kind == CpuSet:
            return self._cpu_set(self.expect(str, value, path), path, family)
        if is_dataclass(kind):
            return self._record(kind, self.expect(dict, value, path), path)
        if kind is bool:
            return self.expect(bool, value, path)
        if kind is not int:
            return kind(self._text(self.expect(str, value, path), path, family))
        lowest = -1 if path.endswith("_instance") else 0
        if not lowest <= self.expect(int, value, path) < 2**31:
            self.fail(path, f"expected a number from {lowest} to {2**31 - 1}")
        return value

    def _record(self, kind: Any, value: dict[str, Any], path: str) -> Any:
        """A record; null stands for a member's default."""
        found = {}
        for one in fields(kind):
            own = f"{path}.{one.name}" if path else one.name
            if value.get(one.name) is not None or one.default is MISSING:
                if one.name not in value:
                    self.fail(own, "is missing")
                found[one.name] = self.read(_types(kind)[one.name], value[one.name], own)
        if kind is Gpu and (found.get("node_cpus") or found.get("socket_cpus")):
            found.setdefault("source", Source.GIVEN)
        return kind(**found)

    def _items(self, kind: Any, values: list[Any], path: str) -> tuple[Any, ...]:
        found = [self.read(kind, value, f"{path}[{i}]") for i, value in enumerate(values)]
        if path in _ORDERED:
            name = fields(kind)[0].name
            keys = [getattr(record, name) for record in found]
            keys = [address_key(key) if isinstance(key, str) else key for key in keys]
            for i, (before, own) in enumerate(pairwise(keys), 1):
                if own <= before:
                    self.fail(f"{path}[{i}].{name}", "must ascend from item to item, each once")
        return tuple(sorted(found, key=min) if kind == CpuSet else found)

    def _cpu_set(self, text: str, path: str, family: str) -> CpuSet | None:
        """CPUs near a device; or CPUs of the machine that no other of these members has."""
        try:
            cpus = parse_cpulist(text)
        except ValueError as error:
            self.fail(path, str(error))
        if not cpus and family not in _MAY_BE_EMPTY:
            self.fail(path, "names no CPU; write null if they are not known")
        if path == "cpus":
            self._cpus = cpus
        outside = cpus - self._cpus if self._cpus else frozenset()
        if family.endswith(_NEAR):
            if outside:
                message = f"{path} names CPUs that the machine does not have"
                message = f"{message}: {format_cpulist(outside)}; they are left out"
                self.notes.append(Notice("near-foreign", message))
            return cpus - outside or None
        if outside:
            self.fail(path, f"names CPUs that are not in cpus: {format_cpulist(outside)}")
        if twice := cpus & self._used[family]:
            self.fail(path, f"names CPUs that stand before it already: {format_cpulist(twice)}")
        self._used[family] |= cpus
        return cpus

    def _text(self, text: str, path: str, family: str) -> str:
        if not text or any("\ud800" <= letter <= "\udfff" for letter in text):
            self.fail(path, "is not valid Unicode" if text else "is empty; write null for unknown")
        name = family.rpartition(".")[2]
        pattern, expected = _PATTERNS.get(name, (".*", ""))
        if not re.fullmatch(pattern, text, re.DOTALL):
            self.fail(path, f"expected {expected}")
        if name == "pci_bus_id":  # nvidia-smi's domain of eight digits is accepted
            text = pci_address(text) or text
        if name in ("uuid", "pci_bus_id"):
            if text.lower() in self._used[family]:
                self.fail(path, f"{text!r} stands twice")
            self._used[family].add(text.lower())
        return text

    def check_sizes(self, topology: Topology) -> None:
        """What members must have of each other."""
        gpus, nodes, links = len(topology.gpus), topology.numa_nodes or (), topology.links
        for i, node in enumerate(nodes):
            self._expect_length(f"numa_nodes[{i}].distances", node.distances, len(nodes), "node")
        self._expect_length("links", links, gpus, "GPU")
        for i, row in enumerate(links or ()):
            self._expect_length(f"links[{i}]", row, gpus, "GPU")
        if topology.cores and (missing := topology.cpus.difference(*topology.cores)):
            self.fail("cores", f"no core holds these CPUs: {format_cpulist(missing)}")
        for i, index in enumerate(topology.visible):
            if index not in topology.gpu_by_index:
                self.fail(f"visible[{i}]", f"there is no GPU {index}")

    def _expect_length(self, path: str, values: Sized | None, count: int, noun: str) -> None:
        if values is not None and len(values) != count:
            self.fail(path, f"expected {count} items, one for each {noun}, found {len(values)}")


@cache
def _types(record: type[Any]) -> dict[str, Any]:
    """The type of each member of a record, without ``None``."""
    kinds = get_type_hints(record)
    may_be_none = {name for name, kind in kinds.items() if type(None) in get_args(kind)}
    return {n: get_args(kind)[0] if n in may_be_none else kind for n, kind in kinds.items()}


def from_dict(data: Any, source: str = "the topology") -> Topology:
    """Check and convert a topology, as :meth:`gpuaff.Topology.from_dict` does.

    CPUs near a GPU that the machine lacks are noted (case A22); else a contradiction is an error.
    """
    reader = _Reader(source)
    reader.expect(dict, data, "")
    for name in ("schema_version", "cpus", "gpus"):
        if name not in data:
            reader.fail(name, "is missing")
    version = reader.read(int, data["schema_version"], "schema_version")
    if version != SCHEMA_VERSION:
        reader.fail("schema_version", f"is {version}, this gpuaff reads {SCHEMA_VERSION}: upgrade")
    reader.expect(list, data["gpus"], "gpus")
    found: Topology = reader.read(Topology, data, "")
    reader.check_sizes(found)
    return replace(
        found,
        allowed=found.cpus if data.get("allowed") is None else found.allowed,
        visible=tuple(found.gpu_by_index) if data.get("visible") is None else found.visible,
        notes=(*found.notes, *reader.notes),
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
    with Path(path).open("rb") as stream:
        return loads(stream.read(MAX_BYTES + 1), str(path))


def loads(data: bytes | str, source: str = "the topology") -> Topology:
    """A topology from JSON text (RFC 8259), with or without a BOM; errors name ``source``."""
    if len(data) > MAX_BYTES:
        raise TopologyError(source, f"longer than {MAX_BYTES >> 20} MiB: not a topology")
    try:
        parsed = json.loads(data.removeprefix("\ufeff") if isinstance(data, str) else data)
    except (ValueError, RecursionError) as error:  # no text, no JSON, nested too deeply
        raise TopologyError(source, f"not JSON: {error}") from None
    return from_dict(parsed, source)


def dumps(topology: Topology) -> str:
    """The topology as JSON text, as :func:`save` writes it."""
    return json.dumps(to_dict(topology), indent=2, allow_nan=False) + "\n"


def save(topology: Topology, path: str | Path) -> None:
    """Write a topology to a file."""
    Path(path).write_text(dumps(topology), "utf-8")
