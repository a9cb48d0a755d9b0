"""The PCI side of a machine, from /sys: where a GPU sits, without asking its driver.

Sources: ``Documentation/ABI/testing/sysfs-bus-pci`` (``numa_node``, ``local_cpulist``); the
NVIDIA driver's ``/proc/driver/nvidia/gpus/<address>/information`` and, where a GPU's memory is a
NUMA node, ``numa_status``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from gpuaff._system.kernel import Tree
from gpuaff.cpuset import CpuSet
from gpuaff.topology.model import Accelerator, Gpu, Source
from gpuaff.topology.sysfs import Cpus, cpu_list, cpu_mask

DEVICES = "sys/bus/pci/devices"
"""The folder that has an entry for each PCI device, by its address."""

_DRIVER = "proc/driver/nvidia/gpus"
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.IGNORECASE | re.ASCII)
_NVIDIA = "0x10de"
_GPU_CLASSES = ("0x0300", "0x0302")
"""VGA controller and 3D controller (PCI Code and ID Assignment, base class 03h); NVSwitches are
bridges (0x0680)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a PCI device sits.

    Attributes:
        local_cpus: the CPUs next to it; None when the machine does not tell.
        numa_node: its NUMA node; None when the machine does not tell (−1 in sysfs).
    """

    local_cpus: CpuSet | None
    numa_node: int | None


NOWHERE = Place(local_cpus=None, numa_node=None)
"""Of a device whose address is unknown."""


def place(tree: Tree, address: str, machine: Cpus) -> Place:
    """Where the device at a PCI address (``0000:07:00.0``) sits."""
    device = f"{DEVICES}/{address}"
    node = tree.read(f"{device}/numa_node")
    known = node is not None and node.isdecimal()  # −1: the firmware says nothing (cases A7, F6)
    local = cpu_list(tree, f"{device}/local_cpulist") or cpu_mask(tree, f"{device}/local_cpus")
    near = (local or frozenset()) & machine.cpus
    # Without a node the kernel lists every CPU, which on a machine of several nodes is no answer.
    if not near or (not known and near == machine.cpus and _several_nodes(machine)):
        return Place(local_cpus=None, numa_node=int(node) if known and node else None)
    return Place(local_cpus=near, numa_node=int(node) if known and node else None)


def _several_nodes(machine: Cpus) -> bool:
    return sum(1 for node in machine.numa_nodes or () if node.cpus) > 1


def in_order(names: Iterable[str]) -> list[str]:
    """Those of the names that are PCI addresses, ascending."""
    return sorted(filter(_ADDRESS.fullmatch, names), key=address_key)


def address_key(address: str) -> list[int]:
    """What PCI addresses are ordered by: domains may have more than four digits."""
    return [int(part, 16) for part in re.split("[:.]", address)]


def gpus_on_the_bus(tree: Tree, machine: Cpus) -> tuple[Gpu, ...]:
    """Every NVIDIA GPU of the machine, whether a driver has it or not."""
    driven = set(tree.list(_DRIVER))
    devices = [a for a in tree.list(DEVICES) if _is_gpu(tree, a, driven=a in driven)]
    return _gpus(tree, machine, devices)


def gpus_of_the_driver(tree: Tree, machine: Cpus) -> tuple[Gpu, ...]:
    """The GPUs that the NVIDIA kernel module shows in /proc; in a container these are its own."""
    return _gpus(tree, machine, tree.list(_DRIVER))


def _is_gpu(tree: Tree, address: str, *, driven: bool) -> bool:
    device = f"{DEVICES}/{address}"
    kind = tree.read(f"{device}/class") or ""
    return kind.startswith(_GPU_CLASSES) and (driven or tree.read(f"{device}/vendor") == _NVIDIA)


def _gpus(tree: Tree, machine: Cpus, addresses: list[str]) -> tuple[Gpu, ...]:
    ordered = enumerate(in_order(addresses))
    return tuple(_gpu(tree, machine, index, address) for index, address in ordered)


def _gpu(tree: Tree, machine: Cpus, index: int, address: str) -> Gpu:
    spot = place(tree, address.lower(), machine)
    told = _told(tree, address, "information")
    memory = _told(tree, address, "numa_status").get("Node", "")
    near = spot.local_cpus or node_cpus(machine, spot.numa_node)
    return Gpu(
        index=index,
        uuid=told.get("GPU UUID"),
        pci_bus_id=address.lower(),
        name=told.get("Model"),
        node_cpus=near,
        local_cpus=spot.local_cpus,
        numa_node=spot.numa_node,
        memory_node=int(memory) if memory.isdecimal() else None,
        source=Source.SYSFS if near else None,
    )


def node_cpus(machine: Cpus, number: int | None) -> CpuSet | None:
    """The CPUs of a NUMA node; None when there is no such node or it has none."""
    found = (node.cpus for node in machine.numa_nodes or () if node.id == number)
    return next(found, frozenset()) or None


def _told(tree: Tree, address: str, file: str) -> dict[str, str]:
    lines = (tree.read(f"{_DRIVER}/{address}/{file}") or "").splitlines()
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    told = {key.strip(): value.strip() for key, value in pairs}
    # Until the device has been opened once its UUID reads GPU-????????-….
    return {key: value for key, value in told.items() if value and "?" not in value}


# Which GPU a device file belongs to.


_DRIVER_GPUS = "proc/driver/nvidia/gpus"
_MINOR = re.compile(r"^Device Minor:\s*(\d+)", re.ASCII | re.MULTILINE)
_DEVICE = re.compile(r"/dev/nvidia(\d+)", re.ASCII)


def indices_by_minor(tree: Tree, by_address: Mapping[str | None, int]) -> dict[int, int]:
    """GPU indices by the numbers of their device files (``/dev/nvidia3``), which may differ.

    Args:
        tree: where the driver tells which number belongs to which PCI address.
        by_address: GPU indices by PCI address.
    """
    found = {}
    for address in tree.list(_DRIVER_GPUS):
        told = _MINOR.search(tree.read(f"{_DRIVER_GPUS}/{address}/information") or "")
        if told and address.lower() in by_address:
            found[int(told[1])] = by_address[address.lower()]
    return found


def minors_of(files: Collection[str]) -> set[int]:
    """The numbers of the GPU device files among a process's open files."""
    matches = (_DEVICE.fullmatch(file) for file in files)
    return {int(match[1]) for match in matches if match}


# The accelerators of a machine, from sysfs alone: the claimants of ``partition="machine"``.
#
# Strangers on one machine must list the same devices, so nothing counts here but what every process
# sees: a PCI device's class, its vendor and its address. Which driver has the device (one that
# hands
# it to a virtual machine, or none) does not matter, nor does who may open it.
#
# Devices that count have one of the classes ``CLASSES`` and are of one of the ``VENDORS``.
# Left out are
#
# - NVSwitches (bridges, class 0680) and the audio functions of graphics cards (0403), by their
# class;
# - the display chips of management controllers (ASPEED, Matrox), by their vendor;
# - virtual functions (SR-IOV): they share the place, and the border, of their physical function;
# - what is part of an Intel processor, as it would take cores from real GPUs: its graphics, always
#   at 0000:00:02.0, and its NPU, a processing accelerator on bus 00.
#
# AMD's processors with graphics (APUs) cannot be told from cards: they count. So do a card that
# only
# drives a screen, and FPGAs that call themselves processing accelerators.


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
