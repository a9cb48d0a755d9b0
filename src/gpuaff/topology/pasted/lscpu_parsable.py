"""The tables of ``lscpu -p`` and ``lscpu -e``: one row per CPU, columns named by the header."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from gpuaff.cpuset import MAX_CPU_ID
from gpuaff.records import dataclass
from gpuaff.topology.pasted.reading import Reading

_DEFAULT = ("cpu", "core", "socket", "node", "", "l1d", "l1i", "l2", "l3")
"""What ``lscpu -p`` prints without an argument; known even when its header was filtered out."""
_BARE_ROW = re.compile(r"\d{1,5},\d{1,5},\d{0,5},\d{0,5},,[\d,]{0,80}", re.ASCII)
_NUMBER = re.compile(r"\d{1,9}", re.ASCII)
_CACHES = frozenset({"l1d", "l1i", "l2", "l3", "cache"})
_PLACES = frozenset({"core", "socket", "cluster", "node", "book", "drawer"})
_STATES = frozenset({"online", "configured", "polarization", "address"})
_SPEEDS = frozenset({"scalmhz%", "maxmhz", "minmhz", "mhz", "bogomips"})
_KNOWN = frozenset({"cpu"}) | _CACHES | _PLACES | _STATES | _SPEEDS


@dataclass(frozen=True, kw_only=True)
class CpuRow:
    """One online CPU: the numbers of what it belongs to; None where the row has none.

    ``l1`` is its first-level data cache, which no two cores share.
    """

    core: int | None = None
    socket: int | None = None
    node: int | None = None
    l1: int | None = None
    l3: int | None = None


def read(reading: Reading) -> Mapping[int, CpuRow]:
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
    if not _NUMBER.fullmatch(cells["cpu"]) or cells.get("online", "").lower() in ("no", "n"):
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
    return int(text) if text is not None and _NUMBER.fullmatch(text) else None
