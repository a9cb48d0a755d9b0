"""A plan as text: a table of the ranks, and a picture of who has which core."""

from __future__ import annotations

import string
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gpuaff.allocator.model import Mode, Multithreading, Partition, Plan, Share
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.formatting import GAP, Line, Span, counted, cpulist, line, listed, plain, table
from gpuaff.topology.model import Gpu, NumaNode, Package, Topology

# Who sits where: the parts of a machine in which its GPUs are.


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a machine whose cores are drawn together.

    Attributes:
        name: ``node 3``.
        cpus: its CPUs.
        gpus: the GPUs that sit there.
    """

    name: str
    cpus: CpuSet
    gpus: tuple[Gpu, ...] = ()


def node_of(topology: Topology, gpu: Gpu) -> NumaNode | None:
    """The NUMA node with CPUs that a GPU sits at; None when it is not known to be just one."""
    nodes = [node for node in topology.numa_nodes or () if node.cpus]
    told = [node for node in nodes if node.id == gpu.numa_node]
    near = told or [node for node in nodes if node.cpus & (gpu.node_cpus or frozenset())]
    return near[0] if len(near) == 1 else None


def package_of(topology: Topology, gpu: Gpu) -> Package | None:
    """The package that a GPU sits at; None when it is not known to be just one."""
    near = gpu.node_cpus or gpu.socket_cpus or frozenset()
    found = [package for package in topology.packages or () if package.cpus & near]
    return found[0] if len(found) == 1 else None


def package_of_node(topology: Topology, node: NumaNode) -> Package | None:
    """The package that holds the whole of a node; None when there is none."""
    holders = (package for package in topology.packages or () if node.cpus <= package.cpus)
    return next(holders, None) if node.cpus else None


def at_node(topology: Topology, node: NumaNode) -> tuple[Gpu, ...]:
    """The GPUs that sit at a node."""
    return tuple(gpu for gpu in topology.gpus if node_of(topology, gpu) == node)


def at_package(topology: Topology, package: Package) -> tuple[Gpu, ...]:
    """The GPUs that sit at a package, but not at one node."""
    return tuple(
        gpu
        for gpu in topology.gpus
        if node_of(topology, gpu) is None and package_of(topology, gpu) == package
    )


def elsewhere(topology: Topology) -> tuple[Gpu, ...]:
    """The GPUs that sit at no one node or package, as far as is known."""
    return tuple(
        gpu
        for gpu in topology.gpus
        if node_of(topology, gpu) is None and package_of(topology, gpu) is None
    )


def regions_of(topology: Topology) -> list[Region]:
    """The parts to draw: the NUMA nodes, else the packages; then the CPUs that are in none."""
    parts = _parts(topology)
    everywhere = topology.cpus or topology.allowed
    rest = everywhere.difference(*(part.cpus for part in parts))
    return [*parts, Region("elsewhere" if parts else "CPUs", rest)] if rest else parts


def _parts(topology: Topology) -> list[Region]:
    if topology.numa_nodes:
        return [
            Region(f"node {node.id}", node.cpus, at_node(topology, node))
            for node in topology.numa_nodes
            if node.cpus
        ]
    return [
        Region(f"package {package.id}", package.cpus, at_package(topology, package))
        for package in topology.packages or ()
    ]


_Owners = dict[int, set[int]]
"""The ranks that have a CPU, by its id."""

_LETTERS = string.digits + string.ascii_letters
"""One for each rank; ranks above them share ``#``."""

_LONGEST = 64
"""Cores in one row of the picture, where the terminal is wide enough."""

_CUTTING = (Mode.UNIQUE_CONTIGUOUS, Mode.UNIQUE_INTERLEAVED, Mode.CORE_COMPLEX)
"""The modes that heed whether shares are balanced."""

_MEANINGS = {
    ".": "free",
    "+": "kept free for helpers",
    "-": "not allowed",
    "*": "several ranks",
    "#": f"a rank above {len(_LETTERS) - 1}",
}


