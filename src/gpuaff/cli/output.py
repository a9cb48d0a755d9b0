"""Output: data on standard output, notes and errors on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, TextIO

from gpuaff._system import env
from gpuaff.formatting import Line, Table, laid_out, plain, printable
from gpuaff.notices import Notice

_STYLES = {"head": "bold", "dim": "dim", "gpu": "bold green", "bad": "bold red", "cpus": "cyan"}

# One colour a rank, so that neighbours differ; they repeat after the twelfth.
_HUES = ("cyan", "yellow", "magenta", "green", "blue", "red")
_RANKS = (*(f"bright_{hue}" for hue in _HUES), *_HUES)


def show_json(data: dict[str, Any]) -> None:
    """Print JSON: indented, in ASCII, its keys in order."""
    # Lone surrogates, which JSON must not contain, are U+FFFD: Python reads them where the
    # arguments of a process, or a path, are no valid text
    import json

    text = json.dumps(data, ensure_ascii=False).encode("utf-16", "surrogatepass")
    print(json.dumps(json.loads(text.decode("utf-16", "replace")), indent=2, allow_nan=False))


def show(blocks: Iterable[Line | Table]) -> None:
    """Print lines and tables: on a terminal by rich where it is installed, else plain.

    ``FORCE_COLOR`` makes everything a terminal, and ``NO_COLOR`` takes the colours out.
    """
    shown = list(blocks)
    text = "".join(f"{plain(block)}\n" for block in shown)
    if sys.stdout is not None and (sys.stdout.isatty() or env.get("FORCE_COLOR")):
        with suppress(ImportError):
            text = rendered(shown, sys.stdout)
    print(_encodable(text), end="")


def rendered(blocks: Iterable[Line | Table], stream: TextIO, *, force: bool | None = None) -> str:
    """Text for a terminal (``force``: though it is none), broken to its width, and coloured."""
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream, highlight=False, force_terminal=force)
    with console.capture() as capture:
        for block in blocks:
            for spans in laid_out(block, console.width):
                text = Text.assemble(*((span.text, _style(span.style)) for span in spans))
                text.rstrip()
                console.print(text, soft_wrap=True)
    return capture.get()


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
            lines = map(_encodable, map(printable, text.split("\n  ")))
            print("gpuaff:", "\n  ".join(lines), file=sys.stderr)


def _encodable(text: str) -> str:
    """The text with escapes for what the encoding lacks."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
