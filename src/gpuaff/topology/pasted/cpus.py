"""The CPU side of the machine, assembled from lscpu, its rows, and numactl.

Where two of them differ, lscpu's summary counts before ``numactl -H`` and that before the rows of
``lscpu -p``, which are the first to be cut in a paste.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence

from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.topology.model import NumaNode, Package, Topology
from gpuaff.topology.pasted import lscpu
from gpuaff.topology.pasted.lscpu import CpuRow, Lscpu, Numactl
from gpuaff.topology.pasted.text import Paste

_SIZES = (2, 4, 8)
"""How many threads a core can have, beside one."""

_ADD = "add the output of `lscpu -p`"


def assemble(paste: Paste, near: Collection[CpuSet]) -> tuple[Topology, bool]:
    """The CPU side, and whether its CPUs are all online ones, and not only some near a GPU.

    Args:
        paste: the text; it gets the notes.
        near: the lists of CPUs in the table of GPUs, which count where there is nothing better.
    """
    summary, numactl = lscpu.read_summary(paste), lscpu.read_numactl(paste)
    rows = _complete_rows(paste, summary, numactl, lscpu.read_rows(paste))
    lists = _node_lists(paste, summary, numactl, rows)
    online = summary.online or frozenset(rows).union(*lists.values())
    cpus = online or frozenset().union(*near)
    nodes = _nodes(paste, lists, cpus, numactl)
    _note_cpus(paste, summary, cpus, is_complete=bool(online))
    _note_nodes(paste, summary, nodes)
    node_cpus = [node.cpus for node in nodes if node.cpus]
    numbering = _Numbering(summary, cpus, node_cpus or near, node_cpus, is_complete=bool(online))
    if rows and all(row.core is not None for row in rows.values()):
        cores: tuple[CpuSet, ...] | None = _by_core_ids(paste, rows, cpus)
    else:
        cores = numbering.cores(paste) if cpus else None
    machine = Topology(
        cpus=cpus,
        allowed=cpus,
        cores=cores,
        packages=_packages(paste, summary, rows, cpus, node_cpus),
        l3=_l3(paste, rows, cpus),
        numa_nodes=nodes or None,
    )
    return machine, bool(online)


def _complete_rows(
    paste: Paste, summary: Lscpu, numactl: Numactl, rows: Mapping[int, CpuRow]
) -> Mapping[int, CpuRow]:
    """The rows, if there is one for every CPU: a part of them would split cores and nodes."""
    listed = frozenset().union(*summary.nodes.values(), *numactl.nodes.values())
    if rows and (missing := (summary.online or listed) - rows.keys()):
        paste.note(
            "lscpu-cut",
            f"lscpu's rows leave out CPUs {format_cpulist(missing)}, so they are not used: paste "
            "the whole output of `lscpu -p`",
        )
        return {}
    if summary.online and (beyond := rows.keys() - summary.online):
        paste.note(
            "contradiction",
            f"lscpu's rows list CPUs {format_cpulist(beyond)} that are not online by its list; "
            "they are left out",
        )
    return rows


def _node_lists(
    paste: Paste, summary: Lscpu, numactl: Numactl, rows: Mapping[int, CpuRow]
) -> dict[int, CpuSet]:
    """Each node's CPUs, from the first source that has them; no CPU in two."""
    by_row: dict[int, set[int]] = {}
    for cpu, row in rows.items():
        if row.node is not None and not summary.nodes:
            by_row.setdefault(row.node, set()).add(cpu)
    lists: dict[int, CpuSet] = {}
    for source in (summary.nodes, numactl.nodes, by_row):
        for node, cpus in source.items():
            if lists.setdefault(node, frozenset(cpus)) != cpus:
                paste.note(
                    "contradiction",
                    f"two commands list different CPUs of NUMA node {node}; lscpu counts before "
                    "numactl, and both before lscpu's rows",
                )
    return _disjoint(paste, lists)


def _disjoint(paste: Paste, lists: Mapping[int, CpuSet]) -> dict[int, CpuSet]:
    taken: set[int] = set()
    found: dict[int, CpuSet] = {}
    for node in sorted(lists):
        if both := lists[node] & taken:
            paste.note(
                "contradiction",
                f"CPUs {format_cpulist(both)} are in NUMA node {node} and in a lower one; the "
                "lower one keeps them",
            )
        found[node] = lists[node] - taken
        taken |= lists[node]
    return found


