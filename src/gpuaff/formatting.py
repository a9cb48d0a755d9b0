"""Text for messages and for the terminal: numbers, processes, and tables of styled lines.

A style is ``head``, ``dim``, ``gpu``, ``cpus``, ``bad`` or ``rank:N``; without styles the text is
the same.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from gpuaff.cpuset import CpuSet, format_cpulist

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

_LISTED = 3
"""The most items that an enumeration names; the others are counted."""

_COMMAND, _USER = 40, 20
"""The most characters shown of a command and of a user's name."""

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))

GAP = 2
"""Blanks between two columns."""


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
    command: str, pid: int | None, *, user: str | None = None, since: float | None = None
) -> str:
    """A process: ``python train.py (pid 42) of alice, for 3 h 10 min``.

    Args:
        command: the program and its arguments.
        pid: the process id; None when it is unknown.
        user: the name of its user; None likewise.
        since: when it started, in seconds since 1970; None likewise.
    """
    number = "" if pid is None else f" (pid {pid})"
    owner = f" of {one_line(' '.join(user.split()), _USER)}" if user else ""
    age = "" if since is None else f", for {duration(time.time() - since)}"
    return f"{one_line(' '.join(command.split()), _COMMAND)}{number}{owner}{age}"


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of text that is never broken."""

    text: str
    style: str = ""


Line: TypeAlias = tuple[Span, ...]
"""One line, or one cell of a table, which may be broken between its spans."""


def line(*parts: Span | str) -> Line:
    """A line of these parts; empty ones are left out."""
    spans = (part if isinstance(part, Span) else Span(part) for part in parts)
    return tuple(span for span in spans if span.text)


def plain(spans: Line) -> str:
    """The text of a line without its styles and without blanks at its end."""
    return "".join(span.text for span in spans).rstrip()


def listed(items: Iterable[str], separator: str, style: str = "") -> Line:
    """Items that may be broken after their separators."""
    *others, last = [item for item in items if item] or [""]
    return line(*(Span(item + separator, style) for item in others), Span(last, style))


def cpulist(cpus: CpuSet, style: str = "cpus") -> Line:
    """A cpulist that may be broken after its commas."""
    return listed(format_cpulist(cpus).split(","), ",", style)


def table(
    rows: Sequence[Sequence[Line]], *, width: int | None = None, right: Collection[int] = ()
) -> list[Line]:
    """Rows of cells as aligned lines.

    Args:
        rows: all with the same number of cells; an empty column takes no room.
        width: the columns of the terminal; cells are broken to fit, where they can be. None
            breaks none.
        right: the columns that are aligned to the right.
    """
    columns = list(zip(*rows, strict=True))
    widths = [max(len(plain(cell)) for cell in column) for column in columns]
    excess = 0 if width is None else sum(w + GAP for w in widths if w) - GAP - width
    least = [
        max(len(s.text.rstrip()) for c in column for s in (*c, Span(""))) for column in columns
    ]
    for number in sorted(range(len(widths)), key=lambda i: least[i] - widths[i]):
        cut = max(0, min(excess, widths[number] - least[number]))
        widths[number] -= cut
        excess -= cut
    return [made for row in rows for made in _row(row, widths, right)]


def _least(cell: Line) -> int:
    """The width of a cell that is broken between all its spans."""
    return max((len(span.text.rstrip()) for span in cell), default=0)


def _row(row: Sequence[Line], widths: Sequence[int], right: Collection[int]) -> list[Line]:
    used = [number for number, width in enumerate(widths) if width]
    cells = {number: _broken(row[number], widths[number]) for number in used}
    lines: list[Line] = []
    for place in range(max((len(cell) for cell in cells.values()), default=1)):
        spans: list[Span] = []
        for number, cell in cells.items():
            shown = cell[place] if place < len(cell) else ()
            blanks = Span(" " * (widths[number] - len(plain(shown))))
            spans += [blanks, *shown] if number in right else [*shown, blanks]
            spans.append(Span(" " * GAP))
        lines.append(_trimmed(line(*spans)))
    return lines


def _broken(cell: Line, width: int) -> list[Line]:
    """A cell as lines that are no wider, as far as its spans allow."""
    lines: list[Line] = [()]
    for span in cell:
        if lines[-1] and len(plain((*lines[-1], span))) > width:
            lines.append(())
        lines[-1] += (span,)
    return [_trimmed(spans) for spans in lines]


def _trimmed(spans: Line) -> Line:
    """The line without blanks at its end."""
    while spans and not spans[-1].text.strip():
        spans = spans[:-1]
    return (*spans[:-1], Span(spans[-1].text.rstrip(), spans[-1].style)) if spans else ()


person = process_in_words
