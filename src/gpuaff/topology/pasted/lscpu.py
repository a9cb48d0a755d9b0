"""What ``lscpu`` says, by its ``key: value`` lines.

The keys are known in the languages that lscpu speaks, see :mod:`.lscpu_words`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gpuaff.cpuset import MAX_CPU_ID, CpuSet
from gpuaff.topology.pasted.text import Reading

# The words with which ``lscpu`` begins its lines, in the languages that are pasted most.
#
# In lower case and without the colon.


_WORDS = {
    "cpu_count": ("cpu(s)",),
    "threads": (
        "thread(s) per core",
        "thread(s) pro kern",
        "thread(s) par cœur",
        "hilo(s) de procesamiento por núcleo",
        "每个核的线程数",
    ),
    "cores_per_socket": (
        "core(s) per socket",
        "kern(e) pro sockel",
        "cœur(s) par socket",
        "núcleo(s) por «socket»",
        "每个座的核数",
    ),
    "sockets": ("socket(s)", "sockel", "«socket(s)»", "座"),
    "node_count": (
        "numa node(s)",
        "numa-knoten",
        "nœud(s) numa",
        "modo(s) numa",
        "nodo(s) numa",
        "numa 节点",
    ),
}

NUMBERS = {word: name for name, words in _WORDS.items() for word in words}
"""What a line counts, by its key."""

_ONLINE = frozenset(
    {"lista de la(s) cpu(s) en línea", "liste de processeur(s) en ligne", "在线 cpu 列表"}
)

_NODE = re.compile(r"(?=.*(?:CPU|roces))(?:.*\W)?NUMA\D*(\d{1,4})(?!.*\d)", re.ASCII)
_HYPERVISOR = re.compile(r"h[iy]perv[iy]s|超管理器", re.IGNORECASE)


def is_online_list(key: str) -> bool:
    """Whether a line lists the online CPUs."""
    lower = key.lower()
    said = ("on-line" in lower or "online" in lower) and "list" in lower
    return said or lower in _ONLINE


def node_number(key: str) -> int | None:
    """The NUMA node whose CPUs a line lists; None when it is no such line."""
    found = _NODE.match(key)
    return int(found[1]) if found else None


def is_hypervisor(key: str) -> bool:
    """Whether a line names a hypervisor."""
    return _HYPERVISOR.search(key) is not None


_WRAPPED = re.compile(r"[\d,-]+", re.ASCII)
_MAX_KEY = 60
_POWER = re.compile(r"ppc(?:64)?(?:le)?", re.IGNORECASE)
"""The architecture, whatever the language calls it."""
_NUMBER = re.compile(r"\d{1,6}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lscpu:
    """What was found.

    Attributes:
        online: the "On-line CPU(s) list".
        nodes: each "NUMA nodeN CPU(s)" list; empty for a node without CPUs.
        numbers: ``cpu_count`` (offline CPUs included), ``node_count``, ``threads`` per core,
            ``cores_per_socket`` and ``sockets``, those that were there.
        cores: how many cores with online CPUs there may be, by sockets and cores per socket,
            which lscpu rounds down; empty where it does not tell, or has such numbers for each
            of several kinds of cores.
        power: whether it is a POWER machine.
        virtual: whether a hypervisor is named.
    """

    online: CpuSet | None = None
    nodes: Mapping[int, CpuSet] = field(default_factory=dict)
    numbers: Mapping[str, int] = field(default_factory=dict)
    cores: range = range(0)
    power: bool = False
    virtual: bool = False


def read_summary(reading: Reading) -> Lscpu:
    """Read the lines of ``lscpu``; of two that say different things the first one counts."""
    lists: dict[str, CpuSet] = {}
    numbers: dict[str, int] = {}
    keys: list[str] = []
    power = virtual = False
    last = None
    for number, key, value in _pairs(reading):
        name = _list_name(key)
        if name is not None:
            _keep_list(reading, lists, name, value)
            last = name if number == reading.cut_line else None
        elif (word := NUMBERS.get(key.lower())) and _NUMBER.fullmatch(value):
            keys.append(word)
            _keep_number(reading, numbers, word, key, value)
        power |= bool(_POWER.fullmatch(value)) or (
            key == "Model name" and value.lower().startswith("power")
        )
        virtual |= is_hypervisor(key)
    _drop_cut(reading, lists, last, numbers.get("cpu_count"))
    online = lists.pop("online", None)
    nodes = {int(name): cpus for name, cpus in lists.items()}
    kinds = keys.count("cores_per_socket") > max(1, keys.count("cpu_count"))
    return Lscpu(
        online=online,
        nodes=nodes,
        numbers=numbers,
        cores=range(0) if kinds else _cores(numbers),
        power=power,
        virtual=virtual,
    )


def _cores(numbers: Mapping[str, int]) -> range:
    per_socket, sockets = numbers.get("cores_per_socket", 0), numbers.get("sockets", 0)
    least = per_socket * sockets
    return range(least, least + sockets) if least else range(0)


def _pairs(reading: Reading) -> Iterator[tuple[int, str, str]]:
    """Each line's last number, key and value; a list wrapped at a comma is joined."""
    head: tuple[int, str] | None = None
    value: list[str] = []
    for number, line in enumerate((*reading.lines, "")):
        if head and _WRAPPED.fullmatch(line) and (value[-1].endswith(",") or line[0] == ","):
            head = (number, head[1])
            value.append(line)
            continue
        if head:
            yield *head, "".join(value)
        key, colon, first = line.partition(":")
        head = (number, key.rstrip()) if colon and len(key) <= _MAX_KEY else None
        value = [first.strip()]


