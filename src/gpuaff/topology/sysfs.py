"""The CPU side of a machine from /sys, and a process's cpuset and quota from its cgroups.

Sources, in Linux's Documentation: ``admin-guide/cputopology.rst``, ``admin-guide/cgroup-v2.rst``,
``ABI/testing/sysfs-devices-system-cpu``, ``ABI/stable/sysfs-devices-node``. A file is opened once
per core, package or cache, not once per CPU: large machines have thousands of CPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from gpuaff._system.kernel import Tree
from gpuaff.cpuset import CpuSet, grouped, parse_cpulist, parse_mask
from gpuaff.options import natural
from gpuaff.topology.model import NumaNode, Package, Topology

_CPU = "sys/devices/system/cpu"
_NODE = "sys/devices/system/node"

_CORE = ("core_cpus_list", "thread_siblings_list", "thread_siblings")
_PACKAGE = ("package_cpus_list", "core_siblings_list", "core_siblings")
"""The files in ``cpuN/topology/`` that list the CPUs of its core and package; new names first."""

_MASKS = ("siblings", "shared_cpu_map", "cpumap", "local_cpus")
"""How the names of files end that hold a mask. All others hold a cpulist."""

_SLOW = 0.8
"""A core with less than this part of the fastest core's speed is an efficiency core. Cores of one
kind differ by a few per cent (favoured cores); E cores and LITTLE cores have 0.4 to 0.75."""

_CPUSET = ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus", "cpus")
"""Version 2; version 1 since Linux 3.17 and before; version 1 mounted as ``cpuset``."""


def read_cpus(tree: Tree) -> Topology:
    """Read the CPU side; what the tree lacks is None (``cpus`` is then empty)."""
    cpus = online(tree)
    cores = _cores(tree, cpus)
    return Topology(
        cpus=cpus,
        allowed=cpus,
        cores=cores,
        efficiency_cpus=_efficiency_cpus(tree, cores or ()),
        packages=_packages(tree, cpus),
        l3=_l3(tree, cpus),
        numa_nodes=_numa_nodes(tree, cpus),
    )


def cpu_list(tree: Tree, *files: str) -> CpuSet | None:
    """The CPUs (or nodes) that the first of these files names.

    Returns:
        None when none of them can be read; empty when none of those that can names any.
    """
    found = None
    for file in files:
        text = tree.read(file)
        if text is None:
            continue
        try:
            found = parse_mask(text) if file.endswith(_MASKS) else parse_cpulist(text)
        except ValueError:
            continue
        if found:
            break
    return found


def online(tree: Tree) -> CpuSet:
    """The online CPUs. *Possible* ones are more: their ids can't be used (case A18)."""
    # Kernels before 2.6.26 have no such list; an offline CPU has no topology folder.
    return cpu_list(tree, f"{_CPU}/online") or frozenset(
        cpu for cpu in _numbered(tree, _CPU, "cpu") if tree.exists(f"{_CPU}/cpu{cpu}/topology")
    )


def _numbered(tree: Tree, folder: str, prefix: str) -> list[int]:
    """The numbers of the entries ``<prefix>N`` of a folder."""
    names = (name.removeprefix(prefix) for name in tree.list(folder) if name.startswith(prefix))
    return sorted(int(number) for number in names if number.isdecimal())


def _cut(cpus: CpuSet, group_of: Callable[[int], CpuSet]) -> tuple[CpuSet, ...]:
    """CPUs in groups, each read for its lowest CPU only."""
    groups: list[CpuSet] = []
    left = set(cpus)
    for cpu in sorted(cpus):
        group = group_of(cpu) & left if cpu in left else None
        if group:
            groups.append(group)
            left -= group
    return tuple(groups)


def _siblings(tree: Tree, cpus: CpuSet, files: tuple[str, ...]) -> tuple[CpuSet, ...] | None:
    """CPUs in groups of siblings, by the first file that this kernel has."""

    def read(cpu: int, file: str) -> CpuSet:
        return cpu_list(tree, f"{_CPU}/cpu{cpu}/topology/{file}") or frozenset()

    used = next((file for file in files if read(min(cpus), file)), None) if cpus else None
    return None if used is None else _cut(cpus, lambda cpu: read(cpu, used) | {cpu})


def _cores(tree: Tree, cpus: CpuSet) -> tuple[CpuSet, ...] | None:
    def core_id(cpu: int) -> int | None:
        return _integer(tree, f"{_CPU}/cpu{cpu}/topology/core_id")

    cores = _siblings(tree, cpus, _CORE)
    several = next((core for core in cores or () if len(core) > 1), frozenset())
    if cores is None or len(set(map(core_id, several))) <= 1:
        return cores
    # AMD family 15h lists both cores of a compute unit as siblings; their core ids differ.
    unit_of = {cpu: unit for unit, core in enumerate(cores) for cpu in core}
    return grouped(cpus, lambda cpu: (unit_of[cpu], core_id(cpu)))


def _packages(tree: Tree, cpus: CpuSet) -> tuple[Package, ...] | None:
    groups = _siblings(tree, cpus, _PACKAGE)
    if groups is None:
        return None
    files = (f"{_CPU}/cpu{min(group)}/topology/physical_package_id" for group in groups)
    ids = [-1 if number is None else number for number in (_integer(tree, file) for file in files)]
    if len(set(ids)) < len(ids) or min(ids) < 0:
        ids = list(range(len(groups)))  # −1 on machines whose firmware names no packages
    by_id = dict(zip(ids, groups, strict=True))
    return tuple(Package(id=number, cpus=by_id[number]) for number in sorted(by_id))


