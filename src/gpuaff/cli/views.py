"""Topologies as trees of packages, NUMA nodes and GPUs; plans as tables and pictures of cores."""

from __future__ import annotations

import string
from collections.abc import Iterator

from gpuaff.allocator.model import Mode, Multithreading, Partition, Plan, Share
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.formatting import Line, Row, Span, Table, counted, cpulist, line, listed, titled
from gpuaff.topology.model import Gpu, NumaNode, Package, Topology

_LETTERS = string.digits + string.ascii_letters  # the sign of each rank

# The modes for which ``balanced`` matters.
_BALANCING = (Mode.UNIQUE_CONTIGUOUS, Mode.UNIQUE_INTERLEAVED, Mode.CORE_COMPLEX)

_MEANINGS = {
    ".": "free",
    "+": "kept free for helpers",
    "-": "not allowed",
    "*": "several ranks",
    "#": f"a rank above {len(_LETTERS) - 1}",
}


# Where the GPUs are.


def place_of(topology: Topology, gpu: Gpu) -> NumaNode | Package | None:
    """The NUMA node of a GPU, one with CPUs, or else its package; None: unknown, or several."""
    near = gpu.node_cpus or frozenset()
    nodes = [node for node in topology.numa_nodes or () if node.cpus]
    named = [node for node in nodes if node.id == gpu.numa_node]
    nodes = named or [node for node in nodes if node.cpus & near]
    near = near or gpu.socket_cpus or frozenset()
    packages = [package for package in topology.packages or () if package.cpus & near]
    places = nodes if len(nodes) == 1 else packages
    return places[0] if len(places) == 1 else None


def gpus_at(topology: Topology, place: NumaNode | Package | None) -> list[Gpu]:
    """The GPUs at a NUMA node; at a package, but not at one node; at no one node or package."""
    return [gpu for gpu in topology.gpus if place_of(topology, gpu) == place]


def regions_of(topology: Topology) -> list[tuple[str, CpuSet, list[Gpu]]]:
    """The NUMA nodes, else the packages; then the CPUs that are in none: name, CPUs and GPUs."""
    kind = "node" if topology.numa_nodes else "socket"
    parts = [
        (f"{kind} {place.id}", place.cpus, gpus_at(topology, place))
        for place in topology.numa_nodes or topology.packages or ()
        if place.cpus
    ]
    rest = (topology.cpus or topology.allowed).difference(*(cpus for _, cpus, _ in parts))
    return [*parts, ("elsewhere" if parts else "CPUs", rest, [])] if rest else parts


# A plan.


def plan_blocks(topology: Topology, plan: Plan, name: str) -> list[Line | Table]:
    """A plan: what was chosen, a table of the ranks, a picture of the cores."""
    choices = [counted(len(plan.shares), "rank"), str(plan.mode), f"by {plan.scope}"]
    if plan.multithreading is not Multithreading.ALL_LOGICAL:
        choices.append(str(plan.multithreading))
    if not plan.balanced and plan.mode in _BALANCING:
        choices.append("unbalanced")
    if plan.partition is not Partition.JOB:
        choices.append(f"cut by {plan.partition}")
    heading = line(Span(name, "head"), f": {', '.join(choices)}")
    titles, rows = "rank GPU NUMA cores source CPUs reserved", [*map(_share, plan.shares)]
    if not any(share.reserved for share in plan.shares):
        titles, rows = titles.removesuffix(" reserved"), [row[:-1] for row in rows]
    table = titled(titles, rows, right=(0, 1, 2, 3))
    return [heading, (), table, (), *_picture(topology, plan)]


def _share(share: Share) -> Row:
    style = f"rank:{share.rank}"
    return [
        Span(str(share.rank), style),
        "-" if share.gpu is None else str(share.gpu),
        format_cpulist(share.numa_nodes) or "-",
        str(share.cores),
        str(share.source),
        cpulist(share.cpus, style) or "-",
        cpulist(share.reserved, style) or "-",
    ]


