"""How the values of arguments are read."""

from __future__ import annotations

import argparse
import re

from gpuaff.errors import InvalidOptionError
from gpuaff.options import natural

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from gpuaff.cpuset import CpuSet

    T = TypeVar("T")


def cpus(name: str, text: str) -> CpuSet:
    """Read a cpulist that names at least one CPU."""
    from gpuaff.cpuset import parse_cpulist

    try:
        found = parse_cpulist(text)
    except ValueError as error:
        raise InvalidOptionError(name, text, f"a list of CPUs such as 0-3,8 ({error})") from None
    if not found:
        expected = "a list of CPUs such as 0-3,8, with at least one in it"
        raise InvalidOptionError(name, text, expected)
    return found


def process_id(name: str, text: str) -> int:
    """Read the id of a process or thread."""
    number = natural(text)
    if not number:
        raise InvalidOptionError(name, text, "the number of a process")
    return number


def file_name(name: str, text: str) -> str:
    """Read the name of a file to write."""
    if text in ("", "-"):
        expected = "the name of a file; --json prints to standard output"
        raise InvalidOptionError(name, text, expected)
    return text


def argument(read: Callable[[str, str], T]) -> Callable[[str], T]:
    """A reader as argparse wants it: its error names what was given and expected."""

    def convert(text: str) -> T:
        try:
            return read("", text)  # argparse itself names the argument
        except InvalidOptionError as error:
            said = f"{text[:60]!r}: expected {error.expected}"
            raise argparse.ArgumentTypeError(said) from None

    return convert


# How ``gpuaff run`` reads how many, how long, how much, and which.


_NUMBER = r"([0-9]{1,15})(?:\.([0-9]{1,9}))?"

_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_DURATION = re.compile("".join(f"(?:{_NUMBER}{unit})?" for unit in _SECONDS), re.IGNORECASE)

_UNITS = "kmgtp"
_SIZE = re.compile(rf"{_NUMBER}\s*(?:([{_UNITS}])(i?b?)|b)?", re.IGNORECASE)

_PCI_ADDRESS = re.compile(r"(?:[0-9a-f]{1,8}:)?[0-9a-f]{1,2}:[0-9a-f]{1,2}\.[0-7]", re.IGNORECASE)

_MOST_GPUS = 1024
"""More than any machine has: a range that goes further is a slip of the finger."""


def gpu_count(name: str, text: str) -> int | str:
    """Read how many GPUs: a number, or ``auto`` for as many as the scheduler has granted."""
    if text == "auto":
        return text
    number = natural(text)
    if not number:
        raise InvalidOptionError(name, text, "a number of GPUs from 1 on, or auto")
    return number


def duration(name: str, text: str) -> float:
    """Read a duration in seconds: ``90``, ``0.5``, ``10m``, ``1h30m``."""
    plain = re.fullmatch(_NUMBER, text)
    if plain:
        return _value(*plain.groups())
    parts = _DURATION.fullmatch(text)
    if not text or not parts:
        expected = (
            "a duration such as 90 (seconds), 10m or 1h30m; --wait alone waits without limit, "
            "and -- stands before the command"
        )
        raise InvalidOptionError(name, text, expected)
    found = parts.groups()
    pairs = zip(found[::2], found[1::2], _SECONDS.values(), strict=True)
    return sum(_value(whole, part) * seconds for whole, part, seconds in pairs if whole)


def size(name: str, text: str) -> int:
    """Read a size in bytes: ``500000000``, ``512M``, ``40G``, ``40GiB``, ``1.5T``.

    As coreutils have it: ``G`` and ``GiB`` are 2³⁰ bytes, ``GB`` is 10⁹.
    """
    parts = _SIZE.fullmatch(text)
    if not parts or (parts[2] and not parts[3]):  # there are no parts of a byte
        raise InvalidOptionError(name, text, "a size such as 40G, 40GiB, 512M, or bytes")
    whole, part, unit, suffix = parts.groups()
    if not unit:
        return int(whole)
    base = 1000 if suffix.lower() == "b" else 1024
    factor: int = base ** (_UNITS.index(unit.lower()) + 1)
    below: int = 10 ** len(part or "")
    return int(whole) * factor + int(part or 0) * factor // below


def percent(name: str, text: str) -> int:
    """Read a percentage: ``10``, ``10%``."""
    number = natural(text.removesuffix("%"))
    if number is None or number > 100:
        raise InvalidOptionError(name, text, "a percentage from 0 to 100")
    return number


def devices(name: str, text: str) -> tuple[int | str, ...]:
    """Read which GPUs: ``0,2``, ``4-7``, ``GPU-3f…``, ``0000:07:00.0``, in any mix."""
    found = [device for part in text.split(",") for device in _devices(name, text, part.strip())]
    twice = sorted({str(device) for device in found if found.count(device) > 1})
    if twice:
        raise InvalidOptionError(name, text, f"each GPU once, not {', '.join(twice)} twice")
    return tuple(found)


def _devices(name: str, text: str, part: str) -> list[int | str]:
    number = natural(part)
    if number is not None:
        return [number]
    ends = [natural(end) for end in part.split("-")]
    if len(ends) == 2:
        first, last = ends
        if first is not None and last is not None and first <= last < _MOST_GPUS:
            return list(range(first, last + 1))
    if part.startswith(("GPU-", "MIG-")) or _PCI_ADDRESS.fullmatch(part):
        return [part]
    expected = "GPUs by index (0,2 or 4-7), by UUID (GPU-…, MIG-…) or by PCI address (0000:07:00.0)"
    raise InvalidOptionError(name, text, expected)


def _value(whole: str, part: str | None) -> float:
    return float(f"{whole}.{part or 0}")
