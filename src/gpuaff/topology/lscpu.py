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
from gpuaff.topology.model import NumaNode, Package, Topology
from gpuaff.topology.sysfs import slow_cores

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuaff.topology.pasted import Paste

_LIST = re.compile(
    r"(?am)^(?:On-?line CPU\(s\) list|NUMA node(\d{1,4}) CPU\(s\)):[ \t]*"
    r"(.*(?:(?:(?<=,)\n|\n(?=,))[\d,-]+)*)$"
)
"""A list of CPUs, of all that are online or of a node; a window may have wrapped it."""

_NODE = re.compile(r"(?am)^node (\d{1,4}) cpus:([\d\s]*)\nnode \1 size:[ \t]*(\d{1,12}) [kMG]B$")
"""A node's CPUs and memory in ``numactl -H``."""

_DISTANCES = re.compile(r"(?am)^(?:node((?:[ \t]+\d{1,5})+)|(\d{1,4}):((?:[ \t]+\d{1,5})+))$")
_NUMBER = re.compile(
    r"(?am)^(CPU\(s\)|Thread\(s\) per core|Core\(s\) per socket|Socket\(s\)|NUMA node\(s\)):"
    r"[ \t]*(\d{1,6})$"
)
_POWER = re.compile(r"(?im)^(?:Architecture:[ \t]*ppc|Model name:[ \t]*power)")
_TRANSLATED = re.compile(
    r"(?am)^(?!On-?line|Off-?line|NUMA node|CPU\(s\)[ \t]*:)(?=[^:\n]{0,60}(?:NUMA|CPU\(s\)))"
    r"[^:\n]{1,60}[:\uff1a][ \t]*\d[\d,-]*$"
)
"""A number or a list of CPUs under a key that lscpu does not have in English."""

_HEADER = re.compile(r"CPU(?:(?:,[\w:%]*)+|(?:[ \t]+[A-Z][\w:%]*)+)", re.ASCII)
"""``CPU,Core,Socket,…`` or ``CPU NODE SOCKET …``."""

_CELL = re.compile(r"(\d{1,9})(?:\.\d{1,9})?", re.ASCII)

Rows: TypeAlias = Mapping[int, Mapping[str, int]]
"""The numbers in the row of each CPU, by its column's name in lower case."""


def read_cpulist(text: str) -> CpuSet | None:
    """The CPUs (or nodes) of a cpulist; None when it is not one."""
    try:
        return parse_cpulist(text)
    except ValueError:
        return None


def read_machine(paste: Paste, near: Collection[CpuSet]) -> Topology:
    """The CPU side.

    ``near`` are the lists of CPUs in the table of GPUs, which count where there is nothing better.
    """
    machine = _Machine(paste, near)
    machine.note_missing()
    if not machine.cpus:
        return Topology()
    return Topology(
        cpus=machine.cpus,
        allowed=machine.cpus,
        cores=machine.cores(),
        efficiency_cpus=machine.efficiency_cpus(),
        packages=machine.packages(),
        l3=machine.l3(),
        numa_nodes=machine.nodes or None,
    )