def _picture(topology: Topology, plan: Plan) -> Iterator[Line | Table]:
    rows: list[Row] = []
    signs = set()
    for name, cpus, gpus in regions_of(topology):
        strip = _strip(topology, plan, cpus)
        signs |= {span.text[0] for span in strip}
        numbers = format_cpulist(gpu.index for gpu in gpus)
        label = Span(f"GPU {numbers}" if numbers else "", "gpu")
        rows.append([Span(name, "head"), label, strip, cpulist(cpus)])
    unit = "a core" if topology.cores is not None else "a CPU (cores are not known)"
    legend = [f"one character {unit}: the rank that has it"]
    legend += [f"{sign} {meaning}" for sign, meaning in _MEANINGS.items() if sign in signs]
    yield line(Span(", ".join(legend), "dim"))
    if rows:
        yield Table(rows)


def _strip(topology: Topology, plan: Plan, cpus: CpuSet) -> Line:
    """The cores of a region, a blank after each L3 domain."""
    cores = [core for core in topology.cores or () if core & cpus]
    cores += [frozenset({cpu}) for cpu in sorted(cpus.difference(*cores))]
    l3 = {cpu: number for number, domain in enumerate(topology.l3 or ()) for cpu in domain}
    domains = [l3.get(min(core)) for core in cores]
    spans = []
    for core, here, after in zip(cores, domains, [*domains[1:], *domains[-1:]], strict=True):
        ranks = sorted(share.rank for share in plan.shares if share.cpus & core)
        kept = [share.rank for share in plan.shares if share.reserved & core]
        sign, style = "." if core & topology.allowed else "-", "dim"
        if len(ranks) > 1:
            sign, style = "*", "bad"
        elif ranks:
            sign, style = (_LETTERS + "#")[min(ranks[0], len(_LETTERS))], f"rank:{ranks[0]}"
        elif kept:
            sign, style = "+", f"rank:{kept[0]}" if len(kept) == 1 else "dim"
        spans.append(Span(sign + (" " if here != after else ""), style))
    return tuple(spans)


# A topology.


def topology_blocks(topology: Topology, name: str) -> list[Line | Table]:
    """A topology: a tree of sockets, NUMA nodes and GPUs, and the GPUs' links."""
    tree = list(_tree(topology))
    blocks: list[Line | Table] = [*_head(topology, name), *([Table(tree)] if tree else [])]
    if topology.links is None or len(topology.gpus) < 2:
        return blocks
    # As ``nvidia-smi topo -m`` shows it.
    names = [Span(str(gpu.index), "gpu") for gpu in topology.gpus]
    rows = [[Span("GPU", "head"), *names]]
    for gpu, links in zip(names, topology.links, strict=False):
        rows.append([gpu, *(Span(link, "dim" if link == "X" else "") for link in links)])
    return [*blocks, (), Table(rows, right=range(len(names) + 1))]


def _head(topology: Topology, name: str) -> Iterator[Line]:
    yield line(Span(name, "head"), f": {', '.join(_counts(topology))}")
    parts = {
        "cores": topology.cores,
        "sockets": topology.packages,
        "L3 caches": topology.l3,
        "NUMA nodes": topology.numa_nodes,
    }
    if unknown := [name for name, part in parts.items() if part is None]:
        yield line(Span(f"unknown: {', '.join(unknown)}", "dim"))
    if topology.allowed != topology.cpus:
        share = f" ({len(topology.allowed)} of {counted(len(topology.cpus), 'CPU')})"
        yield line("allowed: ", cpulist(topology.allowed), share)
    if topology.efficiency_cpus:
        yield line("efficiency cores: ", cpulist(topology.efficiency_cpus))


