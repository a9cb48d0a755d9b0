"""The CPU side of the machine, assembled from lscpu, its rows, and numactl.

Where two of them differ, lscpu's summary counts before ``numactl -H`` and that before the rows of
``lscpu -p``, which are the first to be cut in a paste.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from itertools import chain

from gpuaff.cpuset import CpuSet, format_cpulist, grouped
from gpuaff.formatting import counted
from gpuaff.topology.model import NumaNode, Package, Topology
from gpuaff.topology.pasted.lscpu import CPUS, NODES, SOCKETS, THREADS, read
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
    machine = _Machine(paste, near)
    machine.note_cpus()
    machine.note_nodes()
    topology = Topology(
        cpus=machine.cpus,
        allowed=machine.cpus,
        cores=machine.cores(),
        packages=machine.packages(),
        l3=machine.l3(),
        numa_nodes=machine.nodes or None,
    )
    return topology, machine.is_complete


class _Machine:
    """What the commands agree on; whatever they do not is noted."""

    def __init__(self, paste: Paste, near: Collection[CpuSet]) -> None:
        self._note = paste.note
        self._printed = read(paste)
        self._rows = self._complete_rows()
        lists = self._node_lists()
        online = self._printed.online or frozenset(self._rows).union(*lists.values())
        self.is_complete = bool(online)
        self.cpus = online or frozenset().union(*near)
        self.nodes = self._nodes(lists)
        self._node_cpus = [node.cpus for node in self.nodes if node.cpus]
        self._lists = self._node_cpus or near
        self._all = max(self._printed.numbers.get(CPUS, 0), len(self.cpus))  # also offline ones
        self._count = len(self.cpus) if self.is_complete else self._all
        # lscpu's threads per core count only as far as its other numbers agree: before util-linux
        # 2.37 they were the online CPUs divided by the cores and rounded down, so that one CPU
        # offline makes them 1.
        self._threads = self._printed.numbers.get(THREADS, 0)
        self._is_doubtful = 0 < self._threads * max(self._printed.cores, default=0) < self._count

    def _complete_rows(self) -> Mapping[int, Mapping[str, int]]:
        """The rows, if there is one for every CPU: a part of them would split cores and nodes."""
        rows, online = self._printed.rows, self._printed.online
        lists = (*self._printed.nodes.values(), *self._printed.numactl.values())
        if rows and (missing := (online or frozenset().union(*lists)) - rows.keys()):
            self._note(
                "lscpu-cut",
                f"lscpu's rows leave out CPUs {format_cpulist(missing)}, so they are not used: "
                "paste the whole output of `lscpu -p`",
            )
            return {}
        if online and (beyond := rows.keys() - online):
            self._note(
                "contradiction",
                f"lscpu's rows list CPUs {format_cpulist(beyond)} that are not online by its "
                "list; they are left out",
            )
        return rows

    def _rows_by(self, key: str, cpus: Collection[int]) -> dict[int, CpuSet]:
        """Those of these CPUs whose row has this number, by the number."""
        numbers = {cpu: self._rows[cpu][key] for cpu in cpus if key in self._rows[cpu]}
        return {numbers[min(part)]: part for part in grouped(numbers, numbers.__getitem__)}

    def _node_lists(self) -> dict[int, CpuSet]:
        """Each node's CPUs, from the first source that has them; no CPU in two."""
        nodes, numactl = self._printed.nodes, self._printed.numactl
        by_row = {} if nodes else self._rows_by("node", self._rows)
        lists: dict[int, CpuSet] = {}
        for node, cpus in chain(nodes.items(), numactl.items(), by_row.items()):
            if lists.setdefault(node, cpus) != cpus:
                self._note(
                    "contradiction",
                    f"two commands list different CPUs of NUMA node {node}; lscpu counts before "
                    "numactl, and both before lscpu's rows",
                )
        taken: set[int] = set()
        for node in sorted(lists):
            if both := lists[node] & taken:
                self._note(
                    "contradiction",
                    f"CPUs {format_cpulist(both)} are in NUMA node {node} and in a lower one; the "
                    "lower one keeps them",
                )
            lists[node] -= taken
            taken |= lists[node]
        return lists

    def _nodes(self, lists: Mapping[int, CpuSet]) -> tuple[NumaNode, ...]:
        if beyond := frozenset().union(*lists.values()) - self.cpus:
            self._note(
                "ids-dropped",
                f"the NUMA nodes list CPUs {format_cpulist(beyond)} that are not online; left out",
            )
        ids = sorted(lists)
        rows = [self._printed.distances.get(node, {}) for node in ids]
        return tuple(
            NumaNode(
                id=node,
                cpus=lists[node] & self.cpus,
                has_memory=self._printed.has_memory.get(node),
                distances=tuple(row[other] for other in ids) if row.keys() >= set(ids) else None,
            )
            for node, row in zip(ids, rows, strict=True)
        )

    def note_cpus(self) -> None:
        count, found = self._printed.numbers.get(CPUS), len(self.cpus)
        hint = f" (lscpu counts {count})" if count else ""
        if not found:
            message = f"the CPUs are unknown{hint}: add the output of `lscpu`"
            self._note("cpus-unknown", message)
        elif not self.is_complete:
            message = f"only CPUs near a GPU are known, {found} of them{hint}"
            self._note("cpus-partial", f"{message}: add the output of `lscpu`")
        elif count is not None and count < found:
            message = f"lscpu counts {count} CPUs but lists {found}; the lists are used"
            self._note("contradiction", message)

    def note_nodes(self) -> None:
        count, found = self._printed.numbers.get(NODES, 0), len(self.nodes)
        if not found:
            message = "the NUMA nodes are unknown: add the output of `lscpu` or `numactl -H`"
            self._note("numa-unknown", message)
        elif count > found:
            message = f"lscpu counts {count} NUMA nodes, {found} of them are listed"
            self._note("nodes-missing", message)
        if found > 1 and any(node.distances is None for node in self.nodes):
            message = "NUMA distances are missing: add the output of `numactl -H`"
            self._note("distances-unknown", message)

    def packages(self) -> tuple[Package, ...] | None:
        """The sockets: from the rows, or the only one, or so many nodes in each, in order."""
        sockets, nodes = self._printed.numbers.get(SOCKETS, 0), self._node_cpus
        if not self.cpus:
            return None
        if self._rows and all("socket" in row for row in self._rows.values()):
            parts = self._rows_by("socket", self.cpus)
        elif sockets == 1:
            parts = {0: self.cpus}
        elif parts := dict(enumerate(self._equal_parts(sockets))):
            self._note(
                "packages-inferred",
                f"the {len(nodes)} NUMA nodes are taken to be in the {sockets} sockets in order; "
                f"to be sure {_ADD}",
            )
        else:
            self._note("packages-unknown", f"which CPUs are in which socket is unknown: {_ADD}")
        return tuple(Package(id=number, cpus=parts[number]) for number in sorted(parts)) or None

    def _equal_parts(self, sockets: int) -> Sequence[CpuSet]:
        """The CPUs of equally many nodes for each socket; nothing where the parts are not equal."""
        nodes = self._node_cpus
        if not sockets or not nodes or len(nodes) % sockets:
            return ()
        each = len(nodes) // sockets
        starts = range(0, len(nodes), each)
        parts = [frozenset().union(*nodes[start : start + each]) for start in starts]
        is_even = len(set(map(len, parts))) == 1
        return parts if is_even and frozenset().union(*parts) == self.cpus else ()

    def l3(self) -> tuple[CpuSet, ...] | None:
        """The CPUs of each L3 domain, from the rows alone."""
        if any("l3" in row for row in self._rows.values()):
            return tuple(self._rows_by("l3", self.cpus).values())
        if self.cpus:
            self._note("l3-unknown", f"which CPUs share an L3 cache is unknown: {_ADD}")
        return None

    def cores(self) -> tuple[CpuSet, ...] | None:
        """The CPUs of each core: by lscpu's rows, or inferred from the numbering."""
        if self._rows and all("core" in row for row in self._rows.values()):
            return self._cores_by_id()
        if not self.cpus:
            return None
        if self._has_one_thread():
            return grouped(self.cpus, lambda cpu: cpu)
        cores = self._by_threads() if self._threads else None
        if cores is None and (self._is_doubtful or self._threads in (0, 1, 2)):
            cores = self._two_runs()
        self._note_cores(cores)
        return cores

    def _note_cores(self, cores: Sequence[CpuSet] | None) -> None:
        threads, expected, online = self._threads, self._printed.cores, len(self.cpus)
        if self._is_doubtful and online > threads * max(expected):
            self._note(
                "contradiction",
                f"lscpu says {counted(threads, 'thread')} per core, but {online} CPUs online on "
                f"{min(expected)} cores (sockets x cores per socket); its threads per core are "
                "not used",
            )
        if cores is None:
            known = f"lscpu prints {threads} threads per core, but not which CPUs they are"
            is_known = threads > 1 and not self._is_doubtful
            self._note(
                "cores-unknown",
                f"{known if is_known else 'which CPUs share a core is unknown'}, and the "
                f"numbering does not show it, so each counts as a core of its own: {_ADD}",
            )
        else:
            self._note(
                "cores-inferred",
                "which CPUs share a core is inferred from the numbering (the first core: "
                f"{', '.join(map(str, sorted(cores[0])))}); to be sure {_ADD}",
            )

    def _cores_by_id(self) -> tuple[CpuSet, ...]:
        """The CPUs of one socket with one core id, whatever their nodes, unless ids repeat.

        ``lscpu -p`` numbers the cores of the whole machine; the ids of ``lscpu -y`` repeat in each
        socket, and on some machines in each die, which may be a node. The first-level caches show
        whether CPUs in two nodes are one core.
        """
        caches: dict[Hashable, dict[int | None, set[int | None]]] = {}  # of the CPUs in each node
        sockets: dict[int, set[int | None]] = {}

        def place(cpu: int) -> Hashable:
            return self._rows[cpu].get("socket"), self._rows[cpu]["core"]

        for cpu in self.cpus:
            row = self._rows[cpu]
            by_node = caches.setdefault(place(cpu), {})
            by_node.setdefault(row.get("node"), set()).add(row.get("l1d"))
            sockets.setdefault(row["core"], set()).add(row.get("socket"))
        repeat = any(len(some) > 1 for some in sockets.values())
        split = {
            core for core, by_node in caches.items() if _are_apart([*by_node.values()], repeat)
        }
        if split:
            self._note(
                "cores-inferred",
                f"{len(split)} core ids of lscpu's rows stand in several NUMA nodes and are taken "
                "for a core in each; to be sure save the machine itself (`gpuaff topo --save`)",
            )
        return grouped(
            self.cpus,
            lambda cpu: (place(cpu), self._rows[cpu].get("node") if place(cpu) in split else None),
        )

    def _has_one_thread(self) -> bool:
        """Whether no core can have two CPUs online, by one thread that lscpu prints for each.

        There are no more CPUs than cores, as far as lscpu's rounding shows, or, offline ones
        included, too few for two threads. Where the text lacks the number of cores, nothing
        confirms it: then all CPUs must be online.
        """
        if self._threads != 1 or self._is_doubtful:
            return False
        least = min(self._printed.cores, default=0)
        if not least:
            return self._all == len(self.cpus)
        return self._count <= least or self._all < 2 * least

    def _by_threads(self) -> tuple[CpuSet, ...] | None:
        """The cores of which lscpu would print these numbers, or None.

        Offline CPUs have ids among the others, so all ids are cut into cores, and those that are
        offline are left out then. The sizes to try are lscpu's threads per core, and as many as
        its other numbers give. A hybrid processor fails the count.
        """
        expected, count = self._printed.cores, self._all
        places: Mapping[int, int] | None = None
        if max(self.cpus) >= count:  # ids with gaps: only their order is known
            count, places = len(self.cpus), {cpu: n for n, cpu in enumerate(sorted(self.cpus))}
        sizes = [size for size in _SIZES if size * min(expected, default=0) == count]
        for size in dict.fromkeys([self._threads, *sizes]):
            if size not in _SIZES or count % size:  # an old lscpu's 3 is 4, rounded down
                continue
            cores = self._numbered(size, count, places)
            if cores is None or (expected and len(cores) not in expected):
                continue
            # The threads of the largest core, or, from an old lscpu, the average rounded down.
            printed = (max(map(len, cores)), len(self.cpus) // len(cores))
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
        if self._printed.is_power:
            return neighbours
        if places:
            return None
        apart = self._within_nodes(lambda cpu: cpu % (count // size))
        if apart is None:
            return neighbours if self.cpus <= frozenset().union(*self._node_cpus) else None
        return None if self._printed.is_virtual and len(self._node_cpus) < 2 else apart

    def _within_nodes(self, core_of: Callable[[int], int]) -> tuple[CpuSet, ...] | None:
        """The CPUs of each core, or None when a core lies in two nodes."""
        node_of = {cpu: number for number, some in enumerate(self._node_cpus) for cpu in some}
        cores = grouped(self.cpus, core_of)
        return cores if all(len(set(map(node_of.get, core))) == 1 for core in cores) else None

    def _two_runs(self) -> tuple[CpuSet, ...] | None:
        """The cores {c, c + d}, where the lists of nodes or GPUs can hardly mean anything else.

        Each list is two runs of CPUs, such as 0-15 and 128-143, at one distance d, and no id
        reaches 2 d. On x86-64 Linux numbers the first threads of all cores before any second one,
        so with one thread per core a node has no such gap. POWER numbers siblings side by side,
        and so do many virtual machines, where one list of that form is not enough. A list may
        lack the siblings of as many CPUs as are offline. The second threads are numbered from the
        number of cores on.
        """
        # Inferred, as a cut by CPUs would give the two threads of one core to two ranks.
        printed, lists, cpus = self._printed, self._lists, self.cpus
        distances = {_distance(ids) for ids in lists} - {None}
        distance = distances.pop() if len(distances) == 1 else None
        if distance is None or printed.is_power or (printed.is_virtual and len(lists) < 2):
            return None
        unpaired = sum(not {c - distance, c + distance} & ids for ids in lists for c in ids)
        if unpaired > self._all - len(cpus) or (printed.cores and distance not in printed.cores):
            return None
        if frozenset().union(*lists) != cpus or max(cpus) >= 2 * distance:
            return None
        if max(cpus) < self._all != 2 * distance:  # offline CPUs have shifted the second run
            return None
        return grouped(cpus, lambda cpu: cpu % distance)


def _are_apart(caches: Sequence[set[int | None]], repeat: bool) -> bool:
    """Whether CPUs of one core id are a core in each node, by their caches in each.

    Where these are not printed, ids that repeat in each socket are taken to repeat in nodes too.
    """
    if any(None in some for some in caches):
        return repeat and len(caches) > 1
    return any(some != caches[0] for some in caches)


def _distance(cpus: CpuSet) -> int | None:
    """How far apart the starts of two equal runs are, when these CPUs are just two such runs."""
    half = len(cpus) // 2
    first, second = min(cpus), max(cpus) - half + 1
    runs = {*range(first, first + half), *range(second, second + half)}
    return second - first if cpus == runs and second > first + half else None
