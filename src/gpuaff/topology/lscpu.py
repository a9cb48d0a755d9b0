"""The CPU side of a paste: ``lscpu``, its rows (``lscpu -p`` or ``-e``) and ``numactl -H``.

Where two of them differ, lscpu's summary counts before ``numactl -H`` and that before the rows.
Only the rows say which CPUs share a core. Without them it is inferred from the numbering, as a cut
by CPUs would give the two threads of one core to two ranks, and a note says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias

from gpuaff.cpuset import MAX_CPU_ID, CpuSet, format_cpulist, grouped, parse_cpulist
from gpuaff.formatting import counted
from gpuaff.topology.model import NumaNode, Package, Topology
from gpuaff.topology.sysfs import slow_cores

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuaff.topology.pasted import Paste

_ADD = "add the output of `lscpu -p`"

_LIST = re.compile(
    r"^(?:On-?line CPU\(s\) list|NUMA node(\d{1,4}) CPU\(s\)):[ \t]*"
    r"(.*(?:(?:(?<=,)\n|\n(?=,))[\d,-]+)*)$",
    re.ASCII | re.MULTILINE,
)
"""A list of CPUs, of all that are online or of a node; a window may have wrapped it."""

_NODE = re.compile(
    r"^node (\d{1,4}) cpus:([\d\s]*)\nnode \1 size:[ \t]*(\d{1,12}) [kMG]B$",
    re.ASCII | re.MULTILINE,
)
"""A node's CPUs and memory in ``numactl -H``."""

_DISTANCES = re.compile(
    r"^(?:node((?:[ \t]+\d{1,5})+)|(\d{1,4}):((?:[ \t]+\d{1,5})+))$", re.ASCII | re.MULTILINE
)
_NUMBER = re.compile(
    r"^(CPU\(s\)|Thread\(s\) per core|Core\(s\) per socket|Socket\(s\)|NUMA node\(s\)):"
    r"[ \t]*(\d{1,6})$",
    re.ASCII | re.MULTILINE,
)
_POWER = re.compile(r"(?im)^(?:Architecture:[ \t]*ppc|Model name:[ \t]*power)")
_TRANSLATED = re.compile(
    r"^(?!On-?line|Off-?line|NUMA node|CPU\(s\)[ \t]*:)(?=[^:\n]{0,60}(?:NUMA|CPU\(s\)))"
    r"[^:\n]{1,60}[:\uff1a][ \t]*\d[\d,-]*$",
    re.ASCII | re.MULTILINE,
)
"""A number or a list of CPUs under a key that lscpu does not have in English."""

_HEADER = re.compile(r"CPU(?:(?:,[\w:%]*)+|(?:[ \t]+[A-Z][\w:%]*)+)", re.ASCII)
"""``CPU,Core,Socket,…`` or ``CPU NODE SOCKET …``."""

_CELL = re.compile(r"(\d{1,9})(?:\.\d{1,9})?", re.ASCII)
_PLACES = {"core", "socket", "node"}

_SIZES = (2, 4, 8)
"""How many threads a core can have, beside one."""

Rows: TypeAlias = Mapping[int, Mapping[str, int]]
"""The numbers in the row of each CPU, by its column's name in lower case."""


def read_cpulist(text: str) -> CpuSet | None:
    """The CPUs (or nodes) of a cpulist; None when it is not one."""
    try:
        return parse_cpulist(text)
    except ValueError:
        return None


def read_machine(paste: Paste, near: Collection[CpuSet]) -> tuple[Topology, bool]:
    """The CPU side, and whether its CPUs are all online ones, and not only some near a GPU.

    ``near`` are the lists of CPUs in the table of GPUs, which count where there is nothing better.
    """
    machine = _Machine(paste, near)
    machine.note_missing()
    topology = Topology(
        cpus=machine.cpus,
        allowed=machine.cpus,
        cores=machine.cores(),
        efficiency_cpus=machine.efficiency_cpus(),
        packages=machine.packages(),
        l3=machine.l3(),
        numa_nodes=machine.nodes or None,
    )
    return topology, machine.is_complete


