"""Output: data on standard output, notes and errors on standard error."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable
from contextlib import suppress
from itertools import groupby
from typing import Any, TextIO

from gpuaff.formatting import Line, Span, plain, printable
from gpuaff.notices import Notice

_STYLES = {"head": "bold", "dim": "dim", "gpu": "bold green", "bad": "bold red", "cpus": "cyan"}

_RANKS = (
    *("bright_cyan", "bright_yellow", "bright_magenta", "bright_green", "bright_blue"),
    *("bright_red", "cyan", "yellow", "magenta", "green", "blue", "red"),
)
"""One colour a rank, so that neighbours differ; they repeat after the twelfth."""


def terminal_width() -> int | None:
    """The columns of the terminal; None when the output goes to a file or another program."""
    return shutil.get_terminal_size().columns if _to_terminal() else None


def _to_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def show_json(data: dict[str, Any]) -> None:
    """Print JSON: indented, in ASCII, its keys in order."""
    print(json.dumps(_valid(data), indent=2, allow_nan=False))


def _valid(value: Any) -> Any:
    """The same with U+FFFD for lone surrogates, which JSON must not contain.

    Python reads them where the arguments of a process, or a path, are no valid text.
    """
    if isinstance(value, dict):
        return {key: _valid(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_valid(one) for one in value]
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value


def show_lines(lines: Iterable[Line]) -> None:
    """Print lines, coloured on a terminal where rich is installed."""
    shown = [tuple(Span(_encodable(s.text), s.style) for s in spans) for spans in lines]
    if _to_terminal():
        with suppress(ImportError):
            write_coloured(shown, sys.stdout)
            return
    for spans in shown:
        print(plain(spans))


def write_coloured(lines: Iterable[Line], stream: TextIO, *, force: bool | None = None) -> None:
    """Write lines with colours, as far as the stream shows them (TERM, NO_COLOR).

    Args:
        lines: what to write.
        stream: where to.
        force: take the stream for a terminal though it is none.

    Raises:
        ImportError: rich is not installed.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream, highlight=False, force_terminal=force)
    for spans in lines:
        runs = groupby(spans, key=lambda span: span.style)
        text = Text.assemble(*(("".join(s.text for s in run), _style(name)) for name, run in runs))
        text.rstrip()
        console.print(text, soft_wrap=True)


def _style(name: str) -> str:
    kind, _, rank = name.partition(":")
    return f"bold {_RANKS[int(rank) % len(_RANKS)]}" if kind == "rank" else _STYLES.get(name, "")


def show_notes(notices: Iterable[Notice]) -> None:
    """Print each notice on standard error, once the data is out."""
    if sys.stdout is not None:
        sys.stdout.flush()
    for notice in notices:
        print_stderr(f"note: {notice.message} [{notice.code}]")


def print_stderr(text: str) -> None:
    """Print a line, and indented ones below it, on standard error, where that can be written."""
    if sys.stderr is not None:  # print() would take standard output instead
        with suppress(OSError):  # its reader has gone, or its disk is full
            print("gpuaff:", "\n  ".join(map(_encodable, text.split("\n  "))), file=sys.stderr)


def _encodable(text: str) -> str:
    """The text with escapes for what the terminal would interpret, or the encoding lacks."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return printable(text).encode(encoding, "backslashreplace").decode(encoding)