def plan_lines(
    topology: Topology, plan: Plan, name: str, *, width: int | None = None
) -> list[Line]:
    """The whole text.

    Args:
        topology: what the plan was made for.
        plan: what to show.
        name: what to call the machine.
        width: the terminal's; None when the text must not be broken.
    """
    return [
        line(Span(name, "head"), f": {', '.join(_choices(plan))}"),
        (),
        *_table(plan, width),
        *_picture(topology, plan, width),
    ]


def _choices(plan: Plan) -> list[str]:
    choices = [counted(len(plan.shares), "rank"), str(plan.mode), f"by {plan.scope}"]
    if plan.multithreading is not Multithreading.ALL_LOGICAL:
        choices.append(str(plan.multithreading))
    if not plan.balanced and plan.mode in _CUTTING:
        choices.append("unbalanced")
    if plan.partition is not Partition.JOB:
        choices.append(f"cut by {plan.partition}")
    return choices


def _table(plan: Plan, width: int | None) -> list[Line]:
    titles = ["rank", "GPU", "NUMA", "cores", "source", "CPUs"]
    reserved = any(share.reserved for share in plan.shares)
    rows = [[line(Span(title, "head")) for title in titles + ["reserved"] * reserved]]
    rows += [_row(share) + _reserved(share) * reserved for share in plan.shares]
    return table(rows, width=width, right=(0, 1, 2, 3))


def _row(share: Share) -> list[Line]:
    style = f"rank:{share.rank}"
    return [
        line(Span(str(share.rank), style)),
        line("-" if share.gpu is None else str(share.gpu)),
        line(format_cpulist(share.numa_nodes) or "-"),
        line(str(share.cores)),
        line(str(share.source)),
        cpulist(share.cpus, style) or line("-"),
    ]


def _reserved(share: Share) -> list[Line]:
    return [cpulist(share.reserved, f"rank:{share.rank}") or line("-")]


def _picture(topology: Topology, plan: Plan, width: int | None) -> list[Line]:
    owners = _owners((share.rank, share.cpus) for share in plan.shares)
    keepers = _owners((share.rank, share.reserved) for share in plan.shares)
    regions = regions_of(topology)
    strips = [_strip(topology, region.cpus, owners, keepers) for region in regions]
    used = {span.text[0] for strip in strips for span in strip}
    rows = [
        row
        for region, strip in zip(regions, strips, strict=True)
        for row in _region(region, strip, _room(regions, width))
    ]
    return [(), line(Span(_legend(used, cores=topology.cores is not None), "dim"))] + (
        table(rows, width=width) if rows else []
    )


def _legend(used: Iterable[str], *, cores: bool) -> str:
    meanings = [f"{sign} {meaning}" for sign, meaning in _MEANINGS.items() if sign in set(used)]
    what = "one character a core" if cores else "one character a CPU (cores are not known)"
    return ", ".join([f"{what}: the rank that has it", *meanings])


def _owners(held: Iterable[tuple[int, CpuSet]]) -> _Owners:
    owners: _Owners = defaultdict(set)
    for rank, cpus in held:
        for cpu in cpus:
            owners[cpu].add(rank)
    return owners


def _strip(topology: Topology, cpus: CpuSet, owners: _Owners, keepers: _Owners) -> Line:
    """The cores of a region, a blank after each L3 domain."""
    cores = _cores_in(topology, cpus)
    domain = {cpu: number for number, cpus in enumerate(topology.l3 or ()) for cpu in cpus}
    domains = [domain.get(min(core)) for core in cores]
    blanks = [" " if here != after else "" for here, after in pairwise(domains)]
    return tuple(
        _sign(_ranks(core, owners), blank) or _unused(core, topology.allowed, keepers, blank)
        for core, blank in zip(cores, [*blanks, ""], strict=True)
    )


