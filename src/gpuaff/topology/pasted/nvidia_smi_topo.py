"""The table of ``nvidia-smi topo -m``.

A row is read from its left: the words for links, as many as the header names devices, then the
cells of affinity. nvidia-smi prints "GPU NUMA ID", and every N/A, one tab too far to the right,
and lists "NUMA Affinity" as nodes and ranges of nodes (case A24). Where tabs became blanks an
empty cell leaves no trace: what could then stand in two columns is not used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from gpuaff.cpuset import format_cpulist
from gpuaff.records import dataclass, field, replace
from gpuaff.topology.pasted.reading import Reading
from gpuaff.topology.pasted.table_words import (
    CPU,
    GPU,
    GPU_NUMA,
    LINK,
    NUMA,
    Header,
    cells,
    header,
    is_peer_table,
    unglue,
)

_ALL_COLUMNS = (CPU, NUMA, GPU_NUMA)
_IDS = re.compile(r"\d{1,9}(?:-\d{1,9})?(?:,\d{1,9}(?:-\d{1,9})?)*", re.ASCII)
_MAX_HEADER_LINES = 20
_MAX_TABLE_LINES = 10_000
"""The lines of all tables together; a machine's has a few hundred."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What the row of one GPU says; an empty text is an empty or missing cell, or N/A.

    Attributes:
        links: how it is connected, by device; empty when the row is not whole.
        cpu: the cell "CPU Affinity".
        numa: the cell "NUMA Affinity".
        gpu_numa: the cell "GPU NUMA ID".
    """

    links: Mapping[str, str] = field(default_factory=dict)
    cpu: str = ""
    numa: str = ""
    gpu_numa: str = ""

    @property
    def affinity(self) -> tuple[str, str, str]:
        """The three cells of affinity."""
        return self.cpu, self.numa, self.gpu_numa


@dataclass(frozen=True, kw_only=True)
class Table:
    """What was found.

    Attributes:
        gpus: the indices of all GPUs that a header or a row names, ascending.
        rows: the rows, by GPU.
    """

    gpus: tuple[int, ...] = ()
    rows: Mapping[int, Row] = field(default_factory=dict)


def read(reading: Reading) -> Table:
    """Read the tables of ``nvidia-smi topo -m``.

    Of two rows that differ the first one counts; a table that differs from one before it is
    another machine's and not read at all.

    Raises:
        TopologyError: there are more rows than any machine has.
    """
    scanner = _Scanner()
    for number, line in enumerate(reading.lines):
        scanner.feed(number, line)
        if scanner.taken > _MAX_TABLE_LINES:
            raise reading.error(
                f"more than {_MAX_TABLE_LINES} lines of `nvidia-smi topo -m`: not one machine's"
            )
    rows: dict[int, Row] = {}
    gpus: set[int] = set()
    for found in scanner.tables:
        own = list(_rows(reading, found))
        if clash := {gpu for gpu, row in own if _exclude(rows.get(gpu, row), row)}:
            reading.note(
                "contradiction",
                f"GPU {format_cpulist(clash)} has two rows that differ, so two machines' tables "
                "are taken to be in the text; the first one is used",
            )
            continue
        for gpu, row in own:
            _keep(reading, rows, gpu, row)
        gpus.update(found.gpus)
    return Table(gpus=tuple(sorted(gpus)), rows=rows)


@dataclass()
class _Raw:
    """A row as found: its GPU, its cells, and the number of the line where it ends."""

    gpu: int
    cells: list[str]
    tabs: bool
    last_line: int
    words: int


@dataclass()
class _Found:
    """A table as found."""

    header: Header
    header_lines: list[str] = field(default_factory=list)
    rows: list[_Raw] = field(default_factory=list)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of affinity: where the header does not tell, those there are today."""
        return self.header.affinity if CPU in self.header.affinity else _ALL_COLUMNS

    @property
    def gpus(self) -> Iterator[int]:
        """The GPUs that it names; none in a list of names that nothing shows to be a table."""
        if self.rows or self.header.affinity:
            matches = (GPU.fullmatch(name) for name in self.header.matrix)
            yield from (int(match[1]) for match in matches if match)
        yield from (row.gpu for row in self.rows)


class _Scanner:
    """Goes through the lines and gathers headers and rows.

    Attributes:
        tables: what was found.
        taken: how many lines belong to them.
    """

    def __init__(self) -> None:
        self.tables: list[_Found] = []
        self.taken = 0
        self._inside = False
        """Whether the line before belongs to a table."""

    def feed(self, number: int, line: str) -> None:
        """Take the next line."""
        self._inside = self._header(line) or self._row(number, line) or self._wrapped(number, line)
        self.taken += self._inside

    def _header(self, line: str) -> bool:
        found = header(line)
        if found is not None:
            self.tables.append(_Found(found, [line]))
            return True
        if not self._inside or self.tables[-1].rows:
            return False
        table = self.tables[-1]
        lines = [*table.header_lines, line]
        found = header(" ".join(lines)) if len(lines) <= _MAX_HEADER_LINES else None
        if found is not None:
            table.header, table.header_lines = found, lines
        return found is not None

    def _row(self, number: int, line: str) -> bool:
        if not line.startswith("GPU"):
            return False
        label, *rest = cells(line)
        gpu = GPU.fullmatch(label)
        words = [cell for cell in rest if cell]
        if not gpu or is_peer_table(words) or not self._is_row(words):
            return False
        if not self.tables:
            self.tables.append(_Found(Header()))
        raw = _Raw(int(gpu[1]), rest, "\t" in line, number, len(words))
        self.tables[-1].rows.append(raw)
        return True

    def _is_row(self, words: list[str]) -> bool:
        """A link comes first; or, within a table, a row that was cut short."""
        if words and LINK.fullmatch(words[0]):
            return True
        return self._inside and bool(self.tables[-1].header.affinity)

    def _wrapped(self, number: int, line: str) -> bool:
        """Whether the line is the rest of a row that did not fit the window."""
        if not (self._inside and self.tables[-1].rows):
            return False
        table, raw = self.tables[-1], self.tables[-1].rows[-1]
        words = cells(line)
        if raw.words >= len(table.header.matrix) + 1 or not all(map(_is_cell, words)):
            return False
        raw.cells += words
        raw.words += len(words)
        raw.last_line = number
        return True