def _nodes(
    paste: Paste, lists: Mapping[int, CpuSet], cpus: CpuSet, numactl: Numactl
) -> tuple[NumaNode, ...]:
    if beyond := frozenset().union(*lists.values()) - cpus:
        paste.note(
            "ids-dropped",
            f"the NUMA nodes list CPUs {format_cpulist(beyond)} that are not online; left out",
        )

    def distances(node: int) -> tuple[int, ...] | None:
        row = numactl.distances.get(node, {})
        return tuple(map(row.__getitem__, lists)) if row.keys() >= lists.keys() else None

    return tuple(
        NumaNode(
            id=node,
            cpus=lists[node] & cpus,
            has_memory=numactl.has_memory.get(node),
            distances=distances(node),
        )
        for node in lists
    )


def _packages(
    paste: Paste,
    summary: Lscpu,
    rows: Mapping[int, CpuRow],
    cpus: CpuSet,
    node_cpus: Sequence[CpuSet],
) -> tuple[Package, ...] | None:
    """The sockets: from the rows, or the only one, or so many nodes in each, in order."""
    sockets = summary.numbers.get("sockets", 0)
    if not cpus:
        return None
    if rows and all(row.socket is not None for row in rows.values()):
        parts = _groups(rows, cpus, lambda row: row.socket)
        by_id = {rows[min(part)].socket or 0: part for part in parts}
        return tuple(Package(id=id_, cpus=by_id[id_]) for id_ in sorted(by_id))
    if sockets == 1:
        return (Package(id=0, cpus=cpus),)
    parts = _equal_parts(sockets, cpus, node_cpus)
    if not parts:
        paste.note("packages-unknown", f"which CPUs are in which socket is unknown: {_ADD}")
        return None
    paste.note(
        "packages-inferred",
        f"the {len(node_cpus)} NUMA nodes are taken to be in the {sockets} sockets in order; to "
        f"be sure {_ADD}",
    )
    return tuple(Package(id=number, cpus=part) for number, part in enumerate(parts))


def _equal_parts(sockets: int, cpus: CpuSet, node_cpus: Sequence[CpuSet]) -> tuple[CpuSet, ...]:
    """The CPUs of equally many nodes for each socket; nothing where the parts are not equal."""
    if not sockets or not node_cpus or len(node_cpus) % sockets:
        return ()
    each = len(node_cpus) // sockets
    parts = tuple(
        frozenset().union(*node_cpus[first : first + each])
        for first in range(0, len(node_cpus), each)
    )
    is_even = len({len(part) for part in parts}) == 1
    return parts if is_even and frozenset().union(*parts) == cpus else ()


def _l3(paste: Paste, rows: Mapping[int, CpuRow], cpus: CpuSet) -> tuple[CpuSet, ...] | None:
    if any(row.l3 is not None for row in rows.values()):
        cached = frozenset(cpu for cpu in cpus if rows[cpu].l3 is not None)
        return _groups(rows, cached, lambda row: row.l3)
    if cpus:
        paste.note("l3-unknown", f"which CPUs share an L3 cache is unknown: {_ADD}")
    return None


def _note_cpus(paste: Paste, summary: Lscpu, cpus: CpuSet, *, is_complete: bool) -> None:
    count = summary.numbers.get("cpu_count")
    hint = f" (lscpu counts {count})" if count else ""
    if not cpus:
        paste.note("cpus-unknown", f"the CPUs are unknown{hint}: add the output of `lscpu`")
    elif not is_complete:
        paste.note(
            "cpus-partial",
            f"only CPUs near a GPU are known, {len(cpus)} of them{hint}: add the output of `lscpu`",
        )
    elif count is not None and count < len(cpus):
        paste.note(
            "contradiction", f"lscpu counts {count} CPUs but lists {len(cpus)}; the lists are used"
        )


def _note_nodes(paste: Paste, summary: Lscpu, nodes: tuple[NumaNode, ...]) -> None:
    count = summary.numbers.get("node_count", 0)
    if not nodes:
        paste.note(
            "numa-unknown", "the NUMA nodes are unknown: add the output of `lscpu` or `numactl -H`"
        )
        return
    if count > len(nodes):
        paste.note(
            "nodes-missing", f"lscpu counts {count} NUMA nodes, {len(nodes)} of them are listed"
        )
    if len(nodes) > 1 and any(node.distances is None for node in nodes):
        paste.note(
            "distances-unknown", "NUMA distances are missing: add the output of `numactl -H`"
        )


# Which CPUs share a core: by lscpu's rows, or inferred from the numbering.