def _cores_in(topology: Topology, cpus: CpuSet) -> list[CpuSet]:
    if topology.cores is None:
        return [frozenset({cpu}) for cpu in sorted(cpus)]
    known = [core for core in topology.cores if core & cpus]
    rest = cpus.difference(*known)
    return known + [frozenset({cpu}) for cpu in sorted(rest)]


def _ranks(core: CpuSet, owners: _Owners) -> set[int]:
    return {rank for cpu in core for rank in owners.get(cpu, ())}


def _unused(core: CpuSet, allowed: CpuSet, keepers: _Owners, blank: str) -> Span:
    """A core that no rank has; one that is kept for a rank's helpers has the rank's colour."""
    ranks = sorted(_ranks(core, keepers))
    if ranks:
        return Span("+" + blank, f"rank:{ranks[0]}" if len(ranks) == 1 else "dim")
    return Span(("." if core & allowed else "-") + blank, "dim")


def _sign(ranks: set[int], blank: str) -> Span | None:
    if not ranks:
        return None
    if len(ranks) > 1:
        return Span("*" + blank, "bad")
    (rank,) = ranks
    return Span((_LETTERS[rank] if rank < len(_LETTERS) else "#") + blank, f"rank:{rank}")


def _region(region: Region, strip: Line, room: int) -> list[list[Line]]:
    gpus = format_cpulist(gpu.index for gpu in region.gpus)
    first, *rest = [strip[start : start + room] for start in range(0, len(strip), room)]
    name = line(Span(region.name, "head"))
    sitting = line(Span(f"GPU {gpus}" if gpus else "", "gpu"))
    return [
        [name, sitting, first, cpulist(region.cpus)],
        *([(), (), piece, ()] for piece in rest),
    ]


