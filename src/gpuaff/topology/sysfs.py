"""The CPU side of a machine, from /sys.

Sources: ``Documentation/admin-guide/cputopology.rst`` (siblings, packages), ``Documentation/
ABI/testing/sysfs-devices-system-cpu`` (caches, ``cpu_capacity``), ``Documentation/ABI/stable/
sysfs-devices-node`` (nodes). Old kernels have masks where new ones have lists, and lack files.
A file is opened once per core, package or cache, not once per CPU: large machines have
thousands of CPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpuaff._system.kernel import Tree
from gpuaff.cpuset import CpuSet, parse_cpulist, parse_mask
from gpuaff.topology.model import NumaNode, Package

_CPU = "sys/devices/system/cpu"
_NODE = "sys/devices/system/node"

_SLOW = 0.8
"""A core with less than this part of the fastest core's speed is an efficiency core. Cores of
one kind differ by a few per cent (favoured cores); E cores and LITTLE cores have 0.4 to 0.75."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpus:
    """The CPU side of a :class:`~gpuaff.topology.model.Topology`, with the same fields.

    Attributes:
        highest: the highest CPU id that this kernel can ever bring online; masks are sized by it.
    """

    cpus: CpuSet
    highest: int
    cores: tuple[CpuSet, ...] | None = None
    efficiency_cpus: CpuSet = frozenset()
    packages: tuple[Package, ...] | None = None
    l3: tuple[CpuSet, ...] | None = None
    numa_nodes: tuple[NumaNode, ...] | None = None


def read_cpus(tree: Tree) -> Cpus:
    """Read the CPU side; what the tree lacks is None (``cpus`` is then empty)."""
    cpus = online(tree)
    cores = _cores(tree, cpus)
    return Cpus(
        cpus=cpus,
        highest=max(cpu_list(tree, f"{_CPU}/possible") or cpus or {0}),
        cores=cores,
        efficiency_cpus=_efficiency_cpus(tree, cores or ()),
        packages=_packages(tree, cpus),
        l3=_l3(tree, cpus),
        numa_nodes=_numa_nodes(tree, cpus),
    )


def cpu_list(tree: Tree, path: str) -> CpuSet | None:
    """A file that holds a cpulist; None when it is missing or holds something else."""
    return _parsed(tree, path, parse_cpulist)


def cpu_mask(tree: Tree, path: str) -> CpuSet | None:
    """A file that holds a hexadecimal mask; None when it is missing or holds something else."""
    return _parsed(tree, path, parse_mask)


def _parsed(tree: Tree, path: str, parse: Callable[[str], CpuSet]) -> CpuSet | None:
    text = tree.read(path)
    try:
        return None if text is None else parse(text)
    except ValueError:
        return None


def online(tree: Tree) -> CpuSet:
    """The online CPUs. *Possible* ones are more: their ids can't be used (case A18)."""
    listed = cpu_list(tree, f"{_CPU}/online")
    if listed:
        return listed
    ids = (int(name[3:]) for name in tree.list(_CPU) if _numbered(name, "cpu"))
    # Kernels before 2.6.26 have no such list; an offline CPU has no topology folder.
    return frozenset(cpu for cpu in ids if tree.exists(f"{_CPU}/cpu{cpu}/topology"))


def _numbered(name: str, prefix: str) -> bool:
    return name.startswith(prefix) and name[len(prefix) :].isdecimal()


_CORE = (
    "topology/core_cpus_list",
    "topology/thread_siblings_list",
    "topology/thread_siblings",
)
_PACKAGE = (
    "topology/package_cpus_list",
    "topology/core_siblings_list",
    "topology/core_siblings",
)
"""The files in ``cpuN/`` that list the CPUs of its core and package: new names, then old ones, and
masks, which have no ``_list`` in their names."""


def _groups(tree: Tree, cpus: CpuSet, names: tuple[str, ...]) -> tuple[CpuSet, ...] | None:
    """Cut CPUs into groups of siblings, by the first file that this kernel has."""
    known = (name for name in names if _cpus_in(tree, f"{_CPU}/cpu{min(cpus)}/{name}"))
    name = next(known, None) if cpus else None
    if name is None:
        return None
    groups: list[CpuSet] = []
    left = set(cpus)
    for cpu in sorted(cpus):  # a file is read once per group
        if cpu in left:
            siblings = _cpus_in(tree, f"{_CPU}/cpu{cpu}/{name}") or frozenset()
            groups.append(frozenset(siblings & left | {cpu}))
            left -= groups[-1]
    return tuple(groups)


def _cpus_in(tree: Tree, path: str) -> CpuSet | None:
    return cpu_list(tree, path) if path.endswith("list") else cpu_mask(tree, path)


def _cores(tree: Tree, cpus: CpuSet) -> tuple[CpuSet, ...] | None:
    groups = _groups(tree, cpus, _CORE)
    several = next((group for group in groups or () if len(group) > 1), frozenset())
    if groups is None or len({_core_id(tree, cpu) for cpu in several}) <= 1:
        return groups
    # AMD family 15h lists both cores of a compute unit as siblings; their core ids differ.
    split: list[CpuSet] = []
    for group in groups:
        ids = {cpu: _core_id(tree, cpu) for cpu in group}
        split += (frozenset(c for c in group if ids[c] == one) for one in set(ids.values()))
    return tuple(sorted(split, key=min))


