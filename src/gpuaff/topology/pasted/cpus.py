"""The CPU side of the machine, put together from lscpu, its rows, and numactl.

Where two of them disagree, lscpu's summary counts before ``numactl -H`` and that before the
rows of ``lscpu -p``, which are the first to be cut in a paste.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.topology.model import NumaNode, Package
from gpuaff.topology.pasted.lscpu import CpuRow, Lscpu
from gpuaff.topology.pasted.text import Reading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    _Place: TypeAlias = tuple[int | None, int | None]  # a socket, and a core id in it

# Which CPUs share a core: read from lscpu's rows, or worked out from the numbering.


_SIZES = (2, 4, 8)
"""How many threads a core can have, beside one."""

_ADD = "add the output of `lscpu -p`"


def find_cores(
    reading: Reading,
    summary: Lscpu,
    rows: Mapping[int, CpuRow],
    cpus: CpuSet,
    node_cpus: Collection[CpuSet],
    near: Collection[CpuSet],
    *,
    told: bool,
) -> tuple[CpuSet, ...] | None:
    """The online CPUs of each core, ordered by their lowest id; None when the text is silent.

    lscpu's threads per core count only as far as its other numbers agree: before util-linux 2.37
    they were the online CPUs divided by the cores and rounded down, so that one CPU offline makes
    them 1.

    Args:
        reading: takes the notes.
        summary: what ``lscpu`` says.
        rows: what ``lscpu -p`` says, for all CPUs or for none.
        cpus: the online CPUs.
        node_cpus: the CPUs of each NUMA node that has some, as far as they are known.
        near: the lists of CPUs in the table of GPUs.
        told: whether ``cpus`` are all online CPUs, and not only some that are near a GPU.
    """
    if rows and all(row.core is not None for row in rows.values()):
        return _by_core_ids(reading, rows, cpus)
    if not cpus:
        return None
    threads = summary.numbers.get("threads", 0)
    count = len(cpus) if told else max(len(cpus), summary.numbers.get("cpu_count", 0))
    cores = summary.cores
    doubtful = bool(threads and cores) and count > threads * max(cores)
    if threads == 1 and not doubtful and _has_one_thread(summary, count):
        return tuple(frozenset([cpu]) for cpu in sorted(cpus))
    found = _pair(summary, threads, cpus, node_cpus, doubtful=doubtful) if threads else None
    if found is None and (doubtful or threads in (0, 2)):
        found = _two_runs(summary, cpus, node_cpus or near)
    if doubtful and len(cpus) > threads * max(cores):
        reading.note(
            "contradiction",
            f"lscpu says {threads} thread{'s' if threads > 1 else ''} per core, but "
            f"{len(cpus)} CPUs online on {min(cores)} cores (sockets x cores per socket); its "
            "threads per core are not used",
        )
    _note_cores(reading, 0 if doubtful or threads == 1 else threads, found)
    return found


def _has_one_thread(summary: Lscpu, count: int) -> bool:
    """Whether no core can have two CPUs online, if lscpu says that they have one each.

    There are no more CPUs than cores, as far as lscpu's rounding tells, or, offline ones included,
    too few for two threads.
    """
    if not summary.cores:
        return True
    least = min(summary.cores)
    return count <= least or max(count, summary.numbers.get("cpu_count", 0)) < 2 * least


def _by_core_ids(reading: Reading, rows: Mapping[int, CpuRow], cpus: CpuSet) -> tuple[CpuSet, ...]:
    """The CPUs of one socket with one core id, whatever their nodes, unless ids repeat.

    ``lscpu -p`` numbers the cores of the whole machine; the ids of ``lscpu -y`` repeat in each
    socket, and on some machines in each die, which may be a node. The first-level caches show
    whether CPUs in two nodes are one core.
    """
    caches: dict[_Place, dict[int | None, set[int | None]]] = {}  # of the CPUs in each node
    sockets: dict[int | None, set[int | None]] = {}
    for row in map(rows.__getitem__, cpus):
        caches.setdefault(_place(row), {}).setdefault(row.node, set()).add(row.l1)
        sockets.setdefault(row.core, set()).add(row.socket)
    repeat = any(len(some) > 1 for some in sockets.values())
    split = {place for place, by_node in caches.items() if _are_apart([*by_node.values()], repeat)}
    if split:
        reading.note(
            "cores-inferred",
            f"{len(split)} core ids of lscpu's rows stand in several NUMA nodes and are taken for "
            "a core in each; to be sure save the machine itself (`gpuaff topo --save`)",
        )
    return groups(rows, cpus, lambda row: (_place(row), row.node if _place(row) in split else None))


def _are_apart(caches: Sequence[set[int | None]], repeat: bool) -> bool:
    """Whether CPUs of one core id are a core in each node, by their caches in each.

    Where these are not printed, ids that repeat in each socket are taken to repeat in nodes too.
    """
    if any(None in some for some in caches):
        return repeat and len(caches) > 1
    return any(some != caches[0] for some in caches)


def _place(row: CpuRow) -> _Place:
    return row.socket, row.core


def groups(
    rows: Mapping[int, CpuRow], cpus: CpuSet, key: Callable[[CpuRow], Hashable]
) -> tuple[CpuSet, ...]:
    """The CPUs with equal keys, ordered by their lowest id."""
    found: dict[Hashable, set[int]] = {}
    for cpu in sorted(cpus):
        found.setdefault(key(rows[cpu]), set()).add(cpu)
    return tuple(map(frozenset, found.values()))


def _note_cores(reading: Reading, threads: int, cores: Sequence[CpuSet] | None) -> None:
    if cores is None:
        told = (
            f"lscpu tells of {threads} threads per core, but not which CPUs they are"
            if threads
            else "which CPUs share a core is not told"
        )
        reading.note(
            "cores-unknown",
            f"{told}, and the numbering does not show it, so each counts as a core of its own: "
            f"{_ADD}",
        )
    else:
        first = ", ".join(map(str, sorted(cores[0])))
        reading.note(
            "cores-inferred",
            f"which CPUs share a core is worked out from the numbering (the first core: {first}); "
            f"to be sure {_ADD}",
        )


def _pair(
    summary: Lscpu,
    threads: int,
    cpus: CpuSet,
    node_cpus: Collection[CpuSet],
    *,
    doubtful: bool,
) -> tuple[CpuSet, ...] | None:
    """The cores of which lscpu would print these numbers, or None.

    Offline CPUs have ids among the others, so all ids are cut into cores, and those that are
    offline are left out then. Tried are lscpu's threads per core, and as many as its other
    numbers give. A hybrid processor fails the count.
    """
    count = max(summary.numbers.get("cpu_count", 0), len(cpus))
    places = None
    if max(cpus) >= count:  # ids with gaps: only their order is known
        count, places = len(cpus), {cpu: place for place, cpu in enumerate(sorted(cpus))}
    sizes = [threads, *(size for size in _SIZES if size * min(summary.cores, default=0) == count)]
    for size in dict.fromkeys(sizes):
        if size == 1 or count % size:
            continue
        cores = _numbered(summary, size, count, cpus, places, node_cpus)
        if cores is None or (summary.cores and len(cores) not in summary.cores):
            continue
        # The threads of the largest core, or, from an old lscpu, the average rounded down.
        if doubtful or threads in (max(map(len, cores)), len(cpus) // len(cores)):
            return cores
    return None


def _numbered(
    summary: Lscpu,
    size: int,
    count: int,
    cpus: CpuSet,
    places: Mapping[int, int] | None,
    node_cpus: Collection[CpuSet],
) -> tuple[CpuSet, ...] | None:
    """The online CPUs of each core, by the two ways in which Linux numbers hyperthreads, or None.

    Either all first threads come first, then all second ones (most servers: 0 and 48 of 96), or
    siblings are neighbours (POWER, many virtual machines, old Opterons). The nodes tell the two
    apart, for hardly any core lies in two nodes; with one node only the first way is the usual
    one, and on a virtual machine either may be meant.
    """
    neighbours = _within_nodes(
        cpus, lambda cpu: (places[cpu] if places else cpu) // size, node_cpus
    )
    if summary.power:
        return neighbours
    if places:
        return None
    apart = _within_nodes(cpus, lambda cpu: cpu % (count // size), node_cpus)
    if apart is None:
        return neighbours if cpus <= frozenset().union(*node_cpus) else None
    return None if summary.virtual and len(node_cpus) < 2 else apart


def _two_runs(summary: Lscpu, cpus: CpuSet, lists: Collection[CpuSet]) -> tuple[CpuSet, ...] | None:
    """The cores {c, c + d}, where the lists of nodes or GPUs can hardly mean anything else.

    Each list is two runs of CPUs, such as 0-15 and 128-143, at one distance d, and no id reaches
    2 d. On x86-64 Linux numbers the first threads of all cores before any second one, so with
    one thread per core a node has no such gap. POWER numbers siblings side by side, and so do
    many virtual machines, where one list of that form is not enough.
    """
    distances = {_distance(ids) for ids in lists}
    distance = distances.pop() if len(distances) == 1 else None
    if distance is None or summary.power or (summary.virtual and len(lists) < 2):
        return None
    if frozenset().union(*lists) != cpus or max(cpus) >= 2 * distance:
        return None
    # The second threads are numbered from the number of cores on.
    if summary.cores and distance not in summary.cores:
        return None
    return tuple(frozenset((cpu, cpu + distance)) for cpu in sorted(cpus) if cpu < distance)


def _distance(cpus: CpuSet) -> int | None:
    """How far apart the starts of two equal runs are, when these CPUs are just two such runs."""
    half = len(cpus) // 2
    first, second = min(cpus), max(cpus) - half + 1
    runs = {*range(first, first + half), *range(second, second + half)}
    return second - first if cpus == runs and second > first + half else None


def _within_nodes(
    cpus: CpuSet, core_of: Callable[[int], int], node_cpus: Collection[CpuSet]
) -> tuple[CpuSet, ...] | None:
    """The CPUs of each core, or None when a core lies in two nodes."""
    node_of = {cpu: number for number, some in enumerate(node_cpus) for cpu in some}
    found: dict[int, set[int]] = {}
    for cpu in sorted(cpus):
        found.setdefault(core_of(cpu), set()).add(cpu)
    fits = all(len({node_of.get(cpu) for cpu in core}) == 1 for core in found.values())
    return tuple(map(frozenset, found.values())) if fits else None


# What ``numactl -H`` (``--hardware``) says: each node's CPUs and memory, and the distances.


_NODE = re.compile(r"node (\d{1,4}) (cpus|size):(.*)", re.ASCII)
_NUMBERS = re.compile(r"\d[\d\s]*", re.ASCII)
_DISTANCES = re.compile(r"(\d{1,4}):\s+(\d[\d\s]*)", re.ASCII)
_ITSELF = 10
"""The distance of a node to itself, and so the least there is."""

_SIZE = re.compile(r"(\d{1,12}) [kMG]B", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Numactl:
    """What was found.

    Attributes:
        nodes: the CPUs of each node; empty for one without.
        has_memory: whether each node has memory.
        distances: for each node, its distance to every node of the matrix.
    """

    nodes: Mapping[int, CpuSet] = field(default_factory=dict)
    has_memory: Mapping[int, bool] = field(default_factory=dict)
    distances: Mapping[int, Mapping[int, int]] = field(default_factory=dict)


def read_numactl(reading: Reading) -> Numactl:
    """Read the lines of ``numactl -H``; of two that differ the first one counts."""
    nodes: dict[int, CpuSet] = {}
    has_memory: dict[int, bool] = {}
    for node, what, value in _entries(_whole_lines(reading)):
        if what == "cpus":
            _keep_node(reading, nodes, node, value)
        elif size := _SIZE.fullmatch(value):
            has_memory.setdefault(node, int(size[1]) > 0)
    distances = _distances(reading.lines)
    return Numactl(nodes=nodes, has_memory=has_memory, distances=distances)


def _whole_lines(reading: Reading) -> Sequence[str]:
    """The lines, but for a list with which the text breaks off: a size follows each list."""
    last = reading.lines[reading.cut_line] if reading.cut_line >= 0 else ""
    cut = _NODE.match(last) or _NUMBERS.fullmatch(last)
    return reading.lines[: reading.cut_line] if cut else reading.lines


def _entries(lines: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """Each ``node N what: value``, joined with the lines onto which a list was wrapped."""
    head: tuple[int, str] | None = None
    value: list[str] = []
    for line in (*lines, ""):
        if head and head[1] == "cpus" and _NUMBERS.fullmatch(line):
            value.append(line)
            continue
        if head:
            yield *head, " ".join(value)
        found = _NODE.match(line)
        head = (int(found[1]), found[2]) if found else None
        value = [found[3].strip()] if found else []


def _keep_node(reading: Reading, nodes: dict[int, CpuSet], node: int, value: str) -> None:
    cpus = reading.cpulist(",".join(value.split()))
    if cpus is None:
        reading.note(
            "line-unreadable", f"numactl: the CPUs of node {node} cannot be read ({value[:40]!r})"
        )
    elif nodes.setdefault(node, cpus) is not cpus:
        reading.note(
            "contradiction",
            f"numactl tells the CPUs of node {node} twice and differently; the first is used",
        )


def _distances(lines: Sequence[str]) -> Mapping[int, Mapping[int, int]]:
    """The matrix below ``node distances:``, as far as its rows are whole."""
    columns: list[int] = []
    matrix: dict[int, Mapping[int, int]] = {}
    for line in lines:
        words = line.split()
        if words[:1] == ["node"] and _NUMBERS.fullmatch(" ".join(words[1:])):
            columns = [int(word[:5]) for word in words[1:]]
        elif row := _DISTANCES.fullmatch(line):
            numbers = [int(word[:5]) for word in row[2].split()]
            if len(numbers) == len(columns) and min(numbers) >= _ITSELF:
                matrix.setdefault(int(row[1]), dict(zip(columns, numbers, strict=True)))
    return matrix


@dataclass(frozen=True, slots=True, kw_only=True)
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
        cores=find_cores(reading, summary, rows, cpus, node_cpus, near, told=bool(told)),
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
            distances=_node_distances(numactl.distances.get(node), ids),
        )
        for node in ids
    )
    return tuple(found) or None


def _node_distances(row: Mapping[int, int] | None, nodes: Sequence[int]) -> tuple[int, ...] | None:
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
        parts = groups(rows, cpus, lambda row: row.socket)
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
        return groups(rows, cached, lambda row: row.l3)
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
