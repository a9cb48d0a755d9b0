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
from typing import NamedTuple, TypeAlias

from gpuaff.cpuset import format_cpulist
from gpuaff.topology.model import Gpu, MigInstance
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
_CELL = re.compile(
    rf"N/A|{_LINK.pattern}|\d{{1,9}}(?:-\d{{1,9}})?(?:,\d{{1,9}}(?:-\d{{1,9}})?)*", re.ASCII
)
_PEER = frozenset({"OK", "CNS", "GNS", "TNS", "NS", "DR", "CS", "U"})
"""The words of ``nvidia-smi topo -p2p``, whose rows begin like ours and have no CPUs."""

_WORD = r"(?:X|NV\d{1,2}|SYS|SOC|NODE|PHB|PXB|PIX)"
_GLUED_HEADER = re.compile(r"(?<=\S)(?=CPU Aff|NUMA Aff|GPU NUMA|GPU\d|NIC\d|mlx\d)", re.ASCII)
_GLUED_LABEL = re.compile(r"^(GPU\d{1,3})(?=[XNSPC])", re.ASCII)
_GLUED_LINKS = re.compile(rf"({_WORD})(?={_WORD})|(X|SYS|SOC|NODE|PHB|PXB|PIX)(?=\d)", re.ASCII)


class Row(NamedTuple):
    """The row of one GPU.

    Attributes:
        links: how it is connected with each device; none in a cut row.
        affinity: the cells of CPU Affinity, NUMA Affinity and GPU NUMA ID; each empty when it is
            missing or N/A.
    """

    links: Mapping[str, str]
    affinity: tuple[str, str, str] = ("", "", "")


Rows: TypeAlias = Mapping[int, Row]
"""The rows by GPU."""


def read_table(paste: Paste) -> tuple[set[int], Rows]:
    """The tables of ``nvidia-smi topo -m``: the GPUs that they name, and the rows by GPU.

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
            known = rows.setdefault(gpu, row)
            has_affinity = any(known.affinity)
            if has_affinity and any(row.affinity) and known.affinity != row.affinity:
                problem = f"GPU {format_cpulist([gpu])} has two rows that differ"
                paste.note("contradiction", f"{problem}; the first one is used")
            else:  # one of them may have less
                better = row if any(row.affinity) and not has_affinity else known
                rows[gpu] = better if better.links else better._replace(links=row.links)
        gpus.update(found.gpus())
    return gpus, rows


def _exclude(one: Row, other: Row) -> bool:
    """Whether two rows contradict each other, and not just one of them has less."""
    return any(a and b and a != b for a, b in zip(one.affinity, other.affinity, strict=True))


# From lines to tables of cells.


@dataclass(slots=True)
class _RawRow:
    """A row as found, with the line where it ends."""

    gpu: int
    cells: list[str]
    has_tabs: bool
    last_line: int


@dataclass(slots=True)
class _RawTable:
    """A table as found: the devices that its header names, which affinities follow, the rows."""

    devices: Sequence[str] = ()
    affinity: Sequence[str] = ()
    header_lines: Sequence[str] = ()
    rows: list[_RawRow] = field(default_factory=list)

    def gpus(self) -> set[int]:
        """The GPUs that it names; none in a list of names that nothing shows to be a table."""
        named = self.devices if self.rows or self.affinity else ()
        matches = filter(None, map(_GPU.fullmatch, named))
        return {int(match[1]) for match in matches} | {row.gpu for row in self.rows}


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
    if not is_inside or tables[-1].rows or len(tables[-1].header_lines) >= _MAX_HEADER_LINES:
        return False
    lines = [*tables[-1].header_lines, line]
    if found := _header(" ".join(lines)):
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
    tables[-1].rows.append(_RawRow(int(gpu[1]), cells, "\t" in line, number))
    return True


def _add_rest(table: _RawTable, number: int, line: str) -> bool:
    """Add the rest of a row that did not fit the window."""
    words, row = _cells(line), table.rows[-1] if table.rows else None
    if not row or _filled(row.cells) > len(table.devices) or not all(map(_CELL.fullmatch, words)):
        return False
    row.cells += words
    row.last_line = number
    return True


def _cells(line: str) -> list[str]:
    """A row's cells: separated by tabs, where an empty one counts, and by blanks."""
    line = _GLUED_LABEL.sub(r"\1 ", line).replace(", ", ",")
    line = _GLUED_LINKS.sub(r"\1\2 ", line, count=_MAX_COLUMNS)
    return [word for cell in line.split("\t", _MAX_COLUMNS) for word in (cell.split() or [""])]


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
        affinity = _affinity(tail, columns, by_position=row.has_tabs and is_whole)
        named = dict(zip(table.devices, links, strict=True)) if is_whole else {}
        yield row.gpu, Row(named, affinity)