def _core_id(tree: Tree, cpu: int) -> int | None:
    return _integer(tree, f"{_CPU}/cpu{cpu}/topology/core_id")


def _packages(tree: Tree, cpus: CpuSet) -> tuple[Package, ...] | None:
    groups = _groups(tree, cpus, _PACKAGE)
    if groups is None:
        return None
    files = (f"{_CPU}/cpu{min(group)}/topology/physical_package_id" for group in groups)
    ids = [-1 if number is None else number for number in (_integer(tree, file) for file in files)]
    if len(set(ids)) < len(ids) or min(ids) < 0:
        ids = list(range(len(groups)))  # −1 on machines whose firmware names no packages
    by_id = dict(zip(ids, groups, strict=True))
    return tuple(Package(id=number, cpus=by_id[number]) for number in sorted(by_id))


def _integer(tree: Tree, path: str) -> int | None:
    text = tree.read(path)
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def _l3(tree: Tree, cpus: CpuSet) -> tuple[CpuSet, ...] | None:
    if not cpus or not tree.exists(f"{_CPU}/cpu{min(cpus)}/cache"):
        return None
    domains: list[CpuSet] = []
    left = set(cpus)
    for cpu in sorted(cpus):
        domain = _l3_of(tree, cpu) & left if cpu in left else None
        if domain:
            domains.append(domain)
            left -= domain
    return tuple(domains)


def _l3_of(tree: Tree, cpu: int) -> CpuSet:
    cache = f"{_CPU}/cpu{cpu}/cache"
    for name in reversed(tree.list(cache)):  # the outermost level comes last
        if _numbered(name, "index") and tree.read(f"{cache}/{name}/level") == "3":
            path = f"{cache}/{name}/shared_cpu"
            return cpu_list(tree, f"{path}_list") or cpu_mask(tree, f"{path}_map") or frozenset()
    return frozenset()


def _efficiency_cpus(tree: Tree, cores: tuple[CpuSet, ...]) -> CpuSet:
    """The CPUs of slow cores on a hybrid machine (case G5).

    Intel names them (``/sys/devices/cpu_atom``, Linux 5.13); Arm has a capacity for each CPU. On
    older kernels base frequencies differ, and are read only where cores differ in their number
    of threads: reading them everywhere would double the time on large machines.
    """
    named = cpu_list(tree, "sys/devices/cpu_atom/cpus")
    if named:
        return named & frozenset().union(*cores)
    if not cores:
        return frozenset()
    if tree.exists(f"{_CPU}/cpu{min(cores[0])}/cpu_capacity"):
        return _slower(tree, cores, "cpu_capacity")
    if len({len(core) for core in cores}) > 1:
        return _slower(tree, cores, "cpufreq/base_frequency")
    return frozenset()


def _slower(tree: Tree, cores: tuple[CpuSet, ...], file: str) -> CpuSet:
    speeds = [_integer(tree, f"{_CPU}/cpu{min(core)}/{file}") for core in cores]
    known = [speed for speed in speeds if speed is not None]
    if len(known) < len(speeds):  # a sibling that is offline, no frequency driver: don't guess
        return frozenset()
    limit = _SLOW * max(known)
    return frozenset().union(
        *(core for core, speed in zip(cores, known, strict=True) if speed < limit)
    )


def _numa_nodes(tree: Tree, cpus: CpuSet) -> tuple[NumaNode, ...] | None:
    ids = sorted(int(name[4:]) for name in tree.list(_NODE) if _numbered(name, "node"))
    if not ids:
        return None
    with_memory = cpu_list(tree, f"{_NODE}/has_memory")  # ids of nodes, in the same notation

    def cpus_of(number: int) -> CpuSet:
        listed = cpu_list(tree, f"{_NODE}/node{number}/cpulist")
        mask = cpu_mask(tree, f"{_NODE}/node{number}/cpumap") if listed is None else None
        return (listed or mask or frozenset()) & cpus

    return tuple(
        NumaNode(
            id=number,
            cpus=cpus_of(number),
            has_memory=_has_memory(tree, number, with_memory),
            distances=_distances(tree, number, len(ids)),
        )
        for number in ids
    )


def _has_memory(tree: Tree, number: int, with_memory: frozenset[int] | None) -> bool | None:
    if with_memory is not None:
        return number in with_memory
    for line in (tree.read(f"{_NODE}/node{number}/meminfo") or "").splitlines():
        if "MemTotal:" in line:
            return line.split("MemTotal:")[1].split()[:1] != ["0"]
    return None


def _distances(tree: Tree, number: int, count: int) -> tuple[int, ...] | None:
    words = (tree.read(f"{_NODE}/node{number}/distance") or "").split()
    # While a node comes or goes the row and the folders may disagree: then nothing is sure.
    if len(words) != count or not all(word.isdecimal() for word in words):
        return None
    return tuple(int(word) for word in words)
