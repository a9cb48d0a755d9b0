"""Which CPUs share a core: read from lscpu's rows, or worked out from the numbering."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence

from gpuaff.cpuset import CpuSet
from gpuaff.topology.pasted.lscpu import Lscpu
from gpuaff.topology.pasted.lscpu_parsable import CpuRow
from gpuaff.topology.pasted.reading import Reading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    _Place: TypeAlias = tuple[int | None, int | None]  # a socket, and a core id in it

_SIZES = (2, 4, 8)
"""How many threads a core can have, beside one."""

_ADD = "add the output of `lscpu -p`"


def find(
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
    _note(reading, 0 if doubtful or threads == 1 else threads, found)
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


def _note(reading: Reading, threads: int, cores: Sequence[CpuSet] | None) -> None:
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
