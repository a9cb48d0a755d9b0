"""Observe: what a machine has, as one immutable value, :class:`gpuaff.Topology`.

The records in :mod:`gpuaff.topology.model` import none of the modules that make them, so the
methods that need those are added to ``Topology`` here; most load theirs when called.
"""

from __future__ import annotations

from collections.abc import Collection

from gpuaff.topology.model import Topology
from gpuaff.topology.visible import resolve

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any


class Methods:
    """What :class:`gpuaff.Topology` can do besides holding data."""

    def with_visible_devices(
        self: Any, text: str | None, *, device_order: str | None = None, lost: Collection[int] = ()
    ) -> Topology:
        """The same machine for a process with this CUDA_VISIBLE_DEVICES, as the driver reads it.

        Args:
            text: the variable's value, None when it is unset.
            device_order: CUDA_DEVICE_ORDER's value, None when it is unset.
            lost: the indices of the GPUs that do not respond.
        """
        here: Topology = self
        seen = resolve(here.gpus, text, device_order=device_order, lost=lost)
        kept = tuple(note for note in here.notes if not note.code.startswith("visible-"))
        return here._replace(visible=seen.indices, notes=kept + seen.notes)

    @classmethod
    def observe(cls, *, links: bool = True) -> Topology:
        """Observe the machine that this process runs on.

        What cannot be read is None, and ``notes`` say why.

        Args:
            links: also ask NVML how the GPUs are connected (tens of milliseconds on large
                machines; planning does not need it).
        """
        from gpuaff.topology.live import observe

        return observe(links=links, accelerators=True)

    @classmethod
    def load(cls, path: str | Path) -> Topology:
        """Load a topology that :meth:`save` wrote.

        Raises:
            TopologyError: the file holds no topology, or one of a later version.
            OSError: the file cannot be read.
        """
        from gpuaff.topology.serialize import load

        return load(path)

    @classmethod
    def parse(cls, text: str) -> Topology:
        """Parse pasted output of ``nvidia-smi topo -m``, ``nvidia-smi -L``, ``lscpu`` and others.

        ``lscpu -p``, ``lscpu -e`` and ``numactl -H`` count too, in any mix and order.

        Raises:
            TopologyError: the text describes neither CPUs nor NVIDIA GPUs.
        """
        from gpuaff.topology.pasted import parse

        return parse(text)

    @classmethod
    def named(cls, name: str) -> Topology:
        """A machine that ships with the package, e.g. ``dgx-a100``.

        Raises:
            TopologyError: there is none of that name; the message lists the names.
        """
        from gpuaff.topology.serialize import named

        return named(name)

    @classmethod
    def from_dict(cls, data: Any) -> Topology:
        """The topology that :meth:`to_dict` wrote as ``data``.

        Raises:
            TopologyError: ``data`` is no topology; the message says where.
        """
        from gpuaff.topology.serialize import from_dict

        return from_dict(data)

    def to_dict(self: Any) -> dict[str, Any]:
        """The topology as parsed JSON; ``docs/topology-json.md`` has the schema."""
        from gpuaff.topology.serialize import to_dict

        return to_dict(self)

    def save(self: Any, path: str | Path) -> None:
        """Write the topology as JSON.

        Raises:
            OSError: the file cannot be written.
        """
        from gpuaff.topology.serialize import save

        save(self, path)


for _name, _method in vars(Methods).items():
    if not _name.startswith("_"):
        setattr(Topology, _name, _method)
