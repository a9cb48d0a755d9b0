"""What ``nvidia-smi topo -m`` and ``nvidia-smi -L`` print.

A row of the table is read from its left: the words for links, as many as the header names
devices, then the cells of affinity. nvidia-smi prints "GPU NUMA ID", and every N/A, one tab too
far to the right, and lists "NUMA Affinity" as nodes and ranges of nodes (case A24). Where tabs
became blanks an empty cell leaves no trace: what could then stand in two columns is not used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpuaff.cpuset import format_cpulist
from gpuaff.topology.model import MigInstance
from gpuaff.topology.pasted.text import Paste

_CPU, _NUMA, _GPU_NUMA = _COLUMNS = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
_MAX_COLUMNS = 600
_MAX_HEADER_LINES = 20
_MAX_TABLE_LINES = 10_000
"""The lines of all tables together; a machine's has a few hundred."""

_GPU = re.compile(r"GPU(\d{1,3}):?", re.ASCII)
_LINK = re.compile(r"X|NV\d{1,3}|SYS|SOC|NODE|PHB|PXB|PIX|PSB|C2C", re.ASCII)
"""How two devices are connected. ROCm's tables have the same shape and other words."""
_NIC = re.compile(r"[A-Za-z][A-Za-z0-9_.:-]{0,39}\d", re.ASCII)
_IDS = re.compile(r"\d{1,9}(?:-\d{1,9})?(?:,\d{1,9}(?:-\d{1,9})?)*", re.ASCII)
_PEER = frozenset({"OK", "CNS", "GNS", "TNS", "NS", "DR", "CS", "U"})
"""The words of ``nvidia-smi topo -p2p``, whose rows begin like ours and have no CPUs."""

