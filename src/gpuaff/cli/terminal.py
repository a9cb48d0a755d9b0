"""Lines and tables on a terminal, by rich: coloured, and broken to fit its width."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import TextIO

from rich.console import Console
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
    with console.capture() as capture:
        for block in blocks:
            lines = _laid_out(block, console.width) if isinstance(block, Table) else [_text(block)]
            for text in lines:
                text.rstrip()
                console.print(text, soft_wrap=True)
    return capture.get()


def _laid_out(table: Table, width: int) -> Iterator[Text]:
    """The lines of a table: where it is too wide, cells are broken between their spans only."""
    parts = table.columns()
    columns = [[[_text((span,)) for span in cell] for cell in cells] for _, cells in parts]
    widths = [max(sum(map(len, cell)) for cell in cells) for cells in columns]
    least = [max(len(p.plain.rstrip()) for cell in cells for p in cell) for cells in columns]
    excess = sum(widths) + GAP * (len(widths) - 1) - width
    for n in sorted(range(len(widths)), key=lambda n: least[n] - widths[n]):
        cut = max(0, min(excess, widths[n] - least[n]))
        widths[n] -= cut
        excess -= cut
    for row in zip(*columns, strict=True):
        broken = [_broken(cell, most) for cell, most in zip(row, widths, strict=True)]
        for pieces in zip_longest(*broken):
            texts = [piece or Text() for piece in pieces]
            for text, (right, _), most in zip(texts, parts, widths, strict=True):
                text.align("right" if right else "left", most)
            yield Text(" " * GAP).join(texts)


def _broken(pieces: Iterable[Text], width: int) -> list[Text]:
    lines = [Text()]
    for piece in pieces:
        if len(lines[-1]) and len(lines[-1]) + len(piece.plain.rstrip()) > width:
            lines.append(Text())
        lines[-1].append_text(piece)
    for text in lines:
        text.rstrip()
    return lines


def _text(spans: Line) -> Text:
    return Text.assemble(*((printable(span.text), _style(span.style)) for span in spans))


def _style(name: str) -> str:
    kind, _, rank = name.partition(":")
    return f"bold {_RANKS[int(rank) % len(_RANKS)]}" if kind == "rank" else _STYLES.get(name, "")
