"""A machine's CPUs and PCI devices from /sys and /proc, and a process's cpuset and quota.

Sources, in Linux's Documentation: ``admin-guide/cputopology.rst``, ``admin-guide/cgroup-v2.rst``,
``ABI/testing/sysfs-devices-system-cpu``, ``ABI/stable/sysfs-devices-node``. A file is opened once
per core, package or cache, not once per CPU: large machines have thousands of CPUs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain

from gpuaff._system.kernel import Tree
from gpuaff.cpuset import CpuSet, parse_cpulist
from gpuaff.options import natural
from gpuaff.topology.model import Accelerator, Gpu, NumaNode, Package, Source, Topology

_CPU = "sys/devices/system/cpu"
_NODE = "sys/devices/system/node"

_CORE = ("core_cpus_list", "thread_siblings_list")
_PACKAGE = ("package_cpus_list", "core_siblings_list")
"""The files in ``cpuN/topology/`` that list the CPUs of its core and package; new names first."""

_SLOW = 0.8
"""A core with less than this part of the fastest core's speed is an efficiency core. Cores of one
kind differ by a few per cent (favoured cores); E cores and LITTLE cores have 0.4 to 0.75."""

_CPUSET = ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus", "cpus")
"""Version 2; version 1 since Linux 3.17 and before; version 1 mounted as ``cpuset``."""


def read_cpus(tree: Tree) -> Topology:
    """Read the CPU side; what the tree lacks is None (``cpus`` is then empty)."""
    # *Possible* CPUs are more: their ids can't be used (case A18).
    cpus = cpu_list(tree, f"{_CPU}/online")
    cores = _siblings(tree, cpus, _CORE)
    return Topology(
        cpus=cpus,
        allowed=cpus,
        cores=cores,
        efficiency_cpus=_efficiency_cpus(tree, cores or ()),
        packages=_packages(tree, cpus),
        l3=_l3(tree, cpus),
        numa_nodes=_numa_nodes(tree, cpus),
    )


def cpu_list(tree: Tree, *files: str) -> CpuSet:
    """The CPUs (or nodes) that the first of these files names; empty where none names any."""
    for file in files:
        with suppress(ValueError):
            if cpus := parse_cpulist(tree.read(file) or ""):
                return cpus
    return frozenset()


def _numbered(tree: Tree, folder: str, prefix: str) -> list[int]:
    """The numbers of the entries ``<prefix>N`` of a folder."""
    names = (name.removeprefix(prefix) for name in tree.list(folder) if name.startswith(prefix))
    return sorted(int(number) for number in names if number.isdecimal())


def _cut(cpus: CpuSet, group_of: Callable[[int], CpuSet]) -> tuple[CpuSet, ...]:
    """CPUs in groups, each read for its lowest CPU only."""
    groups: list[CpuSet] = []
    left = set(cpus)
    for cpu in sorted(cpus):
        if cpu in left and (group := group_of(cpu) & left):
            groups.append(group)
            left -= group
    return tuple(groups)


def _siblings(tree: Tree, cpus: CpuSet, files: tuple[str, ...]) -> tuple[CpuSet, ...] | None:
    """CPUs in groups of siblings, by the first file that this kernel has."""

    def read(cpu: int, file: str) -> CpuSet:
        return cpu_list(tree, f"{_CPU}/cpu{cpu}/topology/{file}")

    used = next((file for file in files if read(min(cpus), file)), None) if cpus else None
    return None if used is None else _cut(cpus, lambda cpu: read(cpu, used) | {cpu})


def _packages(tree: Tree, cpus: CpuSet) -> tuple[Package, ...] | None:
    groups = _siblings(tree, cpus, _PACKAGE)
    if groups is None:
        return None
    files = [f"{_CPU}/cpu{min(group)}/topology/physical_package_id" for group in groups]
    ids = [number for file in files if (number := natural(tree.read(file))) is not None]
    if len(set(ids)) < len(groups):  # −1 where the firmware names no packages
        ids = list(range(len(groups)))
    pairs = sorted(zip(ids, groups, strict=True))
    return tuple(Package(id=number, cpus=group) for number, group in pairs)


def _l3(tree: Tree, cpus: CpuSet) -> tuple[CpuSet, ...] | None:
    def domain(cpu: int) -> CpuSet:
        cache = f"{_CPU}/cpu{cpu}/cache"
        for number in reversed(_numbered(tree, cache, "index")):  # the outermost level is last
            index = f"{cache}/index{number}"
            if tree.read(f"{index}/level") == "3":
                return cpu_list(tree, f"{index}/shared_cpu_list")
        return frozenset()

    known = cpus and tree.exists(f"{_CPU}/cpu{min(cpus)}/cache")
    return _cut(cpus, domain) if known else None


def _efficiency_cpus(tree: Tree, cores: tuple[CpuSet, ...]) -> CpuSet:
    """The CPUs of slow cores on a hybrid machine (case G5)."""
    named = cpu_list(tree, "sys/devices/cpu_atom/cpus")  # Intel, since Linux 5.13
    if named or not cores:
        return named & frozenset().union(*cores)
    file = "cpu_capacity"  # Arm
    if not tree.exists(f"{_CPU}/cpu{min(cores[0])}/{file}"):
        # Read only where cores differ in their threads: it doubles the time on large machines.
        if len(set(map(len, cores))) == 1:
            return frozenset()
        file = "cpufreq/base_frequency"
    files = {core: f"{_CPU}/cpu{min(core)}/{file}" for core in cores}
    return slow_cores({core: natural(tree.read(file)) or 0 for core, file in files.items()})


def slow_cores(speeds: Mapping[CpuSet, int]) -> CpuSet:
    """The CPUs of the cores that are much slower than the fastest; none where one is unknown."""
    if not all(speeds.values()):  # a sibling that is offline, no frequency driver: don't guess
        return frozenset()
    limit = _SLOW * max(speeds.values(), default=0)
    return frozenset().union(*(core for core, speed in speeds.items() if speed < limit))


def _numa_nodes(tree: Tree, cpus: CpuSet) -> tuple[NumaNode, ...] | None:
    ids = _numbered(tree, _NODE, "node")
    with_memory = cpu_list(tree, f"{_NODE}/has_memory")  # ids of nodes, in the same notation

    def node(number: int) -> NumaNode:
        folder = f"{_NODE}/node{number}"
        words = (tree.read(f"{folder}/distance") or "").split()
        # While a node comes or goes the row and the folders may disagree: then nothing is sure.
        is_whole = len(words) == len(ids) and all(word.isdecimal() for word in words)
        return NumaNode(
            id=number,
            cpus=cpu_list(tree, f"{folder}/cpulist") & cpus,
            has_memory=number in with_memory if with_memory else None,
            distances=tuple(map(int, words)) if is_whole else None,
        )

    return tuple(map(node, ids)) or None


# ---- PCI devices: GPUs and accelerators without their driver -----------------------------------

_DEVICES = "sys/bus/pci/devices"

# Accelerators are the claimants of ``partition="machine"``. Independent jobs on one machine must
# list the same devices, so only what every process sees counts: class, vendor and address, not the
# driver nor who may open a device. docs/concepts.md says which count, and why.
_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")
"""VGA controller, 3D controller, other display controller, processing accelerator (PCI Code and ID
Assignment)."""

_GPU_CLASSES = ("0x0300", "0x0302")
_VENDORS = _NVIDIA, _AMD, _INTEL = ("0x10de", "0x1002", "0x8086")
DRIVER = "proc/driver/nvidia/gpus"
"""A folder for each GPU of the NVIDIA kernel module; in a container for each of its own."""

_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.IGNORECASE | re.ASCII)


def place(tree: Tree, address: str | None, machine: Topology) -> tuple[CpuSet | None, int | None]:
    """The CPUs and the NUMA node of the device at a PCI address; None for what is unknown."""
    device = f"{_DEVICES}/{address}"
    text = tree.read(f"{device}/numa_node") or ""
    node = int(text) if text.isdecimal() else None  # −1: the firmware is silent (cases A7, F6)
    near = cpu_list(tree, f"{device}/local_cpulist") & machine.cpus
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
    with_driver = set(tree.list(DRIVER))

    def is_gpu(address: str) -> bool:
        device = f"{_DEVICES}/{address}"
        return (tree.read(f"{device}/class") or "").startswith(_GPU_CLASSES) and (
            address in with_driver or tree.read(f"{device}/vendor") == _NVIDIA
        )

    return gpus_at(tree, machine, filter(is_gpu, tree.list(_DEVICES)))


def gpus_at(tree: Tree, machine: Topology, addresses: Iterable[str]) -> tuple[Gpu, ...]:
    """The GPUs at these PCI addresses, as sysfs and the driver's files describe them."""

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
    lines = (tree.read(f"{DRIVER}/{address}/{file}") or "").splitlines()
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    values = {key.strip(): value.strip() for key, value in pairs}
    # Until the device has been opened once its UUID reads GPU-????????-….
    return {key: value for key, value in values.items() if value and "?" not in value}


