"""Text for people, before it is printed: lines of styled pieces, and tables of them.

Plain text and coloured text are the same text: ``render`` prints the pieces with or without
their styles. A style is ``head``, ``dim``, ``gpu``, ``cpus``, ``bad`` or ``rank:N``.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, TypeAlias

from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.notices import printable

GAP = 2
"""Blanks between two columns."""


class Span(NamedTuple):
    """A piece of text that is never broken."""

    text: str
    style: str = ""


Line: TypeAlias = tuple[Span, ...]
"""One line, or one cell of a table, which may be broken between its pieces."""


def line(*parts: Span | str) -> Line:
    """A line of these pieces; an empty one is left out."""
    spans = (part if isinstance(part, Span) else Span(part) for part in parts)
    return tuple(span for span in spans if span.text)


def plain(pieces: Line) -> str:
    """The text of a line without its styles and without blanks at its end."""
    return "".join(span.text for span in pieces).rstrip()


def cpulist(cpus: CpuSet, style: str = "cpus") -> Line:
    """A cpulist that may be broken after its commas."""
    return listed(format_cpulist(cpus).split(","), ",", style)


def listed(items: Iterable[str], separator: str, style: str = "") -> Line:
    """Items that may be broken after their separators."""
    texts = [item for item in items if item]
    last = len(texts) - 1
    return tuple(
        Span(item if number == last else item + separator, style)
        for number, item in enumerate(texts)
    )


def counted(number: int, what: str) -> str:
    """``1 core``, ``2 cores``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def table(
    rows: Sequence[Sequence[Line]], *, width: int | None = None, right: Collection[int] = ()
) -> list[Line]:
    """Rows of cells as aligned lines.

    Args:
        rows: all with the same number of cells; a column whose cells are all empty takes no
            room.
        width: the width to stay inside by breaking cells, where they can be broken; None
            breaks none.
        right: the columns that are set flush right.
    """
    if not rows:
        return []
    widths = _widths(rows, width)
    return [made for row in rows for made in _row(row, widths, right)]


def _widths(rows: Sequence[Sequence[Line]], width: int | None) -> list[int]:
    columns = list(zip(*rows, strict=True))
    widths = [max(len(plain(cell)) for cell in column) for column in columns]
    if width is None:
        return widths
    floors = [max(_floor(cell) for cell in column) for column in columns]
    excess = sum(widths) + GAP * (sum(1 for w in widths if w) - 1) - width
    for number in sorted(range(len(widths)), key=lambda i: floors[i] - widths[i]):
        cut = max(0, min(excess, widths[number] - floors[number]))
        widths[number] -= cut
        excess -= cut
    return widths


def _floor(cell: Line) -> int:
    """How narrow a cell can be made."""
    return max((len(span.text.rstrip()) for span in cell), default=0)


def _row(row: Sequence[Line], widths: Sequence[int], right: Collection[int]) -> list[Line]:
    cells = [_broken(cell, width) for cell, width in zip(row, widths, strict=True)]
    height = max(len(cell) for cell in cells)
    return [
        _joined([cell[n] if n < len(cell) else () for cell in cells], widths, right)
        for n in range(height)
    ]


def _broken(cell: Line, width: int) -> list[Line]:
    """A cell cut into lines that are no wider, as far as its pieces allow."""
    lines: list[Line] = [()]
    for span in cell:
        if lines[-1] and len(plain((*lines[-1], span))) > width:
            lines.append(())
        lines[-1] += (span,)
    return [_trimmed(made) for made in lines]


def _trimmed(pieces: Line) -> Line:
    """The line without blanks at its end."""
    while pieces and not pieces[-1].text.strip():
        pieces = pieces[:-1]
    last = Span(pieces[-1].text.rstrip(), pieces[-1].style) if pieces else Span("")
    return line(*pieces[:-1], last)


def _joined(cells: Sequence[Line], widths: Sequence[int], right: Collection[int]) -> Line:
    made: list[Span] = []
    for number, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        if width == 0:  # a column with nothing in it
            continue
        blanks = Span(" " * (width - len("".join(span.text for span in cell))))
        gap = Span(" " * GAP if made else "")
        made += [gap, blanks, *cell] if number in right else [gap, *cell, blanks]
    return _trimmed(tuple(made))


# Numbers, times, lists and people in the messages of claims.


_NAMED = 3
"""So many are named; the rest are counted."""

_COMMAND, _USER = 40, 20
"""The most characters that are shown of a command and of a user's name."""

_STEPS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def size(number: int) -> str:
    """Bytes for people: ``1.5 GiB``, ``80 GiB``, ``512 MiB``, ``3 bytes``."""
    if number >= 1 << 30:
        return f"{number / (1 << 30):.1f}".removesuffix(".0") + " GiB"
    return f"{number >> 20} MiB" if number >= 1 << 20 else f"{number} bytes"


def duration(seconds: float) -> str:
    """A time for people, by its two largest units: ``3 h 10 min``, ``5 s``."""
    left = max(0, int(seconds))
    place = next((i for i, (step, _) in enumerate(_STEPS) if left >= step), len(_STEPS) - 1)
    said: list[str] = []
    for step, unit in _STEPS[place : place + 2]:
        count, left = divmod(left, step)
        if count or not said:
            said.append(f"{count} {unit}")
    return " ".join(said)


def enumeration(items: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b, c and 4 more``."""
    said = list(items[:_NAMED])
    if len(items) > _NAMED:
        said.append(f"{len(items) - _NAMED} more")
    return " and ".join(filter(None, (", ".join(said[:-1]), *said[-1:])))


def person(command: str, pid: int | None, *, user: str | None, since: float | None) -> str:
    """Somebody: ``python train.py (pid 42) of alice, for 3 h 10 min``.

    It is cut short, and without what a terminal would obey.

    Args:
        command: the program and its arguments.
        pid: the process id; None when it is not known.
        user: whose it is, by name; None likewise.
        since: since when, in seconds since 1970; None likewise.
    """
    who = _cut(command, _COMMAND)
    number = "" if pid is None else f" (pid {pid})"
    of = f" of {_cut(user, _USER)}" if user else ""
    lasting = "" if since is None else f", for {duration(time.time() - since)}"
    return f"{who}{number}{of}{lasting}"


def _cut(said: str, most: int) -> str:
    line = printable(" ".join(said.split()))
    return line if len(line) <= most else f"{line[: most - 1]}…"