class _Machine:
    """What the commands agree on; whatever they do not is noted."""

    def __init__(self, paste: Paste, near: Collection[CpuSet]) -> None:
        self._paste, self._note = paste, paste.note
        self._numbers, lists = _numbers(paste), _lists(paste)
        online = lists.pop(-1, frozenset())
        self._rows = self._whole_rows(online or frozenset().union(*lists.values()))
        lists = lists or self._rows_by("node", self._rows)
        self._distances = _distances(paste.text)
        # Where a node's list is missing, its CPUs are known from the table alone.
        is_partial = not (lists and lists.keys() >= self._distances.keys())
        listed = frozenset().union(*lists.values(), *(near if is_partial else ()))
        self.cpus = online or frozenset(self._rows) or listed
        self._is_complete = bool(online or self._rows or lists)
        self.nodes = self._numa_nodes(lists)
        self._node_cpus = [node.cpus for node in self.nodes if node.cpus]
        self._near_lists = self._node_cpus or near
        self._read_numbers()

    def _read_numbers(self) -> None:
        """What shows the cores where there are no rows."""
        numbers, text = self._numbers, self._paste.text
        self._is_power = bool(_POWER.search(text))
        self._is_virtual = "\nHypervisor vendor:" in f"\n{text}"
        # On x86-64 Linux numbers the first threads of all cores before any second one, so with one
        # thread per core a list has no gap such as 0-15,128-143. POWER numbers siblings in turn.
        gaps = {_sibling_gap(cpus) for cpus in self._near_lists}
        self._sibling_gap = gaps.pop() if len(gaps) == 1 and not self._is_power else 0
        known = numbers.get("CPU(s)", 2 * self._sibling_gap)
        self._all = max(known, len(self.cpus))  # with offline ones
        self._online = len(self.cpus) if self._is_complete else self._all
        # How many cores with online CPUs there may be: lscpu divides by the sockets, rounded down.
        sockets = numbers.get("Socket(s)", 0)
        keys = [key for key, _ in _NUMBER.findall(text)]  # a block for each kind of core
        self._has_kinds = keys.count("Core(s) per socket") > max(1, keys.count("CPU(s)"))
        least = 0 if self._has_kinds else numbers.get("Core(s) per socket", 0) * sockets
        self._expected = range(least, least + sockets if least else 0)
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
        self._note("lscpu-cut", message, add="`lscpu -p`, whole")
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
        count, found, nodes = self._numbers.get("CPU(s)"), len(self.cpus), len(self.nodes)
        all_nodes = max(self._numbers.get("NUMA node(s)", 0), len(self._distances))
        hint = f" (lscpu counts {count})" if count else ""
        if not found:
            self._note("cpus-unknown", f"the CPUs are unknown{hint}", add="`lscpu`")
        elif not self._is_complete:
            self._note(
                "cpus-partial", f"only {found} CPUs near a GPU are known{hint}", add="`lscpu`"
            )
        if not nodes:
            self._note("numa-unknown", "the NUMA nodes are unknown", add="`lscpu` or `numactl -H`")
        elif all_nodes > nodes:
            listed = f"{nodes} of {all_nodes} NUMA nodes are listed"
            self._note("nodes-missing", listed, add="`lscpu`, whole")
        if nodes > 1 and any(node.distances is None for node in self.nodes):
            self._note("distances-unknown", "NUMA distances are missing", add="`numactl -H`")

    def packages(self) -> tuple[Package, ...] | None:
        """The sockets: from the rows, or the only one, or so many nodes in each, in order."""
        sockets, nodes = self._numbers.get("Socket(s)", 0), self._node_cpus
        each = max(1, len(nodes) // max(1, sockets))
        equal = [frozenset().union(*nodes[at : at + each]) for at in range(0, len(nodes), each)]
        if self._rows and all("socket" in row for row in self._rows.values()):
            parts = self._rows_by("socket", self.cpus)
        elif sockets == 1:
            parts = {0: self.cpus}
        elif len(equal) == sockets and {len(part) * sockets for part in equal} == {len(self.cpus)}:
            parts = dict(enumerate(equal))
            message = f"the {len(nodes)} NUMA nodes are taken to be in {sockets} sockets, in order"
            self._note("packages-inferred", message, add="`lscpu -p` to be sure")
        else:
            self._note("packages-unknown", "the CPUs of each socket are unknown", add="`lscpu -p`")
            return None
        return tuple(Package(id=number, cpus=parts[number]) for number in sorted(parts))

    def l3(self) -> tuple[CpuSet, ...] | None:
        """The CPUs of each L3 domain, from the rows alone."""
        if any("l3" in row for row in self._rows.values()):
            return tuple(self._rows_by("l3", self.cpus).values())
        self._note("l3-unknown", "which CPUs share an L3 cache is unknown", add="`lscpu -p`")
        return None

    def efficiency_cpus(self) -> CpuSet:
        """The CPUs of slow cores, by the highest frequencies in the rows (case G5)."""
        speeds = {frozenset([cpu]): row.get("maxmhz", 0) for cpu, row in self._rows.items()}
        if not any(speeds.values()) and self._has_kinds:
            message = "lscpu names several kinds of cores, and not which CPUs they are"
            self._note("cores-unknown", message, add="`lscpu -e`")
        return slow_cores(speeds)

    def cores(self) -> tuple[CpuSet, ...] | None:
        """The CPUs of each core: by lscpu's rows, or inferred from the numbering."""
        rows = self._rows
        if rows and all("core" in row for row in rows.values()):
            # The ids of `lscpu -y` repeat in each socket.
            return grouped(self.cpus, lambda cpu: (rows[cpu].get("socket"), rows[cpu]["core"]))
        cores = self._numbered_cores()
        self._note_cores(cores)
        return cores

    def _note_cores(self, cores: Sequence[CpuSet] | None) -> None:
        if self._is_doubtful and self._is_complete:
            found = f"{self._online} CPUs are online on {min(self._expected)} cores"
            message = f"lscpu's threads per core ({self._threads}) are not used, as {found}"
            self._note("contradiction", message)
        if cores is None:
            message = "which CPUs share a core is unknown, so each counts as a core of its own"
            self._note("cores-unknown", message, add="`lscpu -p`")
        elif len(cores) < len(self.cpus) or self._threads != 1:
            first = ", ".join(map(str, sorted(cores[0])))
            message = "which CPUs share a core is inferred from the numbering (the first core: "
            self._note("cores-inferred", f"{message}{first})", add="`lscpu -p` to be sure")

    def _numbered_cores(self) -> tuple[CpuSet, ...] | None:
        """The online CPUs of each core of which lscpu would print these numbers, or None.

        Either all first threads come first, then all second ones (most servers: 0 and 48 of 96),
        or siblings are neighbours (POWER, many virtual machines): the nodes show which. With one
        node the first way is the usual one, and on a virtual machine both are.
        """
        least = min(self._expected, default=0)
        threads = self._threads or (2 if self._sibling_gap else 0)
        if 0 < least < self._online and (threads == 1 or self._is_doubtful):
            threads = self._all // least
        if threads not in (1, 2, 4, 8) or self._all % threads:
            return None
        count, cores = self._all // threads, None
        if threads > 1 and not self._is_power:
            cores = self._within_nodes(lambda cpu: cpu % count)
            # Offline CPUs have ids among the others; else where second threads begin is unknown.
            has_gaps = max(self.cpus) >= self._all
            if has_gaps or (cores and self._is_virtual and len(self._near_lists) < 2):
                return None
        cores = cores or self._within_nodes(lambda cpu: cpu // threads)
        if not cores or max(map(len, cores)) < threads:
            return None
        found = len(cores) if self._is_complete else count
        expected = self._expected or (count if threads == 1 else found,)
        return cores if found in expected else None

    def _within_nodes(self, core_of: Callable[[int], int]) -> tuple[CpuSet, ...] | None:
        """The CPUs of each core, or None when a core lies in two nodes."""
        node_of = {cpu: number for number, some in enumerate(self._node_cpus) for cpu in some}
        cores = grouped(self.cpus, core_of)
        return cores if all(len(set(map(node_of.get, core))) == 1 for core in cores) else None


def _sibling_gap(cpus: CpuSet) -> int:
    """How far apart the starts of two equal runs are; 0 when these CPUs are not two such runs."""
    half = len(cpus) // 2
    first, second = min(cpus), max(cpus) - half + 1
    runs = {*range(first, first + half), *range(second, second + half)}
    return second - first if cpus == runs and second > first + half else 0


def _numbers(paste: Paste) -> dict[str, int]:
    """The numbers of lscpu; nothing where it is in another language."""
    if not _LIST.search(paste.text) and _TRANSLATED.search(paste.text):
        message = "the output of lscpu is not in English and is not used"
        paste.note("lscpu-translated", message, add="`LC_ALL=C lscpu`")
        return {}
    found: dict[str, int] = {}
    for key, number in _NUMBER.findall(paste.text):
        paste.keep(found, key, int(number), f"lscpu's values of {key!r}")
    return found


def _lists(paste: Paste) -> dict[int, CpuSet]:
    """The CPUs of each node, and as those of node -1 all that are online."""
    lists: dict[int, CpuSet] = {}
    found = [(node, text.replace("\n", "")) for node, text in _LIST.findall(paste.text)]
    found += [(node, ",".join(text.split())) for node, text, _ in _NODE.findall(paste.text)]
    for node, text in found:
        what = f"the CPUs of NUMA node {node}" if node else "the online CPUs"
        cpus = read_cpulist(text)
        if cpus is None or not (cpus or node):
            paste.note("line-unreadable", f"{what} cannot be read ({text[:40]!r})")
        else:
            paste.keep(lists, int(node or -1), cpus, what)
    return lists


def _rows(paste: Paste) -> Rows:
    rows: dict[int, dict[str, int]] = {}
    columns: Sequence[str] = ()
    separator: str | None = None
    for line in paste.lines:
        if _HEADER.fullmatch(line):
            separator = "," if "," in line else None
            columns = [word.lower() for word in line.split(separator)]
            columns = columns if {"core", "socket", "node"}.intersection(columns) else ()
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
