"""From parsed JSON to a checked topology; :mod:`gpuaff.topology.snapshot` is the way back.

A file may be written by hand or by a later release, so nothing in it is taken on trust; but a
member that we do not know is passed over. Required are ``schema_version``, ``cpus`` and ``gpus``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.notices import Notice
from gpuaff.topology.fields import Field
from gpuaff.topology.model import (
    Accelerator,
    Gpu,
    MigInstance,
    NumaNode,
    Package,
    Source,
    Topology,
)
from gpuaff.topology.pci import address_key

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
