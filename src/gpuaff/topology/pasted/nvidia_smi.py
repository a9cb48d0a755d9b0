"""The table of ``nvidia-smi topo -m``.

A row is read from its left: the words for links, as many as the header names devices, then the
cells of affinity. nvidia-smi prints "GPU NUMA ID", and every N/A, one tab too far to the right,
and lists "NUMA Affinity" as nodes and ranges of nodes (case A24). Where tabs became blanks an
empty cell leaves no trace: what could then stand in two columns is not used.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpuaff.cpuset import format_cpulist
from gpuaff.topology.model import MigInstance
from gpuaff.topology.pasted.text import Reading

# The words of a line of ``nvidia-smi topo -m``, whatever stands between them.


CPU, NUMA, GPU_NUMA = "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"
_PHRASES = {CPU: ("CPU", "Affinity"), NUMA: ("NUMA", "Affinity"), GPU_NUMA: ("GPU", "NUMA", "ID")}
_MAX_COLUMNS = 600

GPU = re.compile(r"GPU(\d{1,3}):?", re.ASCII)
LINK = re.compile(r"X|NV\d{1,3}|SYS|SOC|NODE|PHB|PXB|PIX|PSB|C2C", re.ASCII)
"""How two devices are connected. ROCm's tables have the same shape and other words."""
_NIC = re.compile(r"[A-Za-z][A-Za-z0-9_.:-]{0,39}\d", re.ASCII)
_PEER = frozenset({"OK", "CNS", "GNS", "TNS", "NS", "DR", "CS", "U"})
"""The words of ``nvidia-smi topo -p2p``, whose rows begin like ours and tell nothing of CPUs."""

_WORD = r"(?:X|NV\d{1,2}|SYS|SOC|NODE|PHB|PXB|PIX)"
_GLUED_HEADER = re.compile(r"(?<=\S)(?=CPU Aff|NUMA Aff|GPU NUMA|GPU\d|NIC\d|mlx\d)", re.ASCII)
_GLUED_LABEL = re.compile(r"^(GPU\d{1,3})(?=[XNSPC])", re.ASCII)
_GLUED_LINKS = re.compile(rf"({_WORD})(?={_WORD})|(X|SYS|SOC|NODE|PHB|PXB|PIX)(?=\d)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Header:
    """The columns of a table.

    Attributes:
        matrix: the devices: ``GPU0`` …, then NICs by whatever names.
        affinity: which of :data:`CPU`, :data:`NUMA` and :data:`GPU_NUMA` follow.
    """

    matrix: tuple[str, ...] = ()
    affinity: tuple[str, ...] = ()


def header(line: str) -> Header | None:
    """The columns that a line names, or None when it is no header.

    The last name may be cut. A header names two devices or tells of affinity, so that a heading
    ``GPU0`` is none.
    """
    words = _GLUED_HEADER.sub(" ", line).split() if line.startswith("GPU") else []
    if not words or not GPU.fullmatch(words[0]) or len(words) > _MAX_COLUMNS:
        return None
    names: dict[str, None] = {}
    while words:
        taken, name = _column(words)
        if not taken or name in names or (names.keys() & _PHRASES.keys() and name not in _PHRASES):
            return None
        names[name] = None
        words = words[taken:]
    affinity = tuple(name for name in names if name in _PHRASES)
    matrix = tuple(name for name in names if name not in _PHRASES)
    return Header(matrix, affinity) if len(names) > 1 else None


def _column(words: list[str]) -> tuple[int, str]:
    """How many words the next column's name takes, 0 if they are none; and the name."""
    for name, phrase in _PHRASES.items():
        count = len(words[: len(phrase)])
        if tuple(words[:count]) == phrase[:count] or (len(words) == count and _cut(phrase, words)):
            return count, name
    if _NIC.fullmatch(words[0]) and not LINK.fullmatch(words[0]):
        return 1, words[0]
    return (1, words[0]) if len(words) == 1 and words[0].startswith(("mlx", "NIC")) else (0, "")


def _cut(phrase: tuple[str, ...], words: list[str]) -> bool:
    """Whether these words are the beginning of a phrase that was cut within a word."""
    return len(words) > 1 and " ".join(phrase).startswith(" ".join(words))


def is_peer_table(cells: list[str]) -> bool:
    """Whether a row's cells are those of a table of peer access."""
    return not _PEER.isdisjoint(cells)


def cells(line: str) -> list[str]:
    """A row's cells: parted by tabs, where an empty one counts, and by blanks."""
    line = _GLUED_LABEL.sub(r"\1 ", line).replace(", ", ",")
    line = _GLUED_LINKS.sub(r"\1\2 ", line, count=_MAX_COLUMNS)
    return [word for cell in line.split("\t") for word in (cell.split() or [""])]


def unglue(reading: Reading, words: list[str]) -> list[str]:
    """Part cells that ran into each other: ``0-31`` ``0`` ``N/A`` pasted as ``0-310N/A``.

    With a list before it, the node is taken to be the last digit alone.
    """
    parted: list[str] = []
    for word in words:
        body = word.removesuffix("N/A")
        if not body or body == word or not body[-1].isdigit():
            parted.append(word)
        elif body[-2:].isdigit() and not body.isdigit():
            reading.note(
                "cell-glued",
                f"the cells {word[:40]!r} ran into each other; read as CPUs {body[:-1][:40]} and "
                f"NUMA node {body[-1]}",
            )
            parted += [body[:-1], body[-1], "N/A"]
        else:
            parted += [body, "N/A"]
    return parted


_ALL_COLUMNS = (CPU, NUMA, GPU_NUMA)
_IDS = re.compile(r"\d{1,9}(?:-\d{1,9})?(?:,\d{1,9}(?:-\d{1,9})?)*", re.ASCII)
_MAX_HEADER_LINES = 20
_MAX_TABLE_LINES = 10_000
"""The lines of all tables together; a machine's has a few hundred."""


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """What was found.

    Attributes:
        gpus: the indices of all GPUs that a header or a row names, ascending.
        rows: the rows, by GPU.
    """

    gpus: tuple[int, ...] = ()
    rows: Mapping[int, Row] = field(default_factory=dict)


def read_table(reading: Reading) -> Table:
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
            _keep_row(reading, rows, gpu, row)
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


def _keep_row(reading: Reading, rows: dict[int, Row], gpu: int, row: Row) -> None:
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


# What ``nvidia-smi -L`` says: names, UUIDs and MIG instances.
#
# The list of GPUs in PyTorch's and vLLM's environment reports has the same lines without UUIDs.


_GPU = re.compile(r"GPU\s{1,4}(\d{1,3}):\s*(.*)", re.ASCII)
_MAKER = re.compile(r"(?:NVIDIA|Tesla|GeForce|Quadro|TITAN|GRID)\b", re.ASCII)
_MIG = re.compile(r"MIG\s.{0,60}?\(UUID:\s?(MIG-[^)\s]{1,80})\)", re.ASCII)
_HEX = r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}"
_UUID = re.compile(f"GPU-{_HEX}", re.ASCII)
_MIG_UUID = re.compile(f"MIG-{_HEX}", re.ASCII)
_MIG_IDS = re.compile(rf"MIG-GPU-{_HEX}/(\d{{1,3}})/(\d{{1,3}})", re.ASCII)