def _filled(cells: Sequence[str]) -> int:
    return sum(map(bool, cells))


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
    cpu, numa, gpu_numa = ("" if cell == "N/A" else cell for cell in (cpu, numa, gpu_numa))
    return cpu, numa, gpu_numa


def _nodes(rest: Sequence[str], columns: Sequence[str]) -> tuple[str, str]:
    """NUMA Affinity and GPU NUMA ID, from the cells behind CPU Affinity."""
    words = [cell for cell in rest if cell]
    if len(words) > 1 or _GPU_NUMA not in columns:
        numa, gpu_numa = (*words, "", "")[:2]
        return numa, gpu_numa
    if not words or rest[1:2] == words:
        return "", ""  # the second cell may be a shifted NUMA Affinity or a GPU NUMA ID in place
    return (words[0], "") if rest[0] else ("", words[0])


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


def read_list(paste: Paste) -> Mapping[int, Gpu]:
    """The GPUs of the list: name, UUID and MIG instances, None for what is cut or not listed.

    Of two lines that differ the first one counts.
    """
    found: dict[int, Gpu] = {}
    instances: dict[int, list[MigInstance]] = {}
    owners: dict[str, int] = {}
    current = -1
    for line in paste.lines:
        if gpu := _listed(line):
            current = gpu.index
            _keep_listed(paste, found, gpu)
        elif current >= 0 and (mig := _mig(line)) and mig.uuid not in owners:
            owners[mig.uuid] = current
            instances.setdefault(current, []).append(mig)
    for index, gpu in found.items():
        uuid = gpu.uuid
        if uuid and owners.setdefault(uuid.lower(), index) != index:
            paste.note("contradiction", f"two GPUs have the UUID of GPU {index}; it is left out")
            uuid = None
        mig_instances = tuple(instances.get(index, ())) or None
        found[index] = replace(gpu, uuid=uuid, mig=mig_instances)
    return found


def _listed(line: str) -> Gpu | None:
    match = _LISTED.match(line)
    name, has_uuid, uuid = (match[2] if match else "").partition("(UUID:")
    if match is None or (not has_uuid and not _MAKER.match(name)):
        return None
    uuid = uuid.strip(" \t)")
    known = uuid if _UUID.fullmatch(uuid) else None
    return Gpu(index=int(match[1]), name=name.strip()[:100] or None, uuid=known)


def _keep_listed(paste: Paste, found: dict[int, Gpu], gpu: Gpu) -> None:
    known = found.setdefault(gpu.index, gpu)
    if known.uuid is None and known.name == gpu.name:
        found[gpu.index] = gpu
    elif gpu.uuid not in (None, known.uuid) or gpu.name != known.name:
        problem = f"GPU {gpu.index} is listed twice and differently"
        paste.note("contradiction", f"{problem}; the first is used")


def _mig(line: str) -> MigInstance | None:
    match = _MIG.match(line)
    ids = _MIG_UUID.fullmatch(match[1]) if match else None
    if ids is None:
        return None
    numbers = [_UNKNOWN_INSTANCE if number is None else int(number) for number in ids.groups()]
    return MigInstance(uuid=ids[0], gpu_instance=numbers[0], compute_instance=numbers[1])