def _is_cell(word: str) -> bool:
    return bool(word == "N/A" or LINK.fullmatch(word) or _IDS.fullmatch(word))


def _rows(reading: Reading, table: _Found) -> Iterator[tuple[int, Row]]:
    if table.rows and not table.header.matrix:
        reading.note(
            "header-missing",
            "the table has no header: its cells are taken for CPU Affinity, NUMA Affinity and "
            "GPU NUMA ID in this order",
        )
    parts = [_parts(reading, raw, len(table.header.matrix)) for raw in table.rows]
    longest = max((_words(tail) for _, tail in parts), default=0)
    for raw, (links, tail) in zip(table.rows, parts, strict=True):
        last = raw.last_line == reading.cut_line
        if _is_cut(tail, longest, len(table.header.affinity) if last else 0):
            _note_cut(reading, raw.gpu)
            tail = _without_last_word(tail)
        whole = len(links) == len(table.header.matrix)
        cpu, numa, gpu_numa = _affinity(tail, table.columns, by_position=raw.tabs and whole)
        named = dict(zip(table.header.matrix, links, strict=True)) if whole else {}
        yield raw.gpu, Row(links=named, cpu=cpu, numa=numa, gpu_numa=gpu_numa)


def _parts(reading: Reading, raw: _Raw, count: int) -> tuple[list[str], list[str]]:
    """A row's links, of which there should be ``count``, and the cells behind them."""
    links: list[str] = []
    position = 0
    for cell in raw.cells:
        if LINK.fullmatch(cell):
            links.append(cell)
        elif cell or not count or len(links) == count:
            break
        position += 1
    return links, unglue(reading, raw.cells[position:])


def _words(tail: Sequence[str]) -> int:
    return sum(map(bool, tail))


def _is_cut(tail: Sequence[str], longest: int, columns: int) -> bool:
    """Whether a row ends early.

    It has fewer cells than its peers, or than the header where the whole text ends with it. One
    that ends with N/A is whole: its empty cells left no trace.
    """
    return _words(tail) < max(longest, columns) and (not tail or tail[-1] != "N/A")


def _without_last_word(tail: Sequence[str]) -> list[str]:
    """The cells but for the last one that is not empty: it may be half of itself."""
    filled = [position for position, cell in enumerate(tail) if cell]
    return list(tail[: filled[-1]]) if filled else []


def _note_cut(reading: Reading, gpu: int) -> None:
    reading.note(
        "row-cut",
        f"the row of GPU {gpu} is shorter than it should be; its last cell is not used: paste "
        "the whole output of `nvidia-smi topo -m`",
    )


def _affinity(
    tail: Sequence[str], columns: Sequence[str], *, by_position: bool
) -> tuple[str, str, str]:
    words = [cell for cell in tail if cell]
    if by_position:
        cpu, rest = "".join(tail[:1]), list(tail[1:])
    elif words and (len(words) >= len(columns) or _is_certain(words[0])):
        cpu, rest = words[0], words[1:]
    else:
        cpu, rest = "", words
    numa, gpu_numa = _nodes(rest, columns)
    return _known(cpu), _known(numa), _known(gpu_numa)


def _is_certain(word: str) -> bool:
    """Whether this can be nothing but CPUs: a lone number may be a node as well."""
    return word == "N/A" or "-" in word or "," in word


def _nodes(rest: Sequence[str], columns: Sequence[str]) -> tuple[str, str]:
    """NUMA Affinity and GPU NUMA ID, from the cells behind CPU Affinity."""
    words = [cell for cell in rest if cell]
    if len(words) > 1 or GPU_NUMA not in columns:
        numa, gpu_numa = (*words, "", "")[:2]
        return numa, gpu_numa
    if not words or rest[1:2] == words:
        return "", ""  # the second cell may be a shifted NUMA Affinity or a GPU NUMA ID in place
    return (words[0], "") if rest[0] else ("", words[0])


def _known(cell: str) -> str:
    return "" if cell == "N/A" else cell


def _keep(reading: Reading, rows: dict[int, Row], gpu: int, row: Row) -> None:
    """Keep a row, or what it adds to the one that there is."""
    known = rows.setdefault(gpu, row)
    if any(known.affinity) and any(row.affinity) and known.affinity != row.affinity:
        reading.note(
            "contradiction",
            f"GPU {format_cpulist([gpu])} has two rows that differ; the first one is used",
        )
    elif not any(known.affinity) and any(row.affinity):
        rows[gpu] = row
    elif not known.links and row.links:
        rows[gpu] = replace(known, links=row.links)


def _exclude(one: Row, other: Row) -> bool:
    """Whether two rows tell different things, and not just one of them less."""
    both = zip(one.affinity, other.affinity, strict=True)
    return any(here and there and here != there for here, there in both)
