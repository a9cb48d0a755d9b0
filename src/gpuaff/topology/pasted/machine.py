"""The CPU side of the machine, put together from lscpu, its rows, and numactl.

Where two of them disagree, lscpu's summary counts before ``numactl -H`` and that before the
rows of ``lscpu -p``, which are the first to be cut in a paste.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from operator import itemgetter

from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.records import dataclass
from gpuaff.topology.model import NumaNode, Package
from gpuaff.topology.pasted import cores as cores_
from gpuaff.topology.pasted.lscpu import Lscpu
from gpuaff.topology.pasted.lscpu_parsable import CpuRow
from gpuaff.topology.pasted.numactl import Numactl
from gpuaff.topology.pasted.reading import Reading


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What was found; None is what nothing tells.

    Attributes:
        cpus: the online CPUs.
        told: whether the text tells them, and not only some that are near a GPU.
    """

    cpus: CpuSet
    told: bool
    cores: tuple[CpuSet, ...] | None = None
    packages: tuple[Package, ...] | None = None
    l3: tuple[CpuSet, ...] | None = None
    nodes: tuple[NumaNode, ...] | None = None


def assemble(
    reading: Reading,
    summary: Lscpu,
    rows: Mapping[int, CpuRow],
    numactl: Numactl,
    *,
    near: Collection[CpuSet],
) -> Machine:
    """Put the CPU side together.

    Args:
        reading: takes the notes.
        summary: what ``lscpu`` says.
        rows: what ``lscpu -p`` or ``-e`` says.
        numactl: what ``numactl -H`` says.
        near: the lists of CPUs in the table of GPUs, for want of anything better.
    """
    rows = _whole(reading, summary, numactl, rows)
    lists = _node_lists(reading, summary, numactl, rows)
    told = summary.online or frozenset(rows).union(*lists.values())
    cpus = told or frozenset().union(*near)
    nodes = _nodes(reading, lists, cpus, numactl)
    _note_cpus(reading, summary, cpus, told=bool(told))
    _note_nodes(reading, summary, nodes)
    node_cpus = [node.cpus for node in nodes or () if node.cpus]
    return Machine(
        cpus=cpus,
        told=bool(told),
        cores=cores_.find(reading, summary, rows, cpus, node_cpus, near, told=bool(told)),
        packages=_packages(reading, summary, rows, cpus, node_cpus),
        l3=_l3(reading, rows, cpus),
        nodes=nodes,
    )


def _whole(
    reading: Reading, summary: Lscpu, numactl: Numactl, rows: Mapping[int, CpuRow]
) -> Mapping[int, CpuRow]:
    """The rows, if they are there for every CPU: a part of them would split cores and nodes."""
    listed = frozenset().union(*summary.nodes.values(), *numactl.nodes.values())
    if rows and (missing := (summary.online or listed) - rows.keys()):
        reading.note(
            "lscpu-cut",
            f"lscpu's rows leave out CPUs {format_cpulist(missing)}, so they are not used: paste "
            "the whole output of `lscpu -p`",
        )
        return {}
    if summary.online and (beyond := rows.keys() - summary.online):
        reading.note(
            "contradiction",
            f"lscpu's rows list CPUs {format_cpulist(beyond)} that are not online by its list; "
            "they are left out",
        )
    return rows


def _node_lists(
    reading: Reading, summary: Lscpu, numactl: Numactl, rows: Mapping[int, CpuRow]
) -> dict[int, CpuSet]:
    """Each node's CPUs, by the first that tells them; no CPU in two."""
    lists: dict[int, CpuSet] = {}
    for source in (summary.nodes, numactl.nodes, {} if summary.nodes else _by_node(rows)):
        for node, cpus in source.items():
            if lists.setdefault(node, cpus) != cpus:
                reading.note(
                    "contradiction",
                    f"the CPUs of NUMA node {node} are told differently by two commands; lscpu "
                    "counts before numactl, and both before lscpu's rows",
                )
    return _disjoint(reading, lists)


def _by_node(rows: Mapping[int, CpuRow]) -> dict[int, CpuSet]:
    found: dict[int, set[int]] = {}
    for cpu, row in rows.items():
        if row.node is not None:
            found.setdefault(row.node, set()).add(cpu)
    return {node: frozenset(cpus) for node, cpus in found.items()}


def _disjoint(reading: Reading, lists: Mapping[int, CpuSet]) -> dict[int, CpuSet]:
    taken: set[int] = set()
    found: dict[int, CpuSet] = {}
    for node in sorted(lists):
        if both := lists[node] & taken:
            reading.note(
                "contradiction",
                f"CPUs {format_cpulist(both)} are in NUMA node {node} and in a lower one; the "
                "lower one keeps them",
            )
        found[node] = lists[node] - taken
        taken |= lists[node]
    return found