def _by_core_ids(paste: Paste, rows: Mapping[int, CpuRow], cpus: CpuSet) -> tuple[CpuSet, ...]:
    """The CPUs of one socket with one core id, whatever their nodes, unless ids repeat.

    ``lscpu -p`` numbers the cores of the whole machine; the ids of ``lscpu -y`` repeat in each
    socket, and on some machines in each die, which may be a node. The first-level caches show
    whether CPUs in two nodes are one core.
    """
    caches: dict[Hashable, dict[int | None, set[int | None]]] = {}  # of the CPUs in each node
    sockets: dict[int | None, set[int | None]] = {}
    for row in map(rows.__getitem__, cpus):
        caches.setdefault((row.socket, row.core), {}).setdefault(row.node, set()).add(row.l1)
        sockets.setdefault(row.core, set()).add(row.socket)
    repeat = any(len(some) > 1 for some in sockets.values())
    split = {place for place, by_node in caches.items() if _are_apart([*by_node.values()], repeat)}
    if split:
        paste.note(
            "cores-inferred",
            f"{len(split)} core ids of lscpu's rows stand in several NUMA nodes and are taken for "
            "a core in each; to be sure save the machine itself (`gpuaff topo --save`)",
        )

    def key(row: CpuRow) -> Hashable:
        place = row.socket, row.core
        return place, row.node if place in split else None

    return _groups(rows, cpus, key)


def _are_apart(caches: Sequence[set[int | None]], repeat: bool) -> bool:
    """Whether CPUs of one core id are a core in each node, by their caches in each.

    Where these are not printed, ids that repeat in each socket are taken to repeat in nodes too.
    """
    if any(None in some for some in caches):
        return repeat and len(caches) > 1
    return any(some != caches[0] for some in caches)


def _groups(
    rows: Mapping[int, CpuRow], cpus: CpuSet, key: Callable[[CpuRow], Hashable]
) -> tuple[CpuSet, ...]:
    """The CPUs with equal keys, ordered by their lowest id."""
    found: dict[Hashable, set[int]] = {}
    for cpu in sorted(cpus):
        found.setdefault(key(rows[cpu]), set()).add(cpu)
    return tuple(map(frozenset, found.values()))