def _counts(topology: Topology) -> Iterator[str]:
    """``2 sockets, 64 cores, 128 CPUs (2 threads per core), 2 NUMA nodes, 8 GPUs``."""
    if topology.packages:
        yield counted(len(topology.packages), "socket")
    if topology.cores:
        yield counted(len(topology.cores), "core")
    sizes = sorted({len(core) for core in topology.cores or ()})
    threads = "-".join(map(str, dict.fromkeys((sizes[0], sizes[-1])))) if sizes else "1"
    per_core = f" ({threads} threads per core)" if threads != "1" else ""
    yield counted(len(topology.cpus), "CPU") + per_core if topology.cpus else "no CPU known"
    if nodes := topology.numa_nodes:
        with_cpus = sum(1 for node in nodes if node.cpus)
        some = "" if with_cpus == len(nodes) else f" ({with_cpus} with CPUs)"
        yield counted(len(nodes), "NUMA node") + some
    yield counted(len(topology.gpus), "GPU") if topology.gpus else "no GPU"


def _tree(topology: Topology) -> Iterator[Row]:
    nodes = [node for node in topology.numa_nodes or () if node.cpus]
    packages = topology.packages or ()
    for package in packages:
        yield from _place(topology, package, "")
        for node in nodes:
            if node.cpus <= package.cpus:
                yield from _place(topology, node, "  ")
        yield from _gpus(topology, package, "  ")
    for node in nodes:
        if not any(node.cpus <= package.cpus for package in packages):
            yield from _place(topology, node, "")
    if topology.cpus and not nodes and not packages:
        yield Span("CPUs", "head"), "", cpulist(topology.cpus)
    if bare := [node.id for node in topology.numa_nodes or () if not node.cpus]:
        title = f"node{'' if len(bare) == 1 else 's'} {format_cpulist(bare)}"
        yield Span(title, "head"), "no CPUs", ""
    if gpus_at(topology, None):
        is_all = not packages and not topology.numa_nodes
        yield Span("GPUs" if is_all else "elsewhere", "head"), "", ""
        yield from _gpus(topology, None, "  ")


def _place(topology: Topology, place: NumaNode | Package, indent: str) -> Iterator[Row]:
    cores = sum(1 for core in topology.cores or () if core & place.cpus)
    facts = [counted(len(place.cpus), "CPU") if topology.cores is None else counted(cores, "core")]
    if isinstance(place, Package):
        yield Span(f"socket {place.id}", "head"), facts[0], cpulist(place.cpus)
        return
    if caches := sum(1 for domain in topology.l3 or () if domain & place.cpus):
        facts.append(f"{caches} L3")
    facts.append({True: "memory", False: "no memory", None: ""}[place.has_memory])
    label = line(indent, Span(f"node {place.id}", "head"))
    yield label, listed(facts, ", "), cpulist(place.cpus)
    yield from _gpus(topology, place, indent + "  ")


def _gpus(topology: Topology, place: NumaNode | Package | None, indent: str) -> Iterator[Row]:
    here = place.cpus if place else frozenset()
    for gpu in gpus_at(topology, place):
        devices = [str(n) for n, index in enumerate(topology.visible) if index == gpu.index]
        facts = [gpu.name or "", f"cuda:{','.join(devices)}" if devices else "hidden"]
        if gpu.node_cpus is None and not here:
            facts.append("near CPUs unknown")
        elif gpu.node_cpus and gpu.node_cpus != here:
            facts.append(f"near {format_cpulist(gpu.node_cpus)}")
        if not here and gpu.numa_node is not None:
            facts.append(f"node {gpu.numa_node}")
        if gpu.memory_node is not None:
            facts.append(f"its memory is node {gpu.memory_node}")
        if gpu.mig is not None:
            facts.append(f"MIG: {counted(len(gpu.mig), 'instance')}")
        label = line(indent, Span(f"GPU {gpu.index}", "gpu"))
        yield label, listed(facts, ", "), gpu.pci_bus_id or ""