def _nodes(
    reading: Reading, lists: Mapping[int, CpuSet], cpus: CpuSet, numactl: Numactl
) -> tuple[NumaNode, ...] | None:
    if beyond := frozenset().union(*lists.values()) - cpus:
        reading.note(
            "ids-dropped",
            f"the NUMA nodes list CPUs {format_cpulist(beyond)} that are not online; left out",
        )
    ids = sorted(lists)
    found = (
        NumaNode(
            id=node,
            cpus=lists[node] & cpus,
            has_memory=numactl.has_memory.get(node),
            distances=_distances(numactl.distances.get(node), ids),
        )
        for node in ids
    )
    return tuple(found) or None


def _distances(row: Mapping[int, int] | None, nodes: Sequence[int]) -> tuple[int, ...] | None:
    if row is None or not row.keys() >= set(nodes):
        return None
    return tuple(row[node] for node in nodes)


def _packages(
    reading: Reading,
    summary: Lscpu,
    rows: Mapping[int, CpuRow],
    cpus: CpuSet,
    node_cpus: Sequence[CpuSet],
) -> tuple[Package, ...] | None:
    """The sockets: from the rows, or the one there is, or the nodes dealt to them in order."""
    sockets = summary.numbers.get("sockets", 0)
    if not cpus:
        return None
    if rows and all(row.socket is not None for row in rows.values()):
        parts = cores_.groups(rows, cpus, lambda row: row.socket)
        found = ((rows[min(part)].socket or 0, part) for part in parts)
        return tuple(Package(id=id_, cpus=part) for id_, part in sorted(found, key=itemgetter(0)))
    if sockets == 1:
        return (Package(id=0, cpus=cpus),)
    if (dealt := _deal(sockets, cpus, node_cpus)) is None:
        reading.note(
            "packages-unknown", "which CPUs are in which socket is not told: add `lscpu -p`"
        )
        return None
    reading.note(
        "packages-inferred",
        f"the {len(node_cpus)} NUMA nodes are taken to be in the {sockets} sockets in order; to "
        "be sure add the output of `lscpu -p`",
    )
    return tuple(Package(id=number, cpus=part) for number, part in enumerate(dealt))


def _deal(sockets: int, cpus: CpuSet, node_cpus: Sequence[CpuSet]) -> tuple[CpuSet, ...] | None:
    """The nodes' CPUs, so many nodes to each socket; None when that does not come out even."""
    if not sockets or not node_cpus or len(node_cpus) % sockets:
        return None
    each = len(node_cpus) // sockets
    dealt = tuple(
        frozenset().union(*node_cpus[first : first + each])
        for first in range(0, len(node_cpus), each)
    )
    even = len({len(part) for part in dealt}) == 1
    return dealt if even and frozenset().union(*dealt) == cpus else None


def _l3(reading: Reading, rows: Mapping[int, CpuRow], cpus: CpuSet) -> tuple[CpuSet, ...] | None:
    if any(row.l3 is not None for row in rows.values()):
        cached = frozenset(cpu for cpu in cpus if rows[cpu].l3 is not None)
        return cores_.groups(rows, cached, lambda row: row.l3)
    if cpus:
        reading.note("l3-unknown", "which CPUs share an L3 cache is not told: add `lscpu -p`")
    return None


def _note_cpus(reading: Reading, summary: Lscpu, cpus: CpuSet, *, told: bool) -> None:
    count = summary.numbers.get("cpu_count")
    hint = f" (lscpu counts {count})" if count else ""
    if not cpus:
        reading.note("cpus-unknown", f"which CPUs there are is not told{hint}: add `lscpu`")
    elif not told:
        reading.note(
            "cpus-partial",
            f"only CPUs near a GPU are known, {len(cpus)} of them{hint}: add the output of `lscpu`",
        )
    elif count is not None and count < len(cpus):
        reading.note(
            "contradiction", f"lscpu counts {count} CPUs but lists {len(cpus)}; the lists are used"
        )


def _note_nodes(reading: Reading, summary: Lscpu, nodes: tuple[NumaNode, ...] | None) -> None:
    count = summary.numbers.get("node_count", 0)
    if nodes is None:
        reading.note(
            "numa-unknown", "the NUMA nodes are not told: add the output of `lscpu` or `numactl -H`"
        )
        return
    if count > len(nodes):
        reading.note(
            "nodes-missing", f"lscpu counts {count} NUMA nodes, {len(nodes)} of them are listed"
        )
    if len(nodes) > 1 and any(node.distances is None for node in nodes):
        reading.note(
            "distances-unknown", "how far the NUMA nodes are apart is not told: add `numactl -H`"
        )
