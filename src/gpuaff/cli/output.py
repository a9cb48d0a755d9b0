"""What comes out: data on standard output, talk on standard error."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from gpuaff.formatting import Line, Span, plain
from gpuaff.notices import Notice, printable


def terminal_width() -> int | None:
    """The columns of the terminal that reads us; None when it is a file or another program."""
    return shutil.get_terminal_size().columns if _to_terminal() else None


def _to_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def show_json(data: dict[str, Any]) -> None:
    """Print JSON: indented, in ASCII, the keys in the order that they have."""
    print(json.dumps(_sound(data), indent=2, allow_nan=False))


def _sound(value: Any) -> Any:
    """The same with U+FFFD for bytes that are no text: what Python puts there no JSON may have.

    The arguments of a process, and the path of a folder, may hold any bytes.
    """
    if isinstance(value, dict):
        return {key: _sound(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_sound(one) for one in value]
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value


def show_lines(lines: Iterable[Line]) -> None:
    """Print lines, coloured when a terminal reads them and rich is there."""
    shown = [tuple(Span(_shown(text), style) for text, style in pieces) for pieces in lines]
    if _to_terminal() and _write_rich(shown):
        return
    for pieces in shown:
        print(plain(pieces))


def _write_rich(lines: list[Line]) -> bool:
    try:
        from gpuaff.cli import richtext
    except ImportError:
        return False
    richtext.write(lines, sys.stdout)
    return True


def show_notes(notices: Iterable[Notice]) -> None:
    """Say each remark, once the data is out."""
    if sys.stdout is not None:
        sys.stdout.flush()
    for notice in notices:
        print_stderr(f"note: {notice.message} [{notice.code}]")


def print_stderr(text: str) -> None:
    """Say one line on standard error; where nobody can hear it, it is not said."""
    if sys.stderr is not None:  # print() would take standard output instead
        with suppress(OSError):  # its reader has gone, or its disk is full
            print(f"gpuaff: {_shown(text)}", file=sys.stderr)


def _shown(text: str) -> str:
    """The text without what a terminal would obey, or the output's encoding cannot carry.

    Names and messages may quote what was in somebody's file.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return printable(text).encode(encoding, "backslashreplace").decode(encoding)
