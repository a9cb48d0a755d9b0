"""Topologies as JSON: saved and loaded. ``docs/topology-json.md`` tells the schema."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.errors import TopologyError
from gpuaff.topology import jsontext
from gpuaff.topology.decode import SCHEMA_VERSION, from_dict
from gpuaff.topology.model import Accelerator, Gpu, MigInstance, NumaNode, Topology

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
        return loads(stream.read(jsontext.MAX_BYTES + 1), str(path))


def loads(data: bytes | str, source: str = "the topology") -> Topology:
    """Read a topology from JSON text.

    Args:
        data: the text.
        source: where it came from, for messages.

    Raises:
        TopologyError: it is not one.
    """
    try:
        parsed = jsontext.loads(data)
    except ValueError as error:
        raise TopologyError(source, str(error)) from None
    return from_dict(parsed, source)


def save(topology: Topology, path: str | Path) -> None:
    """Write a topology to a file, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    text = jsontext.dumps(to_dict(topology))
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