_WORD = r"(?:X|NV\d{1,2}|SYS|SOC|NODE|PHB|PXB|PIX)"
_GLUED_HEADER = re.compile(r"(?<=\S)(?=CPU Aff|NUMA Aff|GPU NUMA|GPU\d|NIC\d|mlx\d)", re.ASCII)
_GLUED_LABEL = re.compile(r"^(GPU\d{1,3})(?=[XNSPC])", re.ASCII)
_GLUED_LINKS = re.compile(rf"({_WORD})(?={_WORD})|(X|SYS|SOC|NODE|PHB|PXB|PIX)(?=\d)", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The row of one GPU: its cells of affinity, each empty when it is missing or N/A."""

    links: Mapping[str, str] = field(default_factory=dict)  # by device; none in a cut row
    cpu: str = ""
    numa: str = ""
    gpu_numa: str = ""

    @property
    def affinity(self) -> tuple[str, str, str]:
        """The three cells of affinity."""
        return self.cpu, self.numa, self.gpu_numa


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The tables of a text: the GPUs that a header or a row names, and the rows by GPU."""

    gpus: frozenset[int]
    rows: Mapping[int, Row]


def read_table(paste: Paste) -> Table:
    """The tables of ``nvidia-smi topo -m``.

    Of two rows that differ the first one counts; a table that differs from one before it is
    another machine's and not used at all.

    Raises:
        TopologyError: there are more rows than any machine has.
    """
    rows: dict[int, Row] = {}
    gpus: set[int] = set()
    for found in _tables(paste):
        own = list(_rows(paste, found))
        if clash := {gpu for gpu, row in own if _exclude(rows.get(gpu, row), row)}:
            paste.note(
                "contradiction",
                f"GPU {format_cpulist(clash)} has two rows that differ, so two machines' tables "
                "are taken to be in the text; the first one is used",
            )
            continue
        for gpu, row in own:
            _keep_row(paste, rows, gpu, row)
        gpus.update(found.gpus)
    return Table(gpus=frozenset(gpus), rows=rows)


def _exclude(one: Row, other: Row) -> bool:
    """Whether two rows contradict each other, and not just one of them has less."""
    both = zip(one.affinity, other.affinity, strict=True)
    return any(here and there and here != there for here, there in both)


def _keep_row(paste: Paste, rows: dict[int, Row], gpu: int, row: Row) -> None:
    """Keep a row, or what it adds to the one that there is."""
    known = rows.setdefault(gpu, row)
    if any(known.affinity) and any(row.affinity) and known.affinity != row.affinity:
        problem = f"GPU {format_cpulist([gpu])} has two rows that differ"
        paste.note("contradiction", f"{problem}; the first one is used")
    elif not any(known.affinity) and any(row.affinity):
        rows[gpu] = row
    elif not known.links and row.links:
        rows[gpu] = replace(known, links=row.links)


# From lines to tables of cells.


@dataclass
class _RawRow:
    """A row as found: its cells, how many are not empty, and the line where it ends."""

    gpu: int
    cells: list[str]
    filled: int
    has_tabs: bool
    last_line: int


@dataclass
class _RawTable:
    """A table as found: the devices that its header names, which affinities follow, the rows."""

    devices: Sequence[str] = ()
    affinity: Sequence[str] = ()
    header_lines: list[str] = field(default_factory=list)
    rows: list[_RawRow] = field(default_factory=list)

    @property
    def gpus(self) -> Iterator[int]:
        """The GPUs that it names; none in a list of names that nothing shows to be a table."""
        if self.rows or self.affinity:
            yield from (int(match[1]) for match in map(_GPU.fullmatch, self.devices) if match)
        yield from (row.gpu for row in self.rows)


def _tables(paste: Paste) -> list[_RawTable]:
    tables: list[_RawTable] = []
    is_inside = False  # whether the line before belongs to a table
    taken = 0
    for number, line in enumerate(paste.lines):
        is_inside = (
            _add_header(tables, line, is_inside=is_inside)
            or _add_row(tables, number, line, is_inside=is_inside)
            or (is_inside and _add_rest(tables[-1], number, line))
        )
        taken += is_inside
        if taken > _MAX_TABLE_LINES:
            raise paste.error(
                f"more than {_MAX_TABLE_LINES} lines of `nvidia-smi topo -m`: not one machine's"
            )
    return tables


def _add_header(tables: list[_RawTable], line: str, *, is_inside: bool) -> bool:
    """Add a header, or a line onto which one was wrapped."""
    if found := _header(line):
        tables.append(_RawTable(*found, [line]))
        return True
    if not is_inside or tables[-1].rows:
        return False
    lines = [*tables[-1].header_lines, line]
    found = _header(" ".join(lines)) if len(lines) <= _MAX_HEADER_LINES else None
    if found:
        tables[-1] = _RawTable(*found, lines)
    return found is not None


def _header(line: str) -> tuple[Sequence[str], Sequence[str]] | None:
    """The devices and the affinities that a line names, or None when it is no header.

    The last name may be cut. A header names two devices or an affinity, so that a heading
    ``GPU0`` is none.
    """
    words = _GLUED_HEADER.sub(" ", line).split() if line.startswith("GPU") else []
    if not words or not _GPU.fullmatch(words[0]) or len(words) > _MAX_COLUMNS:
        return None
    names: dict[str, None] = {}
    while words:
        taken, name = _column(words)
        is_late = name not in _COLUMNS and not names.keys().isdisjoint(_COLUMNS)
        if not taken or name in names or is_late:
            return None
        names[name] = None
        words = words[taken:]
    affinity = [name for name in names if name in _COLUMNS]
    return ([*names][: len(names) - len(affinity)], affinity) if len(names) > 1 else None


def _column(words: list[str]) -> tuple[int, str]:
    """How many words the next column's name takes, 0 if they are none; and the name."""
    for name in _COLUMNS:
        phrase = name.split()
        count = len(words[: len(phrase)])
        is_cut = len(words) == count > 1 and name.startswith(" ".join(words))
        if words[:count] == phrase[:count] or is_cut:
            return count, name
    is_last = len(words) == 1 and words[0].startswith(("mlx", "NIC"))
    is_device = _NIC.fullmatch(words[0]) and not _LINK.fullmatch(words[0])
    return (1, words[0]) if is_device or is_last else (0, "")


def _add_row(tables: list[_RawTable], number: int, line: str, *, is_inside: bool) -> bool:
    """Add a row: a link comes first; or, within a table, it was cut short."""
    label, *cells = _cells(line) if line.startswith("GPU") else [""]
    gpu = _GPU.fullmatch(label)
    words = list(filter(None, cells))
    if not gpu or not _PEER.isdisjoint(words):
        return False
    is_row = words and _LINK.fullmatch(words[0])
    if not is_row and not (is_inside and tables[-1].affinity):
        return False
    if not tables:
        tables.append(_RawTable())
    tables[-1].rows.append(_RawRow(int(gpu[1]), cells, len(words), "\t" in line, number))
    return True


def _add_rest(table: _RawTable, number: int, line: str) -> bool:
    """Add the rest of a row that did not fit the window."""
    if not table.rows:
        return False
    row, words = table.rows[-1], _cells(line)
    if row.filled > len(table.devices) or not all(map(_is_cell, words)):
        return False
    row.cells += words
    row.filled += len(words)
    row.last_line = number
    return True


def _cells(line: str) -> list[str]:
    """A row's cells: separated by tabs, where an empty one counts, and by blanks."""
    line = _GLUED_LABEL.sub(r"\1 ", line).replace(", ", ",")
    line = _GLUED_LINKS.sub(r"\1\2 ", line, count=_MAX_COLUMNS)
    return [word for cell in line.split("\t") for word in (cell.split() or [""])]


def _is_cell(word: str) -> bool:
    return bool(word == "N/A" or _LINK.fullmatch(word) or _IDS.fullmatch(word))


def _filled(cells: Sequence[str]) -> int:
    return sum(map(bool, cells))


# From cells to rows.


def _rows(paste: Paste, table: _RawTable) -> Iterator[tuple[int, Row]]:
    count = len(table.devices)
    if table.rows and not count:
        paste.note(
            "header-missing",
            "the table has no header: its cells are taken for CPU Affinity, NUMA Affinity and "
            "GPU NUMA ID in this order",
        )
    parts = [_parts(paste, row, count) for row in table.rows]
    longest = max((_filled(tail) for _, tail in parts), default=0)
    # Where the header was cut before them, the columns are those of today.
    columns = table.affinity if _CPU in table.affinity else _COLUMNS
    for row, (links, tail) in zip(table.rows, parts, strict=True):
        is_last = row.last_line == paste.cut_line
        expected = max(longest, len(table.affinity) if is_last else 0)
        # A row that ends with N/A is whole: its empty cells left no trace.
        if _filled(tail) < expected and tail[-1:] != ["N/A"]:
            tail = _without_last(paste, row.gpu, tail)
        is_whole = len(links) == count
        cpu, numa, gpu_numa = _affinity(tail, columns, by_position=row.has_tabs and is_whole)
        named = dict(zip(table.devices, links, strict=True)) if is_whole else {}
        yield row.gpu, Row(links=named, cpu=cpu, numa=numa, gpu_numa=gpu_numa)


def _parts(paste: Paste, row: _RawRow, count: int) -> tuple[list[str], list[str]]:
    """A row's links, of which there should be ``count``, and the cells behind them."""
    links: list[str] = []
    position = 0
    for cell in row.cells:
        if _LINK.fullmatch(cell):
            links.append(cell)
        elif cell or not count or len(links) == count:
            break
        position += 1
    tail = [part for cell in row.cells[position:] for part in _unglued(paste, cell)]
    return links, tail


def _unglued(paste: Paste, cell: str) -> list[str]:
    """The cells that ran into each other: ``0-31`` ``0`` ``N/A`` pasted as ``0-310N/A``.

    With a list before it, the node is taken to be the last digit alone.
    """
    body = cell.removesuffix("N/A")
    if body == cell or not body[-1:].isdigit():
        return [cell]
    if body.isdigit() or not body[-2:].isdigit():
        return [body, "N/A"]
    paste.note(
        "cell-glued",
        f"the cells {cell[:40]!r} ran into each other; read as CPUs {body[:-1][:40]} and NUMA node "
        f"{body[-1]}",
    )
    return [body[:-1], body[-1], "N/A"]


def _without_last(paste: Paste, gpu: int, tail: Sequence[str]) -> list[str]:
    """The cells but for the last one that is not empty: it may be half of itself."""
    paste.note(
        "row-cut",
        f"the row of GPU {gpu} is shorter than it should be; its last cell is not used: paste "
        "the whole output of `nvidia-smi topo -m`",
    )
    filled = [position for position, cell in enumerate(tail) if cell]
    return list(tail[: filled[-1]]) if filled else []


def _affinity(
    tail: Sequence[str], columns: Sequence[str], *, by_position: bool
) -> tuple[str, str, str]:
    words = [cell for cell in tail if cell]
    # A lone number may be a node as well as a CPU.
    is_cpus = words and (words[0] == "N/A" or "-" in words[0] or "," in words[0])
    if by_position:
        cpu, rest = "".join(tail[:1]), list(tail[1:])
    elif words and (is_cpus or len(words) >= len(columns)):
        cpu, rest = words[0], words[1:]
    else:
        cpu, rest = "", words
    numa, gpu_numa = _nodes(rest, columns)
    return _known(cpu), _known(numa), _known(gpu_numa)


def _nodes(rest: Sequence[str], columns: Sequence[str]) -> tuple[str, str]:
    """NUMA Affinity and GPU NUMA ID, from the cells behind CPU Affinity."""
    words = [cell for cell in rest if cell]
    if len(words) > 1 or _GPU_NUMA not in columns:
        numa, gpu_numa = (*words, "", "")[:2]
        return numa, gpu_numa
    if not words or rest[1:2] == words:
        return "", ""  # the second cell may be a shifted NUMA Affinity or a GPU NUMA ID in place
    return (words[0], "") if rest[0] else ("", words[0])


def _known(cell: str) -> str:
    return "" if cell == "N/A" else cell


# ``nvidia-smi -L``: names, UUIDs and MIG instances. The list of GPUs in PyTorch's and vLLM's
# environment reports has the same lines without UUIDs.

_LISTED = re.compile(r"GPU\s{1,4}(\d{1,3}):\s*(.*)", re.ASCII)
_MAKER = re.compile(r"(?:NVIDIA|Tesla|GeForce|Quadro|TITAN|GRID)\b", re.ASCII)
_MIG = re.compile(r"MIG\s.{0,60}?\(UUID:\s?(MIG-[^)\s]{1,80})\)", re.ASCII)
_HEX = r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}"
_UUID = re.compile(f"GPU-{_HEX}", re.ASCII)
_MIG_UUID = re.compile(rf"MIG-(?:{_HEX}|GPU-{_HEX}/(\d{{1,3}})/(\d{{1,3}}))", re.ASCII)

