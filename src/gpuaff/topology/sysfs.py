"""The CPU side of a machine, from /sys.

Sources: ``Documentation/admin-guide/cputopology.rst`` (siblings, packages), ``Documentation/
ABI/testing/sysfs-devices-system-cpu`` (caches, ``cpu_capacity``), ``Documentation/ABI/stable/
sysfs-devices-node`` (nodes). Old kernels have masks where new ones have lists, and lack files.
A file is opened once per core, package or cache, not once per CPU: large machines have
thousands of CPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
    """The CPU side of a :class:`~gpuaff.topology.model.Topology`; its fields are told there.

    Attributes:
        highest: the highest CPU id that this kernel can ever bring online; masks are sized by it.
    """

    cpus: CpuSet
    highest: int
    cores: tuple[CpuSet, ...] | None
    efficiency_cpus: CpuSet
    packages: tuple[Package, ...] | None
    l3: tuple[CpuSet, ...] | None
    numa_nodes: tuple[NumaNode, ...] | None


UNKNOWN = Cpus(
    cpus=frozenset(),
    highest=0,
    cores=None,
    efficiency_cpus=frozenset(),
    packages=None,
    l3=None,
    numa_nodes=None,
)
"""Of a machine whose files tell nothing."""


def read_cpus(tree: Tree) -> Cpus:
    """Read all of it; what the tree lacks is None (``cpus`` is then empty)."""
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


@dataclass(frozen=True, slots=True)
class _Siblings:
    """One of the files in ``cpuN/`` that list CPUs: its names, new and old, list and mask."""

    lists: tuple[str, ...]
    masks: tuple[str, ...]

    def reader(self, tree: Tree, cpus: Iterable[int]) -> Callable[[int], CpuSet | None] | None:
        """A function from a CPU to the file's CPUs, for the name that this kernel has."""
        first = next(iter(sorted(cpus)), None)
        for names, read in ((self.lists, cpu_list), (self.masks, cpu_mask)):
            for name in names:
                if first is not None and read(tree, f"{_CPU}/cpu{first}/{name}"):
                    return lambda cpu, name=name, read=read: read(  # type: ignore[misc]  # mypy: lambda with defaults
                        tree, f"{_CPU}/cpu{cpu}/{name}"
                    )
        return None


_CORE = _Siblings(
    ("topology/core_cpus_list", "topology/thread_siblings_list"), ("topology/thread_siblings",)
)
_PACKAGE = _Siblings(
    ("topology/package_cpus_list", "topology/core_siblings_list"), ("topology/core_siblings",)
)


def _groups(
    cpus: CpuSet, siblings: Callable[[int], CpuSet | None] | None
) -> tuple[CpuSet, ...] | None:
    """Cut CPUs into groups of siblings; each file is read once per group."""
    if siblings is None:
        return None
    groups: list[CpuSet] = []
    left = set(cpus)
    for cpu in sorted(cpus):
        if cpu in left:
            group = ((siblings(cpu) or frozenset()) & left) | {cpu}
            groups.append(frozenset(group))
            left -= group
    return tuple(groups)


def _cores(tree: Tree, cpus: CpuSet) -> tuple[CpuSet, ...] | None:
    groups = _groups(cpus, _CORE.reader(tree, cpus))
    several = next((group for group in groups or () if len(group) > 1), frozenset())
    if groups is None or len({_core_id(tree, cpu) for cpu in several}) <= 1:
        return groups
    # AMD family 15h lists both cores of a compute unit as siblings; their core ids differ.
    split = [part for group in groups for part in _by_core_id(tree, group)]
    return tuple(sorted(split, key=min))


def _by_core_id(tree: Tree, group: CpuSet) -> list[CpuSet]:
    ids = {cpu: _core_id(tree, cpu) for cpu in group}
    return [frozenset(c for c in group if ids[c] == number) for number in set(ids.values())]


def _core_id(tree: Tree, cpu: int) -> int | None:
    return _integer(tree, f"{_CPU}/cpu{cpu}/topology/core_id")


def _packages(tree: Tree, cpus: CpuSet) -> tuple[Package, ...] | None:
    groups = _groups(cpus, _PACKAGE.reader(tree, cpus))
    if groups is None:
        return None
    ids = [
        _integer(tree, f"{_CPU}/cpu{min(group)}/topology/physical_package_id") for group in groups
    ]
    if len(set(ids)) < len(ids) or any(number is None or number < 0 for number in ids):
        ids = list(range(len(groups)))  # −1 on machines whose firmware names no packages
    named = [Package(id=number or 0, cpus=group) for number, group in zip(ids, groups, strict=True)]
    return tuple(sorted(named, key=lambda package: package.id))


def _integer(tree: Tree, path: str) -> int | None:
    text = tree.read(path)
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def _l3(tree: Tree, cpus: CpuSet) -> tuple[CpuSet, ...] | None:
    if not any(tree.exists(f"{_CPU}/cpu{cpu}/cache") for cpu in sorted(cpus)[:1]):
        return None
    domains: list[CpuSet] = []
    left = set(cpus)
    for cpu in sorted(cpus):
        domain = (_l3_of(tree, cpu) or frozenset()) & left if cpu in left else frozenset()
        if domain:
            domains.append(domain)
            left -= domain
    return tuple(domains)


def _l3_of(tree: Tree, cpu: int) -> CpuSet | None:
    cache = f"{_CPU}/cpu{cpu}/cache"
    for name in reversed(tree.list(cache)):  # the outermost level comes last
        if _numbered(name, "index") and tree.read(f"{cache}/{name}/level") == "3":
            path = f"{cache}/{name}/shared_cpu"
            return cpu_list(tree, f"{path}_list") or cpu_mask(tree, f"{path}_map")
    return None


def _efficiency_cpus(tree: Tree, cores: tuple[CpuSet, ...]) -> CpuSet:
    """The CPUs of slow cores on a hybrid machine (case G5).

    Intel names them (``/sys/devices/cpu_atom``, Linux 5.13); Arm tells each CPU's capacity. On
    older kernels base frequencies tell, and are asked only where cores differ in their number
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
    return tuple(
        NumaNode(
            id=number,
            cpus=_node_cpus(tree, number) & cpus,
            has_memory=_has_memory(tree, number, with_memory),
            distances=_distances(tree, number, len(ids)),
        )
        for number in ids
    )


def _node_cpus(tree: Tree, number: int) -> CpuSet:
    path = f"{_NODE}/node{number}"
    listed = cpu_list(tree, f"{path}/cpulist")
    return (cpu_mask(tree, f"{path}/cpumap") if listed is None else listed) or frozenset()


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
