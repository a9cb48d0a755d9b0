"""Text for messages and for the terminal: numbers, processes, styled lines and tables.

A style is ``head``, ``dim``, ``gpu``, ``cpus``, ``bad`` or ``rank:N``; without styles the text is
the same.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple, TypeAlias

from gpuaff.cpuset import CpuSet, format_cpulist

_LISTED = 3
"""The most items that an enumeration names; the others are counted."""

_COMMAND, _USER = 40, 20
"""The most characters shown of a command and of a user's name."""

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))

GAP = 2  # blanks between two columns


def printable(text: str) -> str:
    """Text with escapes for line breaks and for whatever else a terminal would interpret."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def one_line(text: str, longest: int, *, end: str = "…") -> str:
    """Text as one printable line of at most ``longest`` characters."""
    shown = printable(text[: longest + 1])
    return shown if len(shown) <= longest else f"{shown[: longest - len(end)]}{end}"


def counted(number: int, noun: str) -> str:
    """``1 core``, ``2 cores``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def enumeration(items: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b, c and 4 more``."""
    shown = list(items[:_LISTED])
    if len(items) > _LISTED:
        shown.append(f"{len(items) - _LISTED} more")
    return " and ".join(filter(None, (", ".join(shown[:-1]), *shown[-1:])))


def size(number: int) -> str:
    """Bytes: ``1.5 GiB``, ``80 GiB``, ``512 MiB``, ``3 bytes``."""
    if number >= 1 << 30:
        return f"{number / (1 << 30):.1f}".removesuffix(".0") + " GiB"
    return f"{number >> 20} MiB" if number >= 1 << 20 else f"{number} bytes"


def duration(seconds: float) -> str:
    """A time by its two largest units: ``3 h 10 min``, ``5 s``."""
    left = max(0, int(seconds))
    first = next((i for i, (length, _) in enumerate(_UNITS) if left >= length), len(_UNITS) - 1)
    shown: list[str] = []
    for length, unit in _UNITS[first : first + 2]:
        count, left = divmod(left, length)
        if count or not shown:
            shown.append(f"{count} {unit}")
    return " ".join(shown)


def process_in_words(
    command: str | None, pid: int | None, *, user: str | None = None, since: float | None = None
) -> str:
    """A process: ``python train.py (pid 42) of alice, for 3 h 10 min``.

    ``since`` is in seconds since 1970; what is None is unknown, and left out.
    """
    number = "" if pid is None else f" (pid {pid})"
    owner = f" of {one_line(' '.join(user.split()), _USER)}" if user else ""
    age = "" if since is None else f", for {duration(time.time() - since)}"
    words = " ".join((command or "an unknown program").split())
    return f"{one_line(words, _COMMAND)}{number}{owner}{age}"


class Span(NamedTuple):
    """A piece of text that is never broken."""

    text: str
    style: str = ""


Line: TypeAlias = tuple[Span, ...]
"""One line, or one cell of a table, which may be broken between its spans."""


def line(*parts: Line | Span | str) -> Line:
    """A line of these parts, without the empty ones."""
    lines = (
        (Span(part),) if isinstance(part, str) else (part,) if isinstance(part, Span) else part
        for part in parts
    )
    return tuple(span for spans in lines for span in spans if span.text)


def listed(items: Iterable[str], separator: str, style: str = "") -> Line:
    """Items that may be broken after their separators."""
    *others, last = [item for item in items if item] or [""]
    return line(*(Span(item + separator, style) for item in others), Span(last, style))


def cpulist(cpus: CpuSet, style: str = "cpus") -> Line:
    """A cpulist that may be broken after its commas."""
    return listed(format_cpulist(cpus).split(","), ",", style)


Row: TypeAlias = "Sequence[Line | Span | str]"


class Table(NamedTuple):
    """Rows of cells, each with as many; ``right``: the columns that are aligned to the right."""

    rows: Sequence[Row]
    right: Collection[int] = ()


def titled(titles: str, rows: Iterable[Row], right: Collection[int]) -> Table:
    """A table whose columns have titles, each a word."""
    return Table([[Span(title, "head") for title in titles.split()], *rows], right)


def laid_out(block: Line | Table, width: int | None = None) -> Iterator[Line]:
    """The lines of a block, printable; a too wide table breaks cells between their spans only."""
    if not isinstance(block, Table):
        yield _printable(block)
        return
    cells = [
        [_printable(line(cell)) for cell in column] for column in zip(*block.rows, strict=True)
    ]
    kept = [(place in block.right, column) for place, column in enumerate(cells) if any(column)]
    widths = [max(map(_length, column)) for _, column in kept]
    excess = 0 if width is None else sum(widths) + GAP * (len(widths) - 1) - width
    least = [max(len(s.text.rstrip()) for cell in column for s in cell) for _, column in kept]
    for place in sorted(range(len(widths)), key=lambda place: least[place] - widths[place]):
        cut = max(0, min(excess, widths[place] - least[place]))
        widths[place] -= cut
        excess -= cut
    for row in zip(*(column for _, column in kept), strict=True):
        broken = [_broken(cell, most) for cell, most in zip(row, widths, strict=True)]
        for pieces in zip_longest(*broken, fillvalue=()):
            shown: list[Span] = []
            for piece, (right, _), most in zip(pieces, kept, widths, strict=True):
                blanks = Span(" " * (most - _length(piece)))
                shown += [*((blanks, *piece) if right else (*piece, blanks)), Span(" " * GAP)]
            yield tuple(shown)


def _printable(spans: Line) -> Line:
    return tuple(Span(printable(span.text), span.style) for span in spans)


def _length(spans: Line) -> int:
    return sum(len(span.text) for span in spans)


def _broken(cell: Line, width: int) -> list[Line]:
    lines: list[list[Span]] = []
    length = 0
    for span in cell:
        if not lines or length + len(span.text.rstrip()) > width:
            lines.append([])
            length = 0
        lines[-1].append(span)
        length += len(span.text)
    return [(*spans, last._replace(text=last.text.rstrip())) for *spans, last in lines]


def plain(block: Line | Table) -> str:
    """A block as printable text, without styles and without blanks at the lines' ends."""
    lines = ("".join(span.text for span in spans).rstrip() for spans in laid_out(block))
    return "\n".join(lines)
