"""The words of a line of ``nvidia-smi topo -m``, whatever stands between them."""

from __future__ import annotations

import re

from gpuaff.records import dataclass
from gpuaff.topology.pasted.reading import Reading

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


@dataclass(frozen=True)
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
