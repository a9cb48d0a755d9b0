"""Lines and tables on a terminal, by rich: coloured, and broken to fit its width."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TextIO

from rich.console import Console, ConsoleOptions
from rich.table import Table as Grid
from rich.text import Text

from gpuaff.formatting import GAP, Line, Table, printable

_STYLES = {"head": "bold", "dim": "dim", "gpu": "bold green", "bad": "bold red", "cpus": "cyan"}

_RANKS = (
    *("bright_cyan", "bright_yellow", "bright_magenta", "bright_green", "bright_blue"),
    *("bright_red", "cyan", "yellow", "magenta", "green", "blue", "red"),
)
"""One colour a rank, so that neighbours differ; they repeat after the twelfth."""


def rendered(blocks: Iterable[Line | Table], stream: TextIO, *, force: bool | None = None) -> str:
    """Text for a stream, with colours as far as that shows them (TERM, NO_COLOR).

    ``force`` takes the stream for a terminal though it is none.
    """
    console = Console(file=stream, highlight=False, force_terminal=force)
    width = console.width
    console.width = 1 << 20  # tables fit by their columns, and lines are not broken
    with console.capture() as capture:
        for block in blocks:
            made = _grid(block, width) if isinstance(block, Table) else _text(block)
            console.print(made, soft_wrap=True)
    return re.sub(" +$", "", capture.get(), flags=re.MULTILINE)


def _grid(table: Table, width: int) -> Grid:
    columns = [
        [_Cell(cell, gap=GAP if n else 0) for cell in cells]
        for n, (_, cells) in enumerate(table.columns())
    ]
    least = [max(cell.least for cell in cells) for cells in columns]
    widths = [max(cell.most for cell in cells) for cells in columns]
    excess = sum(widths) - width
    for n in sorted(range(len(widths)), key=lambda n: least[n] - widths[n]):
        cut = max(0, min(excess, widths[n] - least[n]))
        widths[n] -= cut
        excess -= cut
    grid = Grid.grid()
    for (right, _), most in zip(table.columns(), widths, strict=True):
        grid.add_column(width=most, justify="right" if right else "left")
    for row in zip(*columns, strict=True):
        grid.add_row(*row)
    return grid


class _Cell:
    """A cell that is broken between its spans only, with a gap before it."""

    def __init__(self, spans: Line, gap: int) -> None:
        self._gap = gap
        self._pieces = [_text((span,)) for span in spans]
        self.least = gap + max((len(piece.plain.rstrip()) for piece in self._pieces), default=0)
        self.most = gap + sum(map(len, self._pieces))

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[Text]:
        lines = [Text(" " * self._gap)]
        for piece in self._pieces:
            is_full = len(lines[-1]) + len(piece.plain.rstrip()) > options.max_width
            if is_full and len(lines[-1]) > self._gap:
                lines.append(Text(" " * self._gap))
            lines[-1].append_text(piece)
        for text in lines:
            text.rstrip()
            yield text


def _text(spans: Line) -> Text:
    return Text.assemble(*((printable(span.text), _style(span.style)) for span in spans))


def _style(name: str) -> str:
    kind, _, rank = name.partition(":")
    return f"bold {_RANKS[int(rank) % len(_RANKS)]}" if kind == "rank" else _STYLES.get(name, "")
