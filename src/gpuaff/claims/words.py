"""Numbers, times, lists and people in the messages of claims."""

from __future__ import annotations

import time
from collections.abc import Sequence

from gpuaff.notices import printable

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
