"""How the GPUs of this machine are connected: as much of a topology as a choice needs.

The CPUs and masks that planning needs are not read: that would take longer than the claim.
"""

from __future__ import annotations

from gpuaff.system.kernel import Tree
from gpuaff.topology.model import Gpu, Topology
from gpuaff.topology.pci import DEVICES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuaff.system.nvml_usage import UsageSession


def observe_connections(session: UsageSession) -> Topology:
    """The GPUs, their NUMA nodes by sysfs, and the links between them by the driver."""
    indices, links = session.links()
    addresses = {device.index: device.pci_bus_id for device in session.devices()}
    tree = Tree()
    return Topology(
        gpus=tuple(
            Gpu(
                index=index,
                pci_bus_id=addresses[index],
                numa_node=_numa_node(tree, addresses[index]),
            )
            for index in indices
        ),
        links=links,
    )


def _numa_node(tree: Tree, address: str | None) -> int | None:
    text = tree.read(f"{DEVICES}/{address}/numa_node") if address else None
    return int(text) if text is not None and text.isdecimal() else None  # -1: not told