def device_files(tree: Tree, by_address: Mapping[str | None, int]) -> dict[str, int]:
    """GPU indices by the GPUs' device files (``/dev/nvidia3``), whose numbers may differ."""
    found = {}
    for address in tree.list(DRIVER):
        minor = _driver_file(tree, address, "information").get("Device Minor", "")
        if minor.isdecimal() and address.lower() in by_address:
            found[f"/dev/nvidia{minor}"] = by_address[address.lower()]
    return found


def accelerators(tree: Tree, machine: Topology) -> tuple[Accelerator, ...]:
    """Every accelerator of the machine, by address; empty where no PCI bus is visible."""
    found = []
    for address in _in_order(tree.list(_DEVICES)):
        if vendor := _vendor(tree, address):
            local, node = place(tree, address, machine)
            found.append(
                Accelerator(pci_bus_id=address, vendor=vendor, local_cpus=local, numa_node=node)
            )
    return tuple(found)


def _vendor(tree: Tree, address: str) -> str:
    """The vendor of a device that counts, four digits; empty for any other."""
    # A machine has hundreds of PCI devices: one file each, until it looks like an accelerator.
    kind = tree.read(f"{_DEVICES}/{address}/class") or ""
    if not kind.startswith(_CLASSES):
        return ""
    vendor = tree.read(f"{_DEVICES}/{address}/vendor") or ""
    is_npu = address.startswith("0000:00:") and kind.startswith("0x1200")
    if vendor not in _VENDORS or (vendor == _INTEL and (address == "0000:00:02.0" or is_npu)):
        return ""
    # A link, in a copy of the tree mostly a broken one: that its name is there is enough.
    return "" if "physfn" in tree.list(f"{_DEVICES}/{address}") else vendor[2:]