UNKNOWN_INSTANCE = -1
"""The instance ids of a MIG device whose UUID (since driver 470) does not spell them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One GPU of the list.

    Attributes:
        name: the product name; None when the line was cut before it.
        uuid: the UUID; None when it is cut, hidden or made unreadable.
        mig: its MIG instances; None when none are listed.
    """

    name: str | None
    uuid: str | None
    mig: tuple[MigInstance, ...] | None = None


def read_list(reading: Reading) -> Mapping[int, Listed]:
    """The GPUs of the list, by index; of two lines that differ the first one counts."""
    found: dict[int, Listed] = {}
    instances: dict[str, tuple[int, MigInstance]] = {}
    current = -1
    for line in reading.lines:
        if (gpu := _gpu(line)) is not None:
            current, listed = gpu
            _keep_gpu(reading, found, current, listed)
        elif current >= 0 and (mig := _mig(line)) is not None:
            instances.setdefault(mig.uuid, (current, mig))
    return _joined(reading, found, instances.values())


def _joined(
    reading: Reading,
    found: Mapping[int, Listed],
    instances: Collection[tuple[int, MigInstance]],
) -> Mapping[int, Listed]:
    """The GPUs with their instances, and no UUID at two of them."""
    owners: dict[str, int] = {}
    parts: dict[int, list[MigInstance]] = {}
    joined: dict[int, Listed] = {}
    for owner, instance in instances:
        parts.setdefault(owner, []).append(instance)
    for index, gpu in found.items():
        mig = tuple(parts.get(index, ())) or None
        uuid = gpu.uuid
        if uuid and owners.setdefault(uuid.lower(), index) != index:
            reading.note("contradiction", f"two GPUs have the UUID of GPU {index}; it is left out")
            uuid = None
        joined[index] = Listed(name=gpu.name, uuid=uuid, mig=mig)
    return joined


def _gpu(line: str) -> tuple[int, Listed] | None:
    match = _GPU.match(line)
    if match is None:
        return None
    name, has_uuid, uuid = match[2].partition("(UUID:")
    if not has_uuid and not _MAKER.match(name):
        return None
    uuid = uuid.strip(" \t)")
    return int(match[1]), Listed(
        name=name.strip()[:100] or None, uuid=uuid if _UUID.fullmatch(uuid) else None
    )


def _keep_gpu(reading: Reading, found: dict[int, Listed], index: int, listed: Listed) -> None:
    known = found.setdefault(index, listed)
    if known.uuid is None and known.name == listed.name:
        found[index] = listed
    elif listed.uuid not in (None, known.uuid) or listed.name != known.name:
        reading.note(
            "contradiction", f"GPU {index} is listed twice and differently; the first is used"
        )


def _mig(line: str) -> MigInstance | None:
    match = _MIG.match(line)
    if match is None:
        return None
    if ids := _MIG_IDS.fullmatch(match[1]):
        return MigInstance(uuid=match[1], gpu_instance=int(ids[1]), compute_instance=int(ids[2]))
    if not _MIG_UUID.fullmatch(match[1]):
        return None
    return MigInstance(
        uuid=match[1], gpu_instance=UNKNOWN_INSTANCE, compute_instance=UNKNOWN_INSTANCE
    )
