"""The PCI side of a machine, from /sys and /proc: GPUs and accelerators without their driver.

**Accelerators** are the claimants of ``partition="machine"``. Independent jobs on one machine must
list the same devices, so only what every process sees counts: a device's class, vendor and
address, not its driver nor who may open it. A device counts when its class is one of
``CLASSES`` and its vendor one of ``VENDORS``. Left out are

- NVSwitches (bridges, class 0680) and the audio functions of graphics cards (0403), by class;
- the display chips of management controllers (ASPEED, Matrox), by vendor;
- virtual functions (SR-IOV): they share the place, and the border, of their physical function;
- parts of an Intel processor, which would take cores from real GPUs: its graphics, always at
  0000:00:02.0, and its NPU, a processing accelerator on bus 00.

AMD's processors with graphics (APUs) look like cards, so they count. So do a card that only drives
a screen, and FPGAs that call themselves processing accelerators.

Sources: ``Documentation/ABI/testing/sysfs-bus-pci`` (``numa_node``, ``local_cpulist``); the NVIDIA
driver's ``/proc/driver/nvidia/gpus/<address>/information`` and, where a GPU's memory is a NUMA
node, ``numa_status``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from gpuaff._system.kernel import Tree
from gpuaff.cpuset import CpuSet
from gpuaff.topology.model import Accelerator, Gpu, Source, Topology
from gpuaff.topology.sysfs import cpu_list

DEVICES = "sys/bus/pci/devices"

CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")
"""VGA controller, 3D controller, other display controller, processing accelerator (PCI Code and ID
Assignment)."""

VENDORS = _NVIDIA, _AMD, _INTEL = ("0x10de", "0x1002", "0x8086")

_GPU_CLASSES = ("0x0300", "0x0302")
_DRIVER = "proc/driver/nvidia/gpus"
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.IGNORECASE | re.ASCII)


def place(tree: Tree, address: str | None, machine: Topology) -> tuple[CpuSet | None, int | None]:
    """The CPUs and the NUMA node of the device at a PCI address; None for what is unknown."""
    device = f"{DEVICES}/{address}"
    text = tree.read(f"{device}/numa_node") or ""
    node = int(text) if text.isdecimal() else None  # −1: the firmware is silent (cases A7, F6)
    local = cpu_list(tree, f"{device}/local_cpulist", f"{device}/local_cpus") or frozenset()
    near = local & machine.cpus
    # Without a node the kernel lists every CPU, which on a machine of several nodes is no answer.
    several = sum(1 for one in machine.numa_nodes or () if one.cpus) > 1
    is_known = node is not None or near != machine.cpus or not several
    return near if near and is_known else None, node


def address_key(address: str) -> list[int]:
    """What PCI addresses are ordered by: domains may have more than four digits."""
    return [int(part, 16) for part in re.split("[:.]", address)]


def _in_order(names: Iterable[str]) -> list[str]:
    """Those of the names that are PCI addresses, ascending."""
    return sorted(filter(_ADDRESS.fullmatch, names), key=address_key)


def gpus_on_the_bus(tree: Tree, machine: Topology) -> tuple[Gpu, ...]:
    """Every NVIDIA GPU of the machine, with a driver or without."""
    with_driver = set(tree.list(_DRIVER))

    def is_gpu(address: str) -> bool:
        device = f"{DEVICES}/{address}"
        return (tree.read(f"{device}/class") or "").startswith(_GPU_CLASSES) and (
            address in with_driver or tree.read(f"{device}/vendor") == _NVIDIA
        )

    return _gpus(tree, machine, filter(is_gpu, tree.list(DEVICES)))


def gpus_of_the_driver(tree: Tree, machine: Topology) -> tuple[Gpu, ...]:
    """The GPUs that the NVIDIA kernel module shows in /proc; in a container these are its own."""
    return _gpus(tree, machine, tree.list(_DRIVER))


def _gpus(tree: Tree, machine: Topology, addresses: Iterable[str]) -> tuple[Gpu, ...]:
    def gpu(index: int, address: str) -> Gpu:
        local, node = place(tree, address.lower(), machine)
        information = _driver_file(tree, address, "information")
        memory = _driver_file(tree, address, "numa_status").get("Node", "")
        of_node = (one.cpus for one in machine.numa_nodes or () if one.id == node)
        near = local or next(of_node, None) or None
        return Gpu(
            index=index,
            uuid=information.get("GPU UUID"),
            pci_bus_id=address.lower(),
            name=information.get("Model"),
            node_cpus=near,
            local_cpus=local,
            numa_node=node,
            memory_node=int(memory) if memory.isdecimal() else None,
            source=Source.SYSFS if near else None,
        )

    return tuple(gpu(index, address) for index, address in enumerate(_in_order(addresses)))


def _driver_file(tree: Tree, address: str, file: str) -> dict[str, str]:
    """The ``key: value`` lines of one of the driver's files about a GPU."""
    lines = (tree.read(f"{_DRIVER}/{address}/{file}") or "").splitlines()
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    values = {key.strip(): value.strip() for key, value in pairs}
    # Until the device has been opened once its UUID reads GPU-????????-….
    return {key: value for key, value in values.items() if value and "?" not in value}


def device_files(tree: Tree, by_address: Mapping[str | None, int]) -> dict[str, int]:
    """GPU indices by the GPUs' device files (``/dev/nvidia3``), whose numbers may differ."""
    minors = {
        address.lower(): _driver_file(tree, address, "information").get("Device Minor", "")
        for address in tree.list(_DRIVER)
    }
    return {
        f"/dev/nvidia{minor}": by_address[address]
        for address, minor in minors.items()
        if minor.isdecimal() and address in by_address
    }


def accelerators(tree: Tree, machine: Topology) -> tuple[Accelerator, ...]:
    """Every accelerator of the machine, by address; empty where no PCI bus is visible."""
    # A machine has hundreds of PCI devices: one file each, until it looks like an accelerator.
    vendors = {name: _vendor(tree, name) for name in tree.list(DEVICES)}

    def device(address: str) -> Accelerator:
        local, node = place(tree, address, machine)
        vendor = vendors[address].removeprefix("0x")
        return Accelerator(pci_bus_id=address, vendor=vendor, local_cpus=local, numa_node=node)

    return tuple(map(device, _in_order(name for name, vendor in vendors.items() if vendor)))


def _vendor(tree: Tree, address: str) -> str:
    """The vendor of a device that counts, as sysfs has it; empty for any other."""
    kind = tree.read(f"{DEVICES}/{address}/class") or ""
    if not kind.startswith(CLASSES):
        return ""
    vendor = tree.read(f"{DEVICES}/{address}/vendor") or ""
    is_npu = address.startswith("0000:00:") and kind.startswith("0x1200")
    if vendor not in VENDORS or (vendor == _INTEL and (address == "0000:00:02.0" or is_npu)):
        return ""
    # A link, in a copy of the tree mostly a broken one: that its name is there is enough.
    return "" if "physfn" in tree.list(f"{DEVICES}/{address}") else vendor