def _drop_cut(
    reading: Reading, lists: dict[str, CpuSet], last: str | None, count: int | None
) -> None:
    """Drop the list with which the text breaks off, if the numbers show that more followed."""
    if last is None or last not in lists:
        return
    online = lists.get("online")
    if last == "online":
        whole = count in (None, len(lists[last]))
    else:
        nodes = frozenset().union(*(cpus for name, cpus in lists.items() if name != "online"))
        whole = nodes == online if online else count in (None, len(nodes))
    if not whole:
        del lists[last]
        reading.note(
            "line-unreadable", "lscpu: the text breaks off within the last list, which is not used"
        )


def _list_name(key: str) -> str | None:
    """``online``, a node's number, or None when the line is no list of CPUs."""
    if is_online_list(key):
        return "online"
    node = node_number(key)
    return None if node is None else str(node)


def _keep_list(reading: Reading, lists: dict[str, CpuSet], name: str, value: str) -> None:
    cpus = reading.cpulist(value)
    if cpus is None or (name == "online" and not cpus):
        what = "the on-line list" if name == "online" else f"the CPUs of node {name}"
        reading.note("line-unreadable", f"lscpu: {what} cannot be read ({value[:40]!r}): cut?")
    elif lists.setdefault(name, cpus) is not cpus:
        what = "the on-line CPUs" if name == "online" else f"the CPUs of node {name}"
        reading.note(
            "contradiction", f"lscpu tells {what} twice and differently; the first one is used"
        )


def _keep_number(
    reading: Reading, numbers: dict[str, int], word: str, key: str, value: str
) -> None:
    number = int(value)
    if numbers.setdefault(word, number) != number:
        reading.note(
            "contradiction", f"lscpu tells {key!r} twice and differently; the first one is used"
        )


# The tables of ``lscpu -p`` and ``lscpu -e``: one row per CPU, columns named by the header.


_DEFAULT = ("cpu", "core", "socket", "node", "", "l1d", "l1i", "l2", "l3")
"""What ``lscpu -p`` prints without an argument; known even when its header was filtered out."""
_BARE_ROW = re.compile(r"\d{1,5},\d{1,5},\d{0,5},\d{0,5},,[\d,]{0,80}", re.ASCII)
_CELL_NUMBER = re.compile(r"\d{1,9}", re.ASCII)
_CACHES = frozenset({"l1d", "l1i", "l2", "l3", "cache"})
_PLACES = frozenset({"core", "socket", "cluster", "node", "book", "drawer"})
_STATES = frozenset({"online", "configured", "polarization", "address"})
_SPEEDS = frozenset({"scalmhz%", "maxmhz", "minmhz", "mhz", "bogomips"})
_KNOWN = frozenset({"cpu"}) | _CACHES | _PLACES | _STATES | _SPEEDS


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuRow:
    """One online CPU: the numbers of what it belongs to; None where the row has none.

    ``l1`` is its first-level data cache, which no two cores share.
    """

    core: int | None = None
    socket: int | None = None
    node: int | None = None
    l1: int | None = None
    l3: int | None = None


def read_rows(reading: Reading) -> Mapping[int, CpuRow]:
    """Every online CPU that such tables list."""
    rows: dict[int, CpuRow] = {}
    for cpu, row in _rows(reading.lines):
        if rows.setdefault(cpu, row) != row:
            reading.note(
                "contradiction",
                f"lscpu's rows for CPU {cpu} differ; the first one is used",
            )
    return rows


def _rows(lines: Sequence[str]) -> Iterator[tuple[int, CpuRow]]:
    columns: tuple[str, ...] = ()
    commas = False
    for line in lines:
        if (header := _header(line)) is not None:
            columns, commas = header, "," in line
            continue
        if not columns and _BARE_ROW.fullmatch(line):
            columns, commas = _DEFAULT, True
        if columns and line[:1].isdigit():
            row = _row(columns, line.split(",") if commas else line.split())
            if row is not None:
                yield row
        elif line:
            columns = ()


def _header(line: str) -> tuple[str, ...] | None:
    """The columns that a header names, in lower case: ``# CPU,Core,…`` or ``CPU NODE …``."""
    if not line[:4].lower().startswith(("cpu,", "cpu ", "cpu\t")) or len(line) > 400:
        return None
    words = [word.strip().lower() for word in (line.split(",") if "," in line else line.split())]
    names = {part for word in words for part in word.split(":")} - {""}
    return tuple(words) if names <= _KNOWN and names & _PLACES else None


def _row(columns: tuple[str, ...], values: list[str]) -> tuple[int, CpuRow] | None:
    """A row as CPU and numbers; None for one that is cut, or whose CPU is offline."""
    if len(values) < len(columns):
        return None
    cells = dict(_cells(columns, values))
    if not _CELL_NUMBER.fullmatch(cells["cpu"]) or cells.get("online", "").lower() in ("no", "n"):
        return None
    core, socket, node = (_number(cells.get(key)) for key in ("core", "socket", "node"))
    if int(cells["cpu"]) > MAX_CPU_ID or (core is None and "core" in cells):
        return None
    return int(cells["cpu"]), CpuRow(
        core=core,
        socket=socket,
        node=node,
        l1=_number(cells.get("l1d")),
        l3=_number(cells.get("l3")),
    )


def _cells(columns: tuple[str, ...], values: list[str]) -> Iterator[tuple[str, str]]:
    """Column by column, the caches (``L1d:L1i:L2:L3`` under one name) one by one."""
    for column, value in zip(columns, values, strict=False):
        yield from zip(column.split(":"), value.strip().split(":"), strict=False)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and _CELL_NUMBER.fullmatch(text) else None