def _room(regions: Sequence[Region], width: int | None) -> int:
    """How many cores fit into one row, in eights."""
    if width is None or not regions:
        return _LONGEST
    names = max(len(region.name) for region in regions)
    gpus = max(len(f"GPU {format_cpulist(g.index for g in r.gpus)}") for r in regions)
    lists = min(24, max(len(plain(cpulist(region.cpus))) for region in regions))
    free = (width - names - gpus - lists - 3 * GAP) * 4 // 5  # a fifth for the blanks
    return max(8, min(_LONGEST, free // 8 * 8))


# A topology as text: a tree of packages, NUMA nodes and the GPUs that sit there.


Row = tuple[Line, Line, Line]
"""Label, facts, where."""


def topology_lines(topology: Topology, name: str, *, width: int | None = None) -> list[Line]:
    """The whole text.

    Args:
        topology: what to show.
        name: what to call the machine.
        width: the terminal's; None when the text must not be broken.
    """
    return [
        *_head(topology, name),
        *table(_rows(topology), width=width),
        *_links(topology),
    ]


def _head(topology: Topology, name: str) -> list[Line]:
    head = [line(Span(name, "head"), f": {', '.join(_counts(topology))}")]
    untold = _untold(topology)
    if untold:
        head.append(line(Span(f"not told: {', '.join(untold)}", "dim")))
    if topology.allowed != topology.cpus:
        share = f" ({len(topology.allowed)} of {counted(len(topology.cpus), 'CPU')})"
        head.append(line("allowed: ", *cpulist(topology.allowed), share))
    if topology.efficiency_cpus:
        head.append(line("slow cores: ", *cpulist(topology.efficiency_cpus)))
    return head


def _counts(topology: Topology) -> list[str]:
    counts = [counted(len(topology.cpus), "CPU") if topology.cpus else "CPUs unknown"]
    if topology.cores:
        counts.append(counted(len(topology.cores), "core") + _threads(topology.cores))
    if topology.packages:
        counts.append(counted(len(topology.packages), "package"))
    if topology.numa_nodes:
        with_cpus = sum(1 for node in topology.numa_nodes if node.cpus)
        some = "" if with_cpus == len(topology.numa_nodes) else f" ({with_cpus} with CPUs)"
        counts.append(counted(len(topology.numa_nodes), "NUMA node") + some)
    counts.append(counted(len(topology.gpus), "GPU") if topology.gpus else "no GPU")
    return counts


def _threads(cores: tuple[CpuSet, ...]) -> str:
    sizes = sorted({len(core) for core in cores})
    if sizes == [1]:
        return ""
    return f" of {'-'.join(map(str, (sizes[0], sizes[-1])[: len(sizes)]))} CPUs"


def _untold(topology: Topology) -> list[str]:
    parts = {
        "cores": topology.cores,
        "packages": topology.packages,
        "L3 caches": topology.l3,
        "NUMA nodes": topology.numa_nodes,
    }
    return [name for name, value in parts.items() if value is None]


def _rows(topology: Topology) -> list[Row]:
    rows: list[Row] = []
    for package in topology.packages or ():
        rows += _package(topology, package)
    for node in topology.numa_nodes or ():
        if node.cpus and package_of_node(topology, node) is None:
            rows += _node(topology, node, "")
    if not rows and topology.cpus:
        rows.append((line(Span("CPUs", "head")), (), cpulist(topology.cpus)))
    return rows + _without_cpus(topology) + _elsewhere(topology)


def _package(topology: Topology, package: Package) -> list[Row]:
    facts = line(_cores(topology, package.cpus))
    rows = [(line(Span(f"package {package.id}", "head")), facts, cpulist(package.cpus))]
    for node in topology.numa_nodes or ():
        if package_of_node(topology, node) == package:
            rows += _node(topology, node, "  ")
    return rows + [_gpu(topology, gpu, "  ", package.cpus) for gpu in at_package(topology, package)]


def _node(topology: Topology, node: NumaNode, indent: str) -> list[Row]:
    memory = {True: "memory", False: "no memory", None: ""}[node.has_memory]
    facts = [_cores(topology, node.cpus), _caches(topology, node.cpus), memory]
    label = line(indent, Span(f"node {node.id}", "head"))
    rows = [(label, listed(facts, ", "), cpulist(node.cpus))]
    return rows + [_gpu(topology, gpu, indent + "  ", node.cpus) for gpu in at_node(topology, node)]


def _cores(topology: Topology, cpus: CpuSet) -> str:
    if topology.cores is None:
        return counted(len(cpus), "CPU")
    return counted(sum(1 for core in topology.cores if core & cpus), "core")


def _caches(topology: Topology, cpus: CpuSet) -> str:
    domains = sum(1 for domain in topology.l3 or () if domain & cpus)
    return f"{domains} L3" if domains else ""


def _without_cpus(topology: Topology) -> list[Row]:
    nodes = [node for node in topology.numa_nodes or () if not node.cpus]
    if not nodes:
        return []
    ids = format_cpulist(node.id for node in nodes)
    label = line(Span(f"node{'' if len(nodes) == 1 else 's'} {ids}", "head"))
    return [(label, line("no CPUs"), ())]


def _elsewhere(topology: Topology) -> list[Row]:
    gpus = elsewhere(topology)
    if not gpus:
        return []
    is_all = not topology.packages and not topology.numa_nodes
    label = line(Span("GPUs" if is_all else "elsewhere", "head"))
    return [(label, (), ()), *(_gpu(topology, gpu, "  ") for gpu in gpus)]


def _gpu(topology: Topology, gpu: Gpu, indent: str, here: CpuSet = frozenset()) -> Row:
    label = line(indent, Span(f"GPU {gpu.index}", "gpu"))
    facts = [gpu.name or "", _cuda(topology, gpu), *_oddities(gpu, here)]
    return (label, listed(facts, ", "), line(gpu.pci_bus_id or ""))


def _cuda(topology: Topology, gpu: Gpu) -> str:
    """Which CUDA devices it is: ``cuda:0``."""
    places = [str(n) for n, index in enumerate(topology.visible) if index == gpu.index]
    return f"cuda:{','.join(places)}" if places else "hidden"


def _oddities(gpu: Gpu, here: CpuSet) -> list[str]:
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
