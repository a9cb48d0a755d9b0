"""What ``lscpu``, its rows (``lscpu -p`` or ``-e``) and ``numactl -H`` print, in English."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from gpuaff.cpuset import MAX_CPU_ID, CpuSet
from gpuaff.topology.pasted.text import Paste

_LIST = re.compile(
    r"^[^:\n]{0,40}?(?:On-?line\sCPU\(s\)\slist|NUMA\snode(\d{1,4})\sCPU\(s\))\s?:[ \t]*"
    r"(.*(?:(?:(?<=,)\n|\n(?=,))[\d,-]+)*)$",
    re.ASCII | re.IGNORECASE | re.MULTILINE,
)
"""A list of CPUs, of all that are online or of a node, which may be wrapped at its commas."""

CPUS, THREADS = "CPU(s)", "Thread(s) per core"
CORES, SOCKETS, NODES = "Core(s) per socket", "Socket(s)", "NUMA node(s)"
"""The numbers that lscpu prints, by its own words. Its CPUs include those that are offline."""

_NUMBER = re.compile(
    rf"^({'|'.join(map(re.escape, (CPUS, THREADS, CORES, SOCKETS, NODES)))}):[ \t]*(\d{{1,6}})$",
    re.ASCII | re.MULTILINE,
)
_POWER = re.compile(r"(?im)^(?:Architecture:[ \t]*ppc|Model name:[ \t]*power)")
_VIRTUAL = re.compile(r"^Hypervisor vendor:", re.MULTILINE)
_TRANSLATED = re.compile(
    r"^(?!On-?line|Off-?line|NUMA node|CPU\(s\)[ \t]*:)(?=[^:\n]{0,60}(?:NUMA|CPU\(s\)))"
    r"[^:\n]{1,60}[:\uff1a][ \t]*\d[\d,-]*$",
    re.ASCII | re.MULTILINE,
)
"""A number or a list of CPUs under a key that lscpu does not have in English."""


class Printed(NamedTuple):
    """What the commands printed; of two lines that differ the first one counts.

    ``cores`` is how many cores with online CPUs there may be, by sockets and cores per socket,
    which lscpu rounds down; empty when unknown, or when there are such numbers for each of several
    kinds of cores. ``rows`` has the numbers that ``lscpu -p`` or ``-e`` prints for each online CPU:
    of its ``core``, ``socket``, ``node``, ``l1d`` (its first-level cache, which no two cores share)
    and ``l3``, as far as the row has them.
    """

    online: CpuSet | None
    nodes: Mapping[int, CpuSet]  # by lscpu; empty sets for nodes without CPUs
    numbers: Mapping[str, int]
    cores: range
    is_power: bool
    is_virtual: bool
    numactl: Mapping[int, CpuSet]  # the nodes again
    rows: Mapping[int, Mapping[str, int]]
    has_memory: Mapping[int, bool]
    distances: Mapping[int, Mapping[int, int]]  # to every node of the matrix


def read(paste: Paste) -> Printed:
    """Read what the text has of these commands' output."""
    numbers, cores = _numbers(paste)
    lists = _lists(paste, numbers.get(CPUS))
    if not lists and _TRANSLATED.search(paste.text):
        numbers, cores = {}, range(0)
        paste.note(
            "lscpu-translated",
            "the output of lscpu is not in English and is not used: paste that of `LC_ALL=C lscpu`",
        )
    sizes = _NODE_SIZE.findall(paste.text)
    return Printed(
        online=lists.pop(None, None),
        nodes={node: cpus for node, cpus in lists.items() if node is not None},
        numbers=numbers,
        cores=cores,
        is_power=bool(_POWER.search(paste.text)),
        is_virtual=bool(_VIRTUAL.search(paste.text)),
        numactl=_numactl(paste),
        rows=_rows(paste),
        has_memory={int(node): int(size) > 0 for node, size in reversed(sizes)},
        distances=_distances(paste.text),
    )


def _numbers(paste: Paste) -> tuple[dict[str, int], range]:
    found: dict[str, int] = {}
    matches = _NUMBER.findall(paste.text)
    for key, number in matches:
        if found.setdefault(key, int(number)) != int(number):
            paste.note("contradiction", f"lscpu: {key!r} has two values; the first is used")
    keys = [key for key, _ in matches]
    several_kinds = keys.count(CORES) > max(1, keys.count(CPUS))
    sockets = found.get(SOCKETS, 0)
    least = 0 if several_kinds else found.get(CORES, 0) * sockets
    return found, range(least, least + sockets) if least else range(0)


def _lists(paste: Paste, count: int | None) -> dict[int | None, CpuSet]:
    """The CPUs of each node, and under None those that are online."""
    lists: dict[int | None, CpuSet] = {}
    cut = False
    last = None
    for match in _LIST.finditer(paste.text):
        last, cut = int(match[1]) if match[1] else None, paste.is_cut(match)
        _keep(paste, lists, last, "lscpu", match[2].replace("\n", ""))
    if cut and last in lists and not _is_whole(lists, last, count):
        del lists[last]
        paste.note(
            "line-unreadable", "lscpu: the text breaks off within the last list, which is not used"
        )
    return lists


def _is_whole(lists: Mapping[int | None, CpuSet], last: int | None, count: int | None) -> bool:
    """Whether the last list, where the text breaks off, is whole by the number of CPUs."""
    if last is None:
        return count in (None, len(lists[last]))
    nodes = frozenset().union(*(cpus for node, cpus in lists.items() if node is not None))
    return nodes == lists[None] if lists.get(None) else count in (None, len(nodes))