def _integer(tree: Tree, file: str) -> int | None:
    try:
        return int(tree.read(file) or "")
    except ValueError:
        return None


def _l3(tree: Tree, cpus: CpuSet) -> tuple[CpuSet, ...] | None:
    def domain(cpu: int) -> CpuSet:
        cache = f"{_CPU}/cpu{cpu}/cache"
        for number in reversed(_numbered(tree, cache, "index")):  # the outermost level is last
            index = f"{cache}/index{number}"
            if tree.read(f"{index}/level") == "3":
                files = f"{index}/shared_cpu_list", f"{index}/shared_cpu_map"
                return cpu_list(tree, *files) or frozenset()
        return frozenset()

    known = cpus and tree.exists(f"{_CPU}/cpu{min(cpus)}/cache")
    return _cut(cpus, domain) if known else None


def _efficiency_cpus(tree: Tree, cores: tuple[CpuSet, ...]) -> CpuSet:
    """The CPUs of slow cores on a hybrid machine (case G5).

    Intel names them (``/sys/devices/cpu_atom``, Linux 5.13); Arm has a capacity for each CPU. On
    older kernels base frequencies differ, and are read only where cores differ in their number
    of threads: reading them everywhere would double the time on large machines.
    """
    named = cpu_list(tree, "sys/devices/cpu_atom/cpus")
    if named or not cores:
        return (named or frozenset()) & frozenset().union(*cores)
    file = "cpu_capacity"
    if not tree.exists(f"{_CPU}/cpu{min(cores[0])}/{file}"):
        if len(set(map(len, cores))) == 1:
            return frozenset()
        file = "cpufreq/base_frequency"
    return slow_cores(
        {core: _integer(tree, f"{_CPU}/cpu{min(core)}/{file}") or 0 for core in cores}
    )


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
            cpus=(cpu_list(tree, f"{folder}/cpulist", f"{folder}/cpumap") or frozenset()) & cpus,
            has_memory=None if with_memory is None else number in with_memory,
            distances=tuple(map(int, words)) if is_whole else None,
        )

    return tuple(map(node, ids)) or None


# ---- cgroups -----------------------------------------------------------------------------------


def cpuset_of(tree: Tree, process: int | str = "self") -> CpuSet | None:
    """The CPUs of a process's cpuset; None when unknown.

    ``self`` is, in a tree of files, the process that gathered them.
    """
    group = tree.read(f"proc/{process}/cpuset")
    if group is None:
        group = _groups(tree, process).get("")
    for kind, mount, options in _mounts(tree):
        if kind not in ("cgroup2", "cpuset") and not (kind == "cgroup" and "cpuset" in options):
            continue
        # A version 2 group without the controller has its nearest ancestor's CPUs.
        for folder in reversed(_folders(mount, group)):
            if cpus := cpu_list(tree, *(f"{folder}/{file}" for file in _CPUSET)):
                return cpus
    return None


def quotas(tree: Tree, process: int | str = "self") -> dict[str, float]:
    """The limits that a process is under, each in CPUs, by the folder of its cgroup.

    A quota (``docker --cpus``, Kubernetes' ``limits.cpu``) limits time and leaves the mask alone:
    a process with a thread for each CPU of its mask is stopped for a part of each period
    (``Documentation/scheduler/sched-bwc.rst``).
    """
    groups = _groups(tree, process)
    found: dict[str, float] = {}
    for kind, mount, options in _mounts(tree):
        if kind == "cgroup2" or (kind == "cgroup" and "cpu" in options):
            for folder in _folders(mount, groups.get("" if kind == "cgroup2" else "cpu")):
                limit = _limit(tree, folder)
                if limit is not None:
                    found[folder] = limit
    return found


def _groups(tree: Tree, process: int | str) -> dict[str, str]:
    """The process's group by controller; that of version 2 by an empty name."""
    found: dict[str, str] = {}
    for line in (tree.read(f"proc/{process}/cgroup") or "").splitlines():
        controllers, _, group = line.partition(":")[2].partition(":")
        found.update(dict.fromkeys(controllers.split(","), group))
    return found


def _mounts(tree: Tree) -> Iterator[tuple[str, str, list[str]]]:
    """The type, place and options of each mount."""
    for line in (tree.read("proc/mounts") or "").splitlines():
        words = line.split()
        if len(words) >= 4:
            yield words[2], words[1].strip("/"), words[3].split(",")


def _folders(mount: str, group: str | None) -> list[str]:
    """The folders of a group and of those above it, from the top; none when it is unknown."""
    if group is None:
        return []
    names = [name for name in group.split("/") if name not in ("", ".", "..")]
    return ["/".join([mount, *names[:depth]]) for depth in range(len(names) + 1)]


def _limit(tree: Tree, folder: str) -> float | None:
    """A group's own limit; None where it has none (``max``, ``-1``), or is not mounted here."""
    text = tree.read(f"{folder}/cpu.max")
    if text is None:
        quota = tree.read(f"{folder}/cpu.cfs_quota_us") or ""
        text = f"{quota} {tree.read(f'{folder}/cpu.cfs_period_us') or ''}"
    quota, _, period = text.strip().partition(" ")
    time, each = natural(quota), natural(period.strip())
    return time / each if time and each else None
