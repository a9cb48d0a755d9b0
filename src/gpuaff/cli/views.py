"""Topologies and plans as text.

A topology is a tree of packages, NUMA nodes and the GPUs there; a plan is a table of the ranks and
a picture of the cores.
"""

from __future__ import annotations

import string
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gpuaff.allocator.model import Mode, Multithreading, Partition, Plan, Share
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.formatting import GAP, Line, Span, counted, cpulist, line, listed, table
from gpuaff.topology.model import Gpu, NumaNode, Package, Topology

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    _Owners: TypeAlias = defaultdict[int, set[int]]
    """The ranks of each CPU."""

_LETTERS = string.digits + string.ascii_letters
"""The sign of each rank."""

_LONGEST = 64
"""The most cores in one row of the picture."""

_BALANCING = (Mode.UNIQUE_CONTIGUOUS, Mode.UNIQUE_INTERLEAVED, Mode.CORE_COMPLEX)
"""The modes for which ``balanced`` matters."""

_MEANINGS = {
    ".": "free",
    "+": "kept free for helpers",
    "-": "not allowed",
    "*": "several ranks",
    "#": f"a rank above {len(_LETTERS) - 1}",
}


# Where the GPUs are.


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a machine whose cores are drawn together.

    Attributes:
        name: ``node 3``.
        cpus: its CPUs.
        gpus: the GPUs there.
    """

    name: str
    cpus: CpuSet
    gpus: tuple[Gpu, ...] = ()


def node_of(topology: Topology, gpu: Gpu) -> NumaNode | None:
    """The NUMA node of a GPU, one with CPUs; None when it is unknown, or not just one."""
    nodes = [node for node in topology.numa_nodes or () if node.cpus]
    named = [node for node in nodes if node.id == gpu.numa_node]
    near = named or [node for node in nodes if node.cpus & (gpu.node_cpus or frozenset())]
    return near[0] if len(near) == 1 else None


def package_of(topology: Topology, gpu: Gpu) -> Package | None:
    """The package of a GPU; None when it is unknown, or not just one."""
    near = gpu.node_cpus or gpu.socket_cpus or frozenset()
    found = [package for package in topology.packages or () if package.cpus & near]
    return found[0] if len(found) == 1 else None


def package_of_node(topology: Topology, node: NumaNode) -> Package | None:
    """The package that holds the whole of a node; None when there is none."""
    holders = (package for package in topology.packages or () if node.cpus <= package.cpus)
    return next(holders, None) if node.cpus else None


def at_node(topology: Topology, node: NumaNode) -> tuple[Gpu, ...]:
    """The GPUs at a node."""
    return tuple(gpu for gpu in topology.gpus if node_of(topology, gpu) == node)


def at_package(topology: Topology, package: Package | None) -> tuple[Gpu, ...]:
    """The GPUs at a package, but not at one node; None: those at no one node or package."""
    return tuple(
        gpu
        for gpu in topology.gpus
        if node_of(topology, gpu) is None and package_of(topology, gpu) == package
    )


def regions_of(topology: Topology) -> list[Region]:
    """The NUMA nodes, else the packages; then the CPUs that are in none."""
    parts = [
        Region(f"node {node.id}", node.cpus, at_node(topology, node))
        for node in topology.numa_nodes or ()
        if node.cpus
    ]
    if not topology.numa_nodes:
        parts = [
            Region(f"socket {package.id}", package.cpus, at_package(topology, package))
            for package in topology.packages or ()
        ]
    every = topology.cpus or topology.allowed
    rest = every.difference(*(part.cpus for part in parts))
    return [*parts, Region("elsewhere" if parts else "CPUs", rest)] if rest else parts


# A plan.


def plan_lines(
    topology: Topology, plan: Plan, name: str, *, width: int | None = None
) -> list[Line]:
    """A plan: what was chosen, a table of the ranks, a picture of the cores.

    Args:
        topology: what the plan was made for.
        plan: what to show.
        name: the machine's name.
        width: the terminal's; None breaks no line.
    """
    return [
        line(Span(name, "head"), f": {', '.join(_choices(plan))}"),
        (),
        *_shares(plan, width),
        (),
        *_picture(topology, plan, width),
    ]


def _choices(plan: Plan) -> list[str]:
    choices = [counted(len(plan.shares), "rank"), str(plan.mode), f"by {plan.scope}"]
    if plan.multithreading is not Multithreading.ALL_LOGICAL:
        choices.append(str(plan.multithreading))
    if not plan.balanced and plan.mode in _BALANCING:
        choices.append("unbalanced")
    if plan.partition is not Partition.JOB:
        choices.append(f"cut by {plan.partition}")
    return choices


def _shares(plan: Plan, width: int | None) -> list[Line]:
    titles = ["rank", "GPU", "NUMA", "cores", "source", "CPUs", "reserved"]
    rows = [[line(Span(title, "head")) for title in titles], *map(_share, plan.shares)]
    if not any(share.reserved for share in plan.shares):
        rows = [row[:-1] for row in rows]
    return table(rows, width=width, right=(0, 1, 2, 3))


def _share(share: Share) -> list[Line]:
    style = f"rank:{share.rank}"
    return [
        line(Span(str(share.rank), style)),
        line("-" if share.gpu is None else str(share.gpu)),
        line(format_cpulist(share.numa_nodes) or "-"),
        line(str(share.cores)),
        line(str(share.source)),
        cpulist(share.cpus, style) or line("-"),
        cpulist(share.reserved, style) or line("-"),
    ]


def _picture(topology: Topology, plan: Plan, width: int | None) -> list[Line]:
    owners = _owners((share.rank, share.cpus) for share in plan.shares)
    keepers = _owners((share.rank, share.reserved) for share in plan.shares)
    regions = regions_of(topology)
    strips = [_strip(topology, region.cpus, owners, keepers) for region in regions]
    signs = {span.text[0] for strip in strips for span in strip}
    room = _room(regions, width)
    rows = [row for pair in zip(regions, strips, strict=True) for row in _rows_of(*pair, room)]
    legend = line(Span(_legend(signs, cores=topology.cores is not None), "dim"))
    return [legend, *table(rows, width=width)]


def _owners(held: Iterable[tuple[int, CpuSet]]) -> _Owners:
    owners: _Owners = defaultdict(set)
    for rank, cpus in held:
        for cpu in cpus:
            owners[cpu].add(rank)
    return owners


def _strip(topology: Topology, cpus: CpuSet, owners: _Owners, keepers: _Owners) -> Line:
    """The cores of a region, a blank after each L3 domain."""
    cores = [core for core in topology.cores or () if core & cpus]
    cores += [frozenset({cpu}) for cpu in sorted(cpus.difference(*cores))]
    domain = {cpu: number for number, shared in enumerate(topology.l3 or ()) for cpu in shared}
    domains = [domain.get(min(core)) for core in cores]
    blanks = [" " if here != after else "" for here, after in pairwise([*domains, *domains[-1:]])]
    signs = [_sign(core, topology.allowed, owners, keepers) for core in cores]
    return tuple(
        Span(sign.text + blank, sign.style) for sign, blank in zip(signs, blanks, strict=True)
    )


def _sign(core: CpuSet, allowed: CpuSet, owners: _Owners, keepers: _Owners) -> Span:
    ranks = sorted({rank for cpu in core for rank in owners.get(cpu, ())})
    if len(ranks) > 1:
        return Span("*", "bad")
    if ranks:
        return Span((_LETTERS + "#")[min(ranks[0], len(_LETTERS))], f"rank:{ranks[0]}")
    kept = {rank for cpu in core for rank in keepers.get(cpu, ())}
    if kept:
        return Span("+", f"rank:{min(kept)}" if len(kept) == 1 else "dim")
    return Span("." if core & allowed else "-", "dim")


def _legend(signs: set[str], *, cores: bool) -> str:
    meanings = [f"{sign} {meaning}" for sign, meaning in _MEANINGS.items() if sign in signs]
    unit = "one character a core" if cores else "one character a CPU (cores are not known)"
    return ", ".join([f"{unit}: the rank that has it", *meanings])


def _rows_of(region: Region, strip: Line, room: int) -> list[list[Line]]:
    first, *rest = [strip[start : start + room] for start in range(0, len(strip), room)]
    head = [line(Span(region.name, "head")), line(Span(_gpus_of(region), "gpu"))]
    return [[*head, first, cpulist(region.cpus)], *([(), (), piece, ()] for piece in rest)]


def _gpus_of(region: Region) -> str:
    return f"GPU {format_cpulist(gpu.index for gpu in region.gpus)}" if region.gpus else ""


def _room(regions: Sequence[Region], width: int | None) -> int:
    """How many cores fit into one row, in eights."""
    if width is None or not regions:
        return _LONGEST
    names = max(len(region.name) for region in regions)
    gpus = max(len(_gpus_of(region)) for region in regions)
    lists = min(24, max(len(format_cpulist(region.cpus)) for region in regions))
    free = (width - names - gpus - lists - 3 * GAP) * 4 // 5  # a fifth for the blanks
    return max(8, min(_LONGEST, free // 8 * 8))


# A topology.


def topology_lines(topology: Topology, name: str, *, width: int | None = None) -> list[Line]:
    """A topology: a tree of sockets, NUMA nodes and GPUs, and the GPUs' links.

    Args:
        topology: what to show.
        name: the machine's name.
        width: the terminal's; None breaks no line.
    """
    return [
        *_head(topology, name),
        *table(_tree(topology), width=width),
        *_links(topology),
    ]


def _head(topology: Topology, name: str) -> list[Line]:
    head = [line(Span(name, "head"), f": {', '.join(_counts(topology))}")]
    unknown = _unknown(topology)
    if unknown:
        head.append(line(Span(f"unknown: {', '.join(unknown)}", "dim")))
    if topology.allowed != topology.cpus:
        share = f" ({len(topology.allowed)} of {counted(len(topology.cpus), 'CPU')})"
        head.append(line("allowed: ", *cpulist(topology.allowed), share))
    if topology.efficiency_cpus:
        head.append(line("efficiency cores: ", *cpulist(topology.efficiency_cpus)))
    return head


def _counts(topology: Topology) -> list[str]:
    """``2 sockets, 64 cores, 128 CPUs (2 threads per core), 2 NUMA nodes, 8 GPUs``."""
    counts = []
    if topology.packages:
        counts.append(counted(len(topology.packages), "socket"))
    if topology.cores:
        counts.append(counted(len(topology.cores), "core"))
    cpus = counted(len(topology.cpus), "CPU") + _threads(topology)
    counts.append(cpus if topology.cpus else "no CPU known")
    if topology.numa_nodes:
        with_cpus = sum(1 for node in topology.numa_nodes if node.cpus)
        some = "" if with_cpus == len(topology.numa_nodes) else f" ({with_cpus} with CPUs)"
        counts.append(counted(len(topology.numa_nodes), "NUMA node") + some)
    return [*counts, counted(len(topology.gpus), "GPU") if topology.gpus else "no GPU"]


def _threads(topology: Topology) -> str:
    sizes = sorted({len(core) for core in topology.cores or ()})
    if sizes in ([], [1]):
        return ""
    return f" ({'-'.join(map(str, dict.fromkeys((sizes[0], sizes[-1]))))} threads per core)"


def _unknown(topology: Topology) -> list[str]:
    parts = {
        "cores": topology.cores,
        "sockets": topology.packages,
        "L3 caches": topology.l3,
        "NUMA nodes": topology.numa_nodes,
    }
    return [name for name, value in parts.items() if value is None]


def _tree(topology: Topology) -> list[list[Line]]:
    rows: list[list[Line]] = []
    for package in topology.packages or ():
        rows += _package(topology, package)
    for node in topology.numa_nodes or ():
        if node.cpus and package_of_node(topology, node) is None:
            rows += _node(topology, node, "")
    if not rows and topology.cpus:
        rows.append([line(Span("CPUs", "head")), (), cpulist(topology.cpus)])
    return rows + _nodes_without_cpus(topology) + _elsewhere(topology)


def _package(topology: Topology, package: Package) -> list[list[Line]]:
    label = line(Span(f"socket {package.id}", "head"))
    rows = [[label, line(_cores(topology, package.cpus)), cpulist(package.cpus)]]
    for node in topology.numa_nodes or ():
        if package_of_node(topology, node) == package:
            rows += _node(topology, node, "  ")
    return rows + [_gpu(topology, gpu, "  ", package.cpus) for gpu in at_package(topology, package)]


def _node(topology: Topology, node: NumaNode, indent: str) -> list[list[Line]]:
    memory = {True: "memory", False: "no memory", None: ""}[node.has_memory]
    caches = sum(1 for domain in topology.l3 or () if domain & node.cpus)
    facts = [_cores(topology, node.cpus), f"{caches} L3" if caches else "", memory]
    label = line(indent, Span(f"node {node.id}", "head"))
    rows = [[label, listed(facts, ", "), cpulist(node.cpus)]]
    return rows + [_gpu(topology, gpu, indent + "  ", node.cpus) for gpu in at_node(topology, node)]


def _cores(topology: Topology, cpus: CpuSet) -> str:
    if topology.cores is None:
        return counted(len(cpus), "CPU")
    return counted(sum(1 for core in topology.cores if core & cpus), "core")


def _nodes_without_cpus(topology: Topology) -> list[list[Line]]:
    ids = [node.id for node in topology.numa_nodes or () if not node.cpus]
    label = line(Span(f"node{'' if len(ids) == 1 else 's'} {format_cpulist(ids)}", "head"))
    return [[label, line("no CPUs"), ()]] if ids else []


def _elsewhere(topology: Topology) -> list[list[Line]]:
    rows = [_gpu(topology, gpu, "  ") for gpu in at_package(topology, None)]
    title = "elsewhere" if topology.packages or topology.numa_nodes else "GPUs"
    return [[line(Span(title, "head")), (), ()], *rows] if rows else []


def _gpu(topology: Topology, gpu: Gpu, indent: str, here: CpuSet = frozenset()) -> list[Line]:
    label = line(indent, Span(f"GPU {gpu.index}", "gpu"))
    devices = [str(n) for n, index in enumerate(topology.visible) if index == gpu.index]
    cuda = f"cuda:{','.join(devices)}" if devices else "hidden"
    facts = listed([gpu.name or "", cuda, *_remarks(gpu, here)], ", ")
    return [label, facts, line(gpu.pci_bus_id or "")]


def _remarks(gpu: Gpu, here: CpuSet) -> list[str]:
    found = []
    if gpu.node_cpus is None and not here:
        found.append("near CPUs unknown")
    elif gpu.node_cpus and gpu.node_cpus != here:
        found.append(f"near {format_cpulist(gpu.node_cpus)}")
    if not here and gpu.numa_node is not None:
        found.append(f"node {gpu.numa_node}")
    if gpu.memory_node is not None:
        found.append(f"its memory is node {gpu.memory_node}")
    if gpu.mig is not None:
        found.append(f"MIG: {counted(len(gpu.mig), 'instance')}")
    return found


def _links(topology: Topology) -> list[Line]:
    """How the GPUs are connected, as ``nvidia-smi topo -m`` shows it."""
    if topology.links is None or len(topology.gpus) < 2:
        return []
    names = [line(Span(str(gpu.index), "gpu")) for gpu in topology.gpus]
    rows = [[line(Span("GPU", "head")), *names]]
    for name, links in zip(names, topology.links, strict=False):
        rows.append([name, *(line(Span(link, "dim" if link == "X" else "")) for link in links)])
    return [(), *table(rows, right=range(len(names) + 1))]