# ---- cgroups -----------------------------------------------------------------------------------


def cpuset_of(tree: Tree, process: int | str = "self") -> CpuSet | None:
    """The CPUs of a process's cpuset; None when unknown."""
    # A version 2 group without the controller has its nearest ancestor's CPUs.
    folders = chain.from_iterable(map(reversed, _folders(tree, process, "cpuset")))
    return cpu_list(tree, *(f"{folder}/{file}" for folder in folders for file in _CPUSET)) or None


def quotas(tree: Tree, process: int | str = "self") -> dict[str, float]:
    """The limits that a process is under, each in CPUs, by the folder of its cgroup.

    A quota limits time and leaves the mask alone: a process with a thread for each CPU of its mask
    is stopped for a part of each period (``Documentation/scheduler/sched-bwc.rst``).
    """
    folders = chain.from_iterable(_folders(tree, process, "cpu"))
    limits = {folder: _limit(tree, folder) for folder in folders}
    return {folder: limit for folder, limit in limits.items() if limit is not None}


def _folders(tree: Tree, process: int | str, controller: str) -> Iterator[list[str]]:
    """Where a controller may be mounted, the folders of the process's group, from the top."""
    own = tree.read(f"proc/{process}/cpuset") if controller == "cpuset" else None
    groups: dict[str, str] = {}
    for line in (tree.read(f"proc/{process}/cgroup") or "").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        groups.update(dict.fromkeys(controllers.split(","), path))
    for line in (tree.read("proc/mounts") or "").splitlines():
        _, mount, kind, options, *_ = [*line.split(), "", "", "", ""]
        is_version_1 = kind == controller or (kind == "cgroup" and controller in options.split(","))
        group = own or groups.get("" if kind == "cgroup2" else controller)
        if group is not None and (is_version_1 or kind == "cgroup2"):
            names = [name for name in group.split("/") if name not in ("", ".", "..")]
            top = mount.strip("/")
            yield ["/".join([top, *names[:depth]]) for depth in range(len(names) + 1)]


def _limit(tree: Tree, folder: str) -> float | None:
    """A group's own limit; None where it has none (``max``, ``-1``), or is not mounted here."""
    text = tree.read(f"{folder}/cpu.max")
    if text is None:
        quota = tree.read(f"{folder}/cpu.cfs_quota_us") or ""
        text = f"{quota} {tree.read(f'{folder}/cpu.cfs_period_us') or ''}"
    quota, _, period = text.strip().partition(" ")
    time, each = natural(quota), natural(period.strip())
    return time / each if time and each else None