class _Numbering:
    """Infers cores from lscpu's numbers and from how the CPUs are numbered.

    lscpu's threads per core count only as far as its other numbers agree: before util-linux 2.37
    they were the online CPUs divided by the cores and rounded down, so that one CPU offline makes
    them 1.
    """

    def __init__(
        self,
        summary: Lscpu,
        cpus: CpuSet,
        lists: Collection[CpuSet],
        node_cpus: Collection[CpuSet],
        *,
        is_complete: bool,
    ) -> None:
        self._summary, self._cpus, self._lists, self._node_cpus = summary, cpus, lists, node_cpus
        self._all = max(summary.numbers.get("cpu_count", 0), len(cpus))  # offline ones included
        self._threads = summary.numbers.get("threads", 0)
        self._count = len(cpus) if is_complete else self._all
        most = self._threads * max(summary.cores, default=0)
        self._is_doubtful = 0 < most < self._count

    def cores(self, paste: Paste) -> tuple[CpuSet, ...] | None:
        """The online CPUs of each core, ordered by their lowest id; None when unknown."""
        threads = self._threads
        if threads == 1 and not self._is_doubtful and self._has_one_thread():
            return tuple(frozenset([cpu]) for cpu in sorted(self._cpus))
        found = self._by_threads() if threads else None
        if found is None and (self._is_doubtful or threads in (0, 1, 2)):
            found = self._two_runs()
        self._add_notes(paste, found)
        return found

    def _has_one_thread(self) -> bool:
        """Whether no core can have two CPUs online, if lscpu prints one thread for each.

        There are no more CPUs than cores, as far as lscpu's rounding shows, or, offline ones
        included, too few for two threads. Where the text lacks the number of cores, nothing
        confirms it: then all CPUs must be online.
        """
        least = min(self._summary.cores, default=0)
        if not least:
            return self._all == len(self._cpus)
        return self._count <= least or self._all < 2 * least

    def _by_threads(self) -> tuple[CpuSet, ...] | None:
        """The cores of which lscpu would print these numbers, or None.

        Offline CPUs have ids among the others, so all ids are cut into cores, and those that are
        offline are left out then. The sizes to try are lscpu's threads per core, and as many as
        its other numbers give. A hybrid processor fails the count.
        """
        places = None
        count = self._all
        if max(self._cpus) >= count:  # ids with gaps: only their order is known
            count, places = len(self._cpus), {cpu: n for n, cpu in enumerate(sorted(self._cpus))}
        expected = self._summary.cores
        sizes = [self._threads]
        sizes += [size for size in _SIZES if size * min(expected, default=0) == count]
        for size in dict.fromkeys(sizes):
            if size == 1 or count % size:
                continue
            cores = self._numbered(size, count, places)
            if cores is None or (expected and len(cores) not in expected):
                continue
            # The threads of the largest core, or, from an old lscpu, the average rounded down.
            printed = (max(map(len, cores)), len(self._cpus) // len(cores))
            if self._is_doubtful or self._threads in printed:
                return cores
        return None

    def _numbered(
        self, size: int, count: int, places: Mapping[int, int] | None
    ) -> tuple[CpuSet, ...] | None:
        """The online CPUs of each core, by the two ways in which Linux numbers hyperthreads.

        Either all first threads come first, then all second ones (most servers: 0 and 48 of 96),
        or siblings are neighbours (POWER, many virtual machines, old Opterons). The nodes show
        which, since hardly any core lies in two nodes; with one node only the first way is the
        usual one, and on a virtual machine both are.
        """
        neighbours = self._within_nodes(lambda cpu: (places[cpu] if places else cpu) // size)
        if self._summary.is_power:
            return neighbours
        if places:
            return None
        apart = self._within_nodes(lambda cpu: cpu % (count // size))
        if apart is None:
            return neighbours if self._cpus <= frozenset().union(*self._node_cpus) else None
        return None if self._summary.is_virtual and len(self._node_cpus) < 2 else apart

    def _within_nodes(self, core_of: Callable[[int], int]) -> tuple[CpuSet, ...] | None:
        """The CPUs of each core, or None when a core lies in two nodes."""
        node_of = {cpu: number for number, some in enumerate(self._node_cpus) for cpu in some}
        found: dict[int, set[int]] = {}
        for cpu in sorted(self._cpus):
            found.setdefault(core_of(cpu), set()).add(cpu)
        fits = all(len({node_of.get(cpu) for cpu in core}) == 1 for core in found.values())
        return tuple(map(frozenset, found.values())) if fits else None

    def _two_runs(self) -> tuple[CpuSet, ...] | None:
        """The cores {c, c + d}, where the lists of nodes or GPUs can hardly mean anything else.

        Each list is two runs of CPUs, such as 0-15 and 128-143, at one distance d, and no id
        reaches 2 d. On x86-64 Linux numbers the first threads of all cores before any second one,
        so with one thread per core a node has no such gap. POWER numbers siblings side by side,
        and so do many virtual machines, where one list of that form is not enough. A list may
        lack the siblings of as many CPUs as are offline.
        """
        summary, lists = self._summary, self._lists
        distances = {_distance(ids) for ids in lists} - {None}
        distance = distances.pop() if len(distances) == 1 else None
        if distance is None or summary.is_power or (summary.is_virtual and len(lists) < 2):
            return None
        if sum(_unpaired(ids, distance) for ids in lists) > self._all - len(self._cpus):
            return None
        if frozenset().union(*lists) != self._cpus or max(self._cpus) >= 2 * distance:
            return None
        # The second threads are numbered from the number of cores on.
        if summary.cores and distance not in summary.cores:
            return None
        found: dict[int, set[int]] = {}
        for cpu in sorted(self._cpus):
            found.setdefault(cpu % distance, set()).add(cpu)
        return tuple(map(frozenset, found.values()))

    def _add_notes(self, paste: Paste, cores: Sequence[CpuSet] | None) -> None:
        threads, expected = self._threads, self._summary.cores
        if self._is_doubtful and len(self._cpus) > threads * max(expected):
            paste.note(
                "contradiction",
                f"lscpu says {threads} thread{'s' if threads > 1 else ''} per core, but "
                f"{len(self._cpus)} CPUs online on {min(expected)} cores (sockets x cores per "
                "socket); its threads per core are not used",
            )
        if cores is not None:
            paste.note(
                "cores-inferred",
                "which CPUs share a core is inferred from the numbering (the first core: "
                f"{', '.join(map(str, sorted(cores[0])))}); to be sure {_ADD}",
            )
            return
        known = f"lscpu prints {threads} threads per core, but not which CPUs they are"
        is_known = threads > 1 and not self._is_doubtful
        paste.note(
            "cores-unknown",
            f"{known if is_known else 'which CPUs share a core is unknown'}, and the numbering "
            f"does not show it, so each counts as a core of its own: {_ADD}",
        )


def _unpaired(cpus: CpuSet, distance: int) -> int:
    """How many of these CPUs have no sibling among them that is so far apart."""
    return sum(not {cpu - distance, cpu + distance} & cpus for cpu in cpus)


def _distance(cpus: CpuSet) -> int | None:
    """How far apart the starts of two equal runs are, when these CPUs are just two such runs."""
    half = len(cpus) // 2
    first, second = min(cpus), max(cpus) - half + 1
    runs = {*range(first, first + half), *range(second, second + half)}
    return second - first if cpus == runs and second > first + half else None
