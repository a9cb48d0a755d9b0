"""Coloured text on a terminal. The only module that imports rich, and it is imported late."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import TextIO

from rich.console import Console
from rich.text import Text

from gpuaff.formatting import Line

_STYLES = {"head": "bold", "dim": "dim", "gpu": "bold green", "bad": "bold red", "cpus": "cyan"}

_RANKS = (
    "bright_cyan",
    "bright_yellow",
    "bright_magenta",
    "bright_green",
    "bright_blue",
    "bright_red",
    "cyan",
    "yellow",
    "magenta",
    "green",
    "blue",
    "red",
)
"""One colour a rank, so that neighbours differ; they come again after the twelfth."""


def write(lines: Iterable[Line], stream: TextIO, *, force: bool | None = None) -> None:
    """Write lines with their colours.

    Args:
        lines: what to write.
        stream: where to; what it can show is up to rich (TERM, NO_COLOR).
        force: take the stream for a terminal though it is none.
    """
    console = Console(file=stream, highlight=False, force_terminal=force)
    for pieces in lines:
        runs = groupby(pieces, key=lambda span: span.style)
        text = Text.assemble(*(("".join(s.text for s in run), _style(name)) for name, run in runs))
        text.rstrip()
        console.print(text, soft_wrap=True)


def _style(name: str) -> str:
    kind, _, rank = name.partition(":")
    return f"bold {_RANKS[int(rank) % len(_RANKS)]}" if kind == "rank" else _STYLES.get(name, "")
