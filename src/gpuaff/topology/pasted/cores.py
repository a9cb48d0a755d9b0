"""Which CPUs share a core: read from lscpu's rows, or worked out from the numbering."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence

from gpuaff.cpuset import CpuSet
from gpuaff.topology.pasted.lscpu import Lscpu
from gpuaff.topology.pasted.lscpu_parsable import CpuRow
from gpuaff.topology.pasted.reading import Reading

_ADD = "add the output of `lscpu -p`"


def find(
    reading: Reading,
    summary: Lscpu,
    rows: Mapping[int, CpuRow],
    cpus: CpuSet,
    node_cpus: Collection[CpuSet],
    near: Collection[CpuSet],
) -> tuple[CpuSet, ...] | None:
    """The online CPUs of each core, ordered by their lowest id; None when the text is silent.

    Args:
        reading: takes the notes.
        summary: what ``lscpu`` says.
        rows: what ``lscpu -p`` says, for all CPUs or for none.
        cpus: the online CPUs.
        node_cpus: the CPUs of each NUMA node that has some, as far as they are known.
        near: the lists of CPUs in the table of GPUs.
    """
    if rows and all(row.core is not None for row in rows.values()):
        # The node counts because `lscpu -y` prints core ids that repeat in each die.
        return groups(rows, cpus, lambda row: (row.socket, row.node, row.core))
    if not cpus:
        return None
    threads = summary.numbers.get("threads", 0)
    if threads == 1:
        return tuple(frozenset([cpu]) for cpu in sorted(cpus))
    cores = _pair(summary, threads, sorted(cpus), node_cpus) if threads else None
    if cores is None and threads in (0, 2):
        cores = _two_runs(summary, cpus, node_cpus or near)
    _note(reading, threads, cores)
    return cores


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
    summary: Lscpu, threads: int, cpus: Sequence[int], node_cpus: Collection[CpuSet]
) -> tuple[CpuSet, ...] | None:
    """The cores, by the two ways in which Linux numbers hyperthreads, or None.

    Either all first threads come first, then all second ones (most servers: 0 and 48 of 96), or
    siblings are neighbours (POWER, many virtual machines, old Opterons). The nodes tell the two
    apart, for no core belongs to two nodes; with one node only the first way is the usual one,
    and on a virtual machine either may be meant. A hybrid processor, or one with offline CPUs,
    fails the count.
    """
    if len(cpus) % threads or not _counts_fit(summary, threads, len(cpus)):
        return None
    neighbours = _within_nodes(_runs(cpus, threads), node_cpus)
    if summary.power:
        return neighbours
    if list(cpus) != list(range(len(cpus))):
        return None
    apart = _within_nodes(zip(*_runs(cpus, len(cpus) // threads), strict=True), node_cpus)
    if apart is None:
        return neighbours if frozenset(cpus) <= frozenset().union(*node_cpus) else None
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
    if not _counts_fit(summary, 1, distance):
        return None
    return tuple(frozenset((cpu, cpu + distance)) for cpu in sorted(cpus) if cpu < distance)


def _distance(cpus: CpuSet) -> int | None:
    """How far apart the starts of two equal runs are, when these CPUs are just two such runs."""
    half = len(cpus) // 2
    first, second = min(cpus), max(cpus) - half + 1
    runs = {*range(first, first + half), *range(second, second + half)}
    return second - first if cpus == runs and second > first + half else None


def _counts_fit(summary: Lscpu, threads: int, count: int) -> bool:
    """Whether threads x cores x sockets is the number of CPUs, where lscpu tells them."""
    per_socket = summary.numbers.get("cores_per_socket")
    sockets = summary.numbers.get("sockets")
    return not per_socket or not sockets or threads * per_socket * sockets == count


def _runs(cpus: Sequence[int], length: int) -> list[Sequence[int]]:
    return [cpus[first : first + length] for first in range(0, len(cpus), length)]


def _within_nodes(
    cores: Iterable[Sequence[int]], node_cpus: Collection[CpuSet]
) -> tuple[CpuSet, ...] | None:
    """These cores, or None when one lies in two nodes."""
    node_of = {cpu: number for number, cpus in enumerate(node_cpus) for cpu in cpus}
    found = tuple(map(frozenset, cores))
    fits = all(len({node_of.get(cpu) for cpu in core}) == 1 for core in found)
    return found if fits else None