class _Machine:
    """What the commands agree on; whatever they do not is noted."""

    def __init__(self, paste: Paste, near: Collection[CpuSet]) -> None:
        self._paste, self._note = paste, paste.note
        self._numbers = numbers = _numbers(paste)
        self._is_power = bool(_POWER.search(paste.text))
        self._is_virtual = "\nHypervisor vendor:" in f"\n{paste.text}"
        found = _lists(paste)
        online = found.pop(None, frozenset())
        lists = {node: cpus for node, cpus in found.items() if node is not None}
        self._rows = self._whole_rows(online or frozenset().union(*lists.values()))
        lists = lists or self._rows_by("node", self._rows)
        self._distances = _distances(paste.text)
        # Where a node's list is missing, its CPUs are known from the table alone.
        is_partial = not (lists and lists.keys() >= self._distances.keys())
        listed = frozenset().union(*lists.values(), *(near if is_partial else ()))
        self.cpus = online or frozenset(self._rows) or listed
        self.is_complete = bool(online or self._rows or lists)
        self.nodes = self._numa_nodes(lists)
        self._node_cpus = [node.cpus for node in self.nodes if node.cpus]
        self._lists = self._node_cpus or near
        self._all = max(numbers.get("CPU(s)", 0), len(self.cpus))  # also offline ones
        self._online = len(self.cpus) if self.is_complete else self._all
        # How many cores with online CPUs there may be: lscpu divides by the sockets, rounded down.
        sockets = numbers.get("Socket(s)", 0)
        keys = [key for key, _ in _NUMBER.findall(paste.text)]  # a block for each kind of core
        self._kinds = keys.count("Core(s) per socket") / max(1, keys.count("CPU(s)"))
        least = 0 if self._kinds > 1 else numbers.get("Core(s) per socket", 0) * sockets
        self._expected = range(least, least + sockets) if least else range(0)
        # Before util-linux 2.37 the threads were the online CPUs divided by the cores and rounded
        # down, so that one CPU offline makes them 1: they count as far as the others agree.
        self._threads = numbers.get("Thread(s) per core", 0)
        self._is_doubtful = 0 < self._threads * max(self._expected, default=0) < self._online

    def _whole_rows(self, listed: CpuSet) -> Rows:
        """The rows, if there is one for every CPU: a part of them would split cores and nodes."""
        rows = _rows(self._paste)
        if not listed or not rows or rows.keys() == listed:
            return rows
        differing = format_cpulist(listed ^ rows.keys())
        message = f"lscpu's rows and its lists differ in CPUs {differing}, so the rows are not used"
        self._note("lscpu-cut", f"{message}: add `lscpu -p`, whole")
        return {}

    def _rows_by(self, key: str, cpus: Collection[int]) -> dict[int, CpuSet]:
        """Those of these CPUs whose row has this number, by the number."""
        numbers = {cpu: self._rows[cpu][key] for cpu in cpus if key in self._rows[cpu]}
        return {numbers[min(part)]: part for part in grouped(numbers, numbers.__getitem__)}

    def _numa_nodes(self, lists: Mapping[int, CpuSet]) -> tuple[NumaNode, ...]:
        listed: frozenset[int] = frozenset().union(*lists.values())
        if sum(map(len, lists.values())) > len(listed):
            raise self._paste.error("a CPU is in two NUMA nodes: paste the output of one machine")
        if beyond := listed - self.cpus:
            message = f"the nodes list CPUs {format_cpulist(beyond)} that are not online"
            self._note("ids-dropped", f"{message}; left out")
        sizes = {int(node): int(size) > 0 for node, _, size in _NODE.findall(self._paste.text)}
        ids = sorted(lists)
        rows = [self._distances.get(node, {}) for node in ids]
        return tuple(
            NumaNode(
                id=node,
                cpus=lists[node] & self.cpus,
                has_memory=sizes.get(node),
                distances=tuple(row[other] for other in ids) if row.keys() >= set(ids) else None,
            )
            for node, row in zip(ids, rows, strict=True)
        )

    def note_missing(self) -> None:
        """Note which CPUs and nodes are not known."""
        count, found, nodes = self._numbers.get("CPU(s)"), len(self.cpus), len(self.nodes)
        all_nodes = max(self._numbers.get("NUMA node(s)", 0), len(self._distances))
        hint = f" (lscpu counts {count})" if count else ""
        if not found:
            self._note("cpus-unknown", f"the CPUs are unknown{hint}: add the output of `lscpu`")
        elif not self.is_complete:
            message = f"only {found} CPUs near a GPU are known{hint}: add the output of `lscpu`"
            self._note("cpus-partial", message)
        if not nodes:
            message = "the NUMA nodes are unknown: add the output of `lscpu` or `numactl -H`"
            self._note("numa-unknown", message)
        elif all_nodes > nodes:
            message = f"{nodes} of {all_nodes} NUMA nodes are listed: add the whole output"
            self._note("nodes-missing", message)
        if nodes > 1 and any(node.distances is None for node in self.nodes):
            message = "NUMA distances are missing: add the output of `numactl -H`"
            self._note("distances-unknown", message)

    def packages(self) -> tuple[Package, ...] | None:
        """The sockets: from the rows, or the only one, or so many nodes in each, in order."""
        sockets, nodes = self._numbers.get("Socket(s)", 0), self._node_cpus
        each = 0 if not sockets or len(nodes) % sockets else len(nodes) // sockets
        starts = range(0, len(nodes), each) if each else ()
        equal = [frozenset().union(*nodes[start : start + each]) for start in starts]
        if not self.cpus:
            return None
        if self._rows and all("socket" in row for row in self._rows.values()):
            parts = self._rows_by("socket", self.cpus)
        elif sockets == 1:
            parts = {0: self.cpus}
        elif len(set(map(len, equal))) == 1 and frozenset().union(*equal) == self.cpus:
            parts = dict(enumerate(equal))
            message = f"the {len(nodes)} NUMA nodes are taken to be in the {sockets} sockets"
            self._note("packages-inferred", f"{message} in order; to be sure {_ADD}")
        else:
            self._note("packages-unknown", f"which CPUs are in which socket is unknown: {_ADD}")
            return None
        return tuple(Package(id=number, cpus=parts[number]) for number in sorted(parts))

    def l3(self) -> tuple[CpuSet, ...] | None:
        """The CPUs of each L3 domain, from the rows alone."""
        if any("l3" in row for row in self._rows.values()):
            return tuple(self._rows_by("l3", self.cpus).values())
        if self.cpus:
            self._note("l3-unknown", f"which CPUs share an L3 cache is unknown: {_ADD}")
        return None

    def efficiency_cpus(self) -> CpuSet:
        """The CPUs of slow cores, by the highest frequencies in the rows (case G5)."""
        speeds = {frozenset([cpu]): row.get("maxmhz", 0) for cpu, row in self._rows.items()}
        if not any(speeds.values()) and self._kinds > 1:
            message = "lscpu names several kinds of cores, and not which CPUs they are"
            self._note("cores-unknown", f"{message}: add the output of `lscpu -e`")
        return slow_cores(speeds)

    def cores(self) -> tuple[CpuSet, ...] | None:
        """The CPUs of each core: by lscpu's rows, or inferred from the numbering."""
        rows = self._rows
        if rows and all("core" in row for row in rows.values()):
            # The ids of `lscpu -y` repeat in each socket.
            return grouped(self.cpus, lambda cpu: (rows[cpu].get("socket"), rows[cpu]["core"]))
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
        if self._is_doubtful and self._online == len(self.cpus):
            self._note(
                "contradiction",
                f"lscpu says {counted(self._threads, 'thread')} per core, but {self._online} CPUs "
                f"online on {min(self._expected)} cores (sockets x cores per socket); its threads "
                "per core are not used",
            )
        if cores is None:
            message = "which CPUs share a core is unknown, and the numbering does not show it"
            self._note("cores-unknown", f"{message}, so each counts as a core of its own: {_ADD}")
        else:
            first = ", ".join(map(str, sorted(cores[0])))
            message = "which CPUs share a core is inferred from the numbering (the first core: "
            self._note("cores-inferred", f"{message}{first}); to be sure {_ADD}")

    def _has_one_thread(self) -> bool:
        """Whether lscpu prints one thread for each core, and its other numbers agree."""
        if self._threads != 1 or self._is_doubtful:
            return False
        least = min(self._expected, default=0)
        if not least:
            return self._all == len(self.cpus)
        # No more CPUs than cores, or, offline ones included, too few for two threads.
        return self._online <= least or self._all < 2 * least

    def _by_threads(self) -> tuple[CpuSet, ...] | None:
        """The online CPUs of each core of which lscpu would print these numbers, or None.

        Either all first threads come first, then all second ones (most servers: 0 and 48 of 96),
        or siblings are neighbours (POWER, many virtual machines, old Opterons). The nodes show
        which, since hardly any core lies in two nodes; with one node only the first way is the
        usual one, and on a virtual machine both are. A hybrid processor fails the count.
        """
        least = min(self._expected, default=0)
        size = self._all // least if self._is_doubtful else self._threads
        if size not in _SIZES or self._all % size:
            return None
        # Offline CPUs have ids among the others, so all ids are cut into cores.
        neighbours = self._within_nodes(lambda cpu: cpu // size)
        apart = self._within_nodes(lambda cpu: cpu % (self._all // size))
        are_in_nodes = self.cpus <= frozenset().union(*self._node_cpus)
        cores = neighbours if self._is_power or (apart is None and are_in_nodes) else apart
        is_open = self._is_virtual and len(self._node_cpus) < 2 and apart is not None
        has_gaps = max(self.cpus) >= self._all  # then where second threads begin is unknown
        if cores is None or (not self._is_power and (is_open or has_gaps)):
            return None
        is_counted = not self._expected or len(cores) in self._expected
        is_printed = self._is_doubtful or max(map(len, cores)) == self._threads
        return cores if is_counted and is_printed else None

    def _within_nodes(self, core_of: Callable[[int], int]) -> tuple[CpuSet, ...] | None:
        """The CPUs of each core, or None when a core lies in two nodes."""
        node_of = {cpu: number for number, some in enumerate(self._node_cpus) for cpu in some}
        cores = grouped(self.cpus, core_of)
        return cores if all(len(set(map(node_of.get, core))) == 1 for core in cores) else None

    def _two_runs(self) -> tuple[CpuSet, ...] | None:
        """The cores {c, c + d}, where each list of a node or GPU is two equal runs, d apart.

        On x86-64 Linux numbers the first threads of all cores before any second one, so with one
        thread per core a node has no gap such as 0-15,128-143. POWER numbers siblings side by
        side, and so do many virtual machines, where one list of that form is not enough.
        """
        cpus, distances = self.cpus, {_distance(ids) for ids in self._lists}
        distance = distances.pop() if len(distances) == 1 else None
        if distance is None or self._is_power or (self._is_virtual and len(self._lists) < 2):
            return None
        agrees = (
            distance in (self._expected or (distance,))
            and self._numbers.get("CPU(s)", 2 * distance) == 2 * distance
            and max(cpus) < 2 * distance
            and frozenset().union(*self._lists) == cpus
        )
        return grouped(cpus, lambda cpu: cpu % distance) if agrees else None


def _distance(cpus: CpuSet) -> int | None:
    """How far apart the starts of two equal runs are, when these CPUs are just two such runs."""
    half = len(cpus) // 2
    first, second = min(cpus), max(cpus) - half + 1
    runs = {*range(first, first + half), *range(second, second + half)}
    return second - first if cpus == runs and second > first + half else None


def _numbers(paste: Paste) -> dict[str, int]:
    """The numbers of lscpu; nothing where it is in another language."""
    if not _LIST.search(paste.text) and _TRANSLATED.search(paste.text):
        message = "the output of lscpu is not in English and is not used"
        paste.note("lscpu-translated", f"{message}: paste that of `LC_ALL=C lscpu`")
        return {}
    found: dict[str, int] = {}
    for key, number in _NUMBER.findall(paste.text):
        paste.keep(found, key, int(number), f"lscpu's values of {key!r}")
    return found


def _lists(paste: Paste) -> dict[int | None, CpuSet]:
    """The CPUs of each node, and under None those that are online."""
    lists: dict[int | None, CpuSet] = {}
    found = [(node, text.replace("\n", "")) for node, text in _LIST.findall(paste.text)]
    found += [(node, ",".join(text.split())) for node, text, _ in _NODE.findall(paste.text)]
    for node, text in found:
        what = f"the CPUs of NUMA node {node}" if node else "the online CPUs"
        cpus = read_cpulist(text)
        if cpus is None or not (cpus or node):
            paste.note("line-unreadable", f"{what} cannot be read ({text[:40]!r})")
        else:
            paste.keep(lists, int(node) if node else None, cpus, what)
    return lists


def _rows(paste: Paste) -> Rows:
    rows: dict[int, dict[str, int]] = {}
    columns: Sequence[str] = ()
    separator: str | None = None
    for line in paste.lines:
        if _HEADER.fullmatch(line):
            separator = "," if "," in line else None
            columns = [word.lower() for word in line.split(separator)]
            columns = columns if _PLACES.intersection(columns) else ()
        elif columns and line[:1].isdigit():
            if row := _row(columns, line.split(separator)):
                paste.keep(rows, row["cpu"], row, "lscpu's rows for one CPU")
        else:
            columns = ()
    return rows


def _row(columns: Sequence[str], values: list[str]) -> dict[str, int] | None:
    """A row as numbers; None for one that is cut, or whose CPU is offline."""
    if len(values) < len(columns):
        return None
    cells: dict[str, str] = {}
    for column, value in zip(columns, values, strict=False):  # L1d:L1i:L2:L3 is one column of -e
        cells.update(zip(column.split(":"), value.strip().split(":"), strict=False))
    matches = {key: _CELL.fullmatch(cell) for key, cell in cells.items()}
    numbers = {key: int(match[1]) for key, match in matches.items() if match}
    is_offline = cells.get("online", "").lower() in ("no", "n")
    is_whole = "core" in numbers or "core" not in cells
    is_known = numbers.get("cpu", MAX_CPU_ID + 1) <= MAX_CPU_ID
    return numbers if is_known and is_whole and not is_offline else None


def _distances(text: str) -> dict[int, Mapping[int, int]]:
    """The matrix of ``numactl -H``, as far as its rows are whole; 10 is the least distance."""
    columns: list[int] = []
    matrix: dict[int, Mapping[int, int]] = {}
    for match in _DISTANCES.finditer(text):
        if match[1]:
            columns = [int(word) for word in match[1].split()]
            continue
        numbers = [int(word) for word in match[3].split()]
        if len(numbers) == len(columns) and min(numbers) >= 10:
            matrix.setdefault(int(match[2]), dict(zip(columns, numbers, strict=True)))
    return matrix
