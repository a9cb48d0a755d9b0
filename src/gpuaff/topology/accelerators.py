"""The accelerators of a machine, from sysfs alone: the claimants of ``partition="machine"``.

Strangers on one machine must list the same devices, so nothing counts here but what every process
sees: a PCI device's class, its vendor and its address. Which driver has the device (one that hands
it to a virtual machine, or none) does not matter, nor does who may open it.

Devices that count have one of the classes ``CLASSES`` and are of one of the ``VENDORS``.
Left out are

- NVSwitches (bridges, class 0680) and the audio functions of graphics cards (0403), by their class;
- the display chips of management controllers (ASPEED, Matrox), by their vendor;
- virtual functions (SR-IOV): they share the place, and the border, of their physical function;
- what is part of an Intel processor, as it would take cores from real GPUs: its graphics, always
  at 0000:00:02.0, and its NPU, a processing accelerator on bus 00.

AMD's processors with graphics (APUs) cannot be told from cards: they count. So do a card that only
drives a screen, and FPGAs that call themselves processing accelerators.
"""

from __future__ import annotations

from gpuaff.system.kernel import Tree
from gpuaff.topology.model import Accelerator
from gpuaff.topology.pci import DEVICES, in_order, place
from gpuaff.topology.sysfs import Cpus

CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")
"""VGA controller, 3D controller, other display controller, processing accelerator (PCI Code and ID
Assignment)."""

VENDORS = ("0x10de", "0x1002", "0x8086")
"""NVIDIA, AMD, Intel."""

_INTEL_GRAPHICS = "0000:00:02.0"


def on_the_bus(tree: Tree, machine: Cpus) -> tuple[Accelerator, ...]:
    """Every accelerator of the machine, by address; empty where there is no PCI bus to be seen."""
    # A machine has hundreds of PCI devices: one file each, until it looks like an accelerator.
    vendors = {name: _vendor(tree, name) for name in tree.list(DEVICES)}
    found = in_order(name for name, vendor in vendors.items() if vendor)
    return tuple(_accelerator(tree, machine, name, vendors[name] or "") for name in found)


def _vendor(tree: Tree, address: str) -> str | None:
    """The vendor of a device that counts, as sysfs has it; None for any other."""
    kind = tree.read(f"{DEVICES}/{address}/class") or ""
    if not kind.startswith(CLASSES):
        return None
    vendor = tree.read(f"{DEVICES}/{address}/vendor")
    if vendor not in VENDORS or (vendor == "0x8086" and _is_in_processor(address, kind)):
        return None
    # A link, in a copy of the tree mostly a broken one: that its name is there is enough.
    return None if "physfn" in tree.list(f"{DEVICES}/{address}") else vendor


def _is_in_processor(address: str, kind: str) -> bool:
    """Whether an Intel device is its processor's graphics or NPU."""
    on_bus_0 = address.startswith("0000:00:")
    return address == _INTEL_GRAPHICS or (on_bus_0 and kind.startswith("0x1200"))


def _accelerator(tree: Tree, machine: Cpus, address: str, vendor: str) -> Accelerator:
    spot = place(tree, address, machine)
    return Accelerator(
        pci_bus_id=address,
        vendor=vendor.removeprefix("0x"),
        local_cpus=spot.local_cpus,
        numa_node=spot.numa_node,
    )