def _keep(
    paste: Paste, lists: dict[int | None, CpuSet], node: int | None, command: str, value: str
) -> None:
    """Keep the first list of a node's CPUs, or of the online ones, which can't be empty."""
    cpus = paste.cpulist(",".join(value.split()) if command == "numactl" else value)
    what = "the online CPUs" if node is None else f"the CPUs of NUMA node {node}"
    if cpus is None or (node is None and not cpus):
        paste.note("line-unreadable", f"{command}: {what} cannot be read ({value[:40]!r})")
    elif lists.setdefault(node, cpus) is not cpus:
        problem = f"{command} lists {what} twice, and differently"
        paste.note("contradiction", f"{problem}; the first list is used")


# ``lscpu -p`` and ``lscpu -e``: a row for each CPU.

_DEFAULT = ("cpu", "core", "socket", "node", "", "l1d", "l1i", "l2", "l3")
"""The columns of ``lscpu -p``, known even where its header was filtered out."""

_USED = ("core", "socket", "node", "l1d", "l3")
_PLACES = frozenset({"core", "socket", "cluster", "node", "book", "drawer"})
_KNOWN = _PLACES | {
    *("cpu", "l1d", "l1i", "l2", "l3", "cache", "online", "configured", "polarization", "address"),
    *("scalmhz%", "maxmhz", "minmhz", "mhz", "bogomips"),
}
_BARE_ROW = re.compile(r"\d{1,5},\d{1,5},\d{0,5},\d{0,5},,[\d,]{0,80}", re.ASCII)
_CELL = re.compile(r"\d{1,9}", re.ASCII)


def _rows(paste: Paste) -> dict[int, Mapping[str, int]]:
    rows: dict[int, Mapping[str, int]] = {}
    columns: Sequence[str] = ()
    separator: str | None = None
    for line in paste.lines:
        if header := _header(line):
            columns, separator = header, "," if "," in line else None
            continue
        if not columns and _BARE_ROW.fullmatch(line):
            columns, separator = _DEFAULT, ","
        if columns and line[:1].isdigit():
            for cpu, row in _row(columns, line.split(separator)):
                if rows.setdefault(cpu, row) != row:
                    problem = f"lscpu's rows for CPU {cpu} differ"
                    paste.note("contradiction", f"{problem}; the first is used")
        elif line:
            columns = ()
    return rows


def _header(line: str) -> Sequence[str]:
    """The columns that a header names, in lower case: ``# CPU,Core,…`` or ``CPU NODE …``."""
    if not line[:4].lower().startswith(("cpu,", "cpu ", "cpu\t")) or len(line) > 400:
        return ()
    words = [word.strip().lower() for word in line.split("," if "," in line else None)]
    names = {part for word in words for part in word.split(":")} - {""}
    return words if names <= _KNOWN and names & _PLACES else ()


def _row(columns: Sequence[str], values: list[str]) -> Iterator[tuple[int, Mapping[str, int]]]:
    """A row as CPU and numbers; nothing for one that is cut, or whose CPU is offline."""
    if len(values) < len(columns):
        return
    cells: dict[str, str] = {}
    for column, value in zip(columns, values, strict=False):  # L1d:L1i:L2:L3 is one column of -e
        cells.update(zip(column.split(":"), value.strip().split(":"), strict=False))
    numbers = {key: int(cell) for key, cell in cells.items() if _CELL.fullmatch(cell)}
    is_offline = cells.get("online", "").lower() in ("no", "n")
    if is_offline or numbers.get("cpu", MAX_CPU_ID + 1) > MAX_CPU_ID:
        return
    if "core" in numbers or "core" not in cells:
        yield numbers["cpu"], {key: numbers[key] for key in _USED if key in numbers}


# ``numactl -H`` (``--hardware``): each node's CPUs and memory, and the distances.

_NODE_CPUS = re.compile(r"^node (\d{1,4}) cpus:(.*(?:\n\d[\d \t]*)*)$", re.ASCII | re.MULTILINE)
_NODE_SIZE = re.compile(r"^node (\d{1,4}) size:[ \t]*(\d{1,12}) [kMG]B$", re.ASCII | re.MULTILINE)
_DISTANCES = re.compile(
    r"^(?:node((?:[ \t]+\d{1,5})+)|(\d{1,4}):((?:[ \t]+\d{1,5})+))$", re.ASCII | re.MULTILINE
)
_ITSELF = 10
"""The distance of a node to itself, and so the least there is."""


def _numactl(paste: Paste) -> dict[int, CpuSet]:
    nodes: dict[int | None, CpuSet] = {}
    for match in _NODE_CPUS.finditer(paste.text):
        if not paste.is_cut(match):  # a size follows each list
            _keep(paste, nodes, int(match[1]), "numactl", match[2].strip())
    return {node: cpus for node, cpus in nodes.items() if node is not None}


def _distances(text: str) -> dict[int, Mapping[int, int]]:
    """The matrix below ``node distances:``, as far as its rows are whole."""
    columns: list[int] = []
    matrix: dict[int, Mapping[int, int]] = {}
    for match in _DISTANCES.finditer(text):
        if match[1]:
            columns = [int(word) for word in match[1].split()]
            continue
        numbers = [int(word) for word in match[3].split()]
        if len(numbers) == len(columns) and min(numbers) >= _ITSELF:
            matrix.setdefault(int(match[2]), dict(zip(columns, numbers, strict=True)))
    return matrix
