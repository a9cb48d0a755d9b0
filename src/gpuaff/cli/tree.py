"""A topology as text: a tree of packages, NUMA nodes and the GPUs that sit there."""

from __future__ import annotations

from gpuaff.cli import seats
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.text import Line, Span, counted, cpulist, line, listed, table
from gpuaff.topology.model import Gpu, NumaNode, Package, Topology

Row = tuple[Line, Line, Line]
"""Label, facts, where."""


def lines(topology: Topology, name: str, *, width: int | None = None) -> list[Line]:
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
        if node.cpus and seats.package_of_node(topology, node) is None:
            rows += _node(topology, node, "")
    if not rows and topology.cpus:
        rows.append((line(Span("CPUs", "head")), (), cpulist(topology.cpus)))
    return rows + _without_cpus(topology) + _elsewhere(topology)


def _package(topology: Topology, package: Package) -> list[Row]:
    facts = line(_cores(topology, package.cpus))
    rows = [(line(Span(f"package {package.id}", "head")), facts, cpulist(package.cpus))]
    for node in topology.numa_nodes or ():
        if seats.package_of_node(topology, node) == package:
            rows += _node(topology, node, "  ")
    return rows + [
        _gpu(topology, gpu, "  ", package.cpus) for gpu in seats.at_package(topology, package)
    ]


def _node(topology: Topology, node: NumaNode, indent: str) -> list[Row]:
    memory = {True: "memory", False: "no memory", None: ""}[node.has_memory]
    facts = [_cores(topology, node.cpus), _caches(topology, node.cpus), memory]
    label = line(indent, Span(f"node {node.id}", "head"))
    rows = [(label, listed(facts, ", "), cpulist(node.cpus))]
    return rows + [
        _gpu(topology, gpu, indent + "  ", node.cpus) for gpu in seats.at_node(topology, node)
    ]


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
    gpus = seats.elsewhere(topology)
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