_UNKNOWN_INSTANCE = -1
"""The instance ids of a MIG device whose UUID (since driver 470) does not contain them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One GPU of the list; None is what is cut, hidden or not listed."""

    name: str | None
    uuid: str | None
    mig: tuple[MigInstance, ...] | None = None


def read_list(paste: Paste) -> Mapping[int, Listed]:
    """The GPUs of the list, by index; of two lines that differ the first one counts."""
    found: dict[int, Listed] = {}
    instances: dict[int, list[MigInstance]] = {}
    uuids: set[str] = set()
    current = -1
    for line in paste.lines:
        if gpu := _listed(line):
            current = gpu[0]
            _keep_listed(paste, found, *gpu)
        elif current >= 0 and (mig := _mig(line)) and mig.uuid not in uuids:
            uuids.add(mig.uuid)
            instances.setdefault(current, []).append(mig)
    owners: dict[str, int] = {}
    for index, listed in found.items():
        uuid = listed.uuid
        if uuid and owners.setdefault(uuid.lower(), index) != index:
            paste.note("contradiction", f"two GPUs have the UUID of GPU {index}; it is left out")
            uuid = None
        mig_instances = tuple(instances.get(index, ())) or None
        found[index] = replace(listed, uuid=uuid, mig=mig_instances)
    return found


def _listed(line: str) -> tuple[int, Listed] | None:
    match = _LISTED.match(line)
    name, has_uuid, uuid = (match[2] if match else "").partition("(UUID:")
    if match is None or (not has_uuid and not _MAKER.match(name)):
        return None
    uuid = uuid.strip(" \t)")
    known = uuid if _UUID.fullmatch(uuid) else None
    return int(match[1]), Listed(name=name.strip()[:100] or None, uuid=known)


def _keep_listed(paste: Paste, found: dict[int, Listed], index: int, listed: Listed) -> None:
    known = found.setdefault(index, listed)
    if known.uuid is None and known.name == listed.name:
        found[index] = listed
    elif listed.uuid not in (None, known.uuid) or listed.name != known.name:
        paste.note(
            "contradiction", f"GPU {index} is listed twice and differently; the first is used"
        )


def _mig(line: str) -> MigInstance | None:
    match = _MIG.match(line)
    ids = _MIG_UUID.fullmatch(match[1]) if match else None
    if ids is None:
        return None
    numbers = [_UNKNOWN_INSTANCE if number is None else int(number) for number in ids.groups()]
    return MigInstance(uuid=ids[0], gpu_instance=numbers[0], compute_instance=numbers[1])
