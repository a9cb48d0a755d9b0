"""One reader per kind of option, for arguments, ``GPUAFF_*`` variables and the command line.

A reader takes the option's name, as the user wrote it, and the value; it raises
:class:`~gpuaff.errors.InvalidOptionError`, which names both. Readers of numbers and flags take
``text=True`` for values of variables and of the command line, where ``3`` is the text ``"3"``.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from contextlib import suppress
from enum import Enum
from typing import TypeVar

from gpuaff.cpuset import MAX_CPU_ID, CpuSet, parse_cpulist
from gpuaff.errors import InvalidOptionError
from gpuaff.notices import Notice

_Word = TypeVar("_Word", bound=Enum)

MOST_GPUS = 1024
"""More GPUs than any machine has."""

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")

_NAMES = """
    balanced claim cpus fsroot lock_dir max_physical_cores memory min_physical_cores mode
    multithreading openmp partition pinned reserve safe_gpu scope strict"""
_VARIABLES = ["GPUAFF", *(f"GPUAFF_{name.upper()}" for name in _NAMES.split())]

# Not compiled at once: pinning needs none of these.
_NUMBER = r"([0-9]{1,15})(?:\.([0-9]{1,9}))?"
_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_DURATION = "".join(f"(?:{_NUMBER}{unit})?" for unit in _SECONDS)
_UNITS = "kmgtp"
_SIZE = rf"{_NUMBER}\s*(?:([{_UNITS}])(i?b?)|b)?"
_PCI_ADDRESS = r"(?:[0-9a-f]{1,8}:)?[0-9a-f]{1,2}:[0-9a-f]{1,2}\.[0-7]"


def natural(text: str | None) -> int | None:
    """At most nine decimal digits and nothing else, as a number; None for anything else.

    ``int`` would also take signs, blanks, underscores and other scripts' digits.
    """
    if text is None or len(text) > 9 or not (text.isascii() and text.isdecimal()):
        return None
    return int(text)


def whole(value: object) -> int | None:
    """A whole number of any integer type (NumPy's too), but no bool; None for anything else."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]  # TypeError says so
    except TypeError:
        return None


def suggestion(text: str, words: Iterable[str], *, nearness: float = 0.6) -> str:
    """``; did you mean X?`` when one of the words is near, else nothing."""
    from difflib import get_close_matches  # costs a millisecond, and is rarely needed

    by_key = {word.replace("-", "_").lower(): word for word in words}
    near = get_close_matches(text[:80].replace("-", "_").lower(), by_key, n=1, cutoff=nearness)
    return f"; did you mean {by_key[near[0]]}?" if near else ""


def misspelt_variables(names: Iterable[str]) -> tuple[Notice, ...]:
    """A notice for each variable whose name is nearly one of ours."""
    found = []
    for name in names:
        # Others that begin with GPUAFF_ may be anything.
        if name not in _VARIABLES and (hint := suggestion(name, _VARIABLES, nearness=0.9)):
            text = f"{name} is no variable of gpuaff, so it has no effect{hint}"
            found.append(Notice("variable-unknown", text))
    return tuple(found)


def word(name: str, value: object, words: type[_Word], *, more: str = "") -> _Word:
    """A member of an enum, or its string; ``more`` names what else the option may be."""
    if isinstance(value, str):  # an enum's own error calls repr(), which may fail for others
        with suppress(ValueError):
            return words(value)
    known = [str(member.value) for member in words]
    hint = suggestion(value, known) if isinstance(value, str) else ""
    raise InvalidOptionError(name, value, f"one of {', '.join(known)}{more}{hint}")


def flag(name: str, value: object, *, text: bool = False) -> bool:
    """True or False; as text ``1``, ``true``, ``yes``, ``on`` and their opposites."""
    if not text and isinstance(value, bool):
        return value
    lowered = str(value).lower()
    if not text or lowered not in _TRUE + _FALSE:
        expected = f"one of {', '.join(_TRUE + _FALSE)}" if text else "True or False"
        raise InvalidOptionError(name, value, expected)
    return lowered in _TRUE


def count(
    name: str,
    value: object,
    *,
    least: int = 1,
    most: int = MAX_CPU_ID,
    expected: str = "",
    text: bool = False,
) -> int:
    """A whole number from ``least`` to ``most``; ``expected`` replaces the error's words."""
    number = natural(str(value)) if text else whole(value)
    if number is None or not least <= number <= most:
        expected = expected or f"a whole number from {least} to {most}"
        raise InvalidOptionError(name, value, expected)
    return number


def percent(name: str, text: str) -> int:
    """A percentage: ``10``, ``10%``."""
    number = natural(text.removesuffix("%"))
    if number is None or number > 100:
        raise InvalidOptionError(name, text, "a percentage from 0 to 100")
    return number


def cpus(name: str, value: object) -> CpuSet:
    """At least one CPU, as a cpulist (``"0-3,8"``) or as ids."""
    expected = "a list of CPUs such as 0-3,8, with at least one in it"
    try:
        found = parse_cpulist(value) if isinstance(value, str) else _ids(value)
    except ValueError as error:
        raise InvalidOptionError(name, value, f"{expected} ({error})") from None
    if not found:
        raise InvalidOptionError(name, value, expected)
    return found


def _ids(value: object) -> CpuSet:
    if not isinstance(value, Iterable) or isinstance(value, (bytes, bytearray, memoryview)):
        raise ValueError("it is no list")  # noqa: TRY004 - one error for all that is no CPU set
    given = tuple(value)
    only_ints = set(map(type, given)) <= {int}  # asked once for all: there may be thousands
    found = frozenset(given if only_ints else map(whole, given))
    if None in found or (found and not 0 <= min(found) <= max(found) <= MAX_CPU_ID):
        raise ValueError(f"an id is a whole number from 0 to {MAX_CPU_ID}")
    return found


def duration(name: str, text: str, *, hint: str = "") -> float:
    """A duration in seconds: ``90``, ``0.5``, ``10m``, ``1h30m``; the error ends in ``hint``."""
    if re.fullmatch(_NUMBER, text):
        return float(text)
    parts = re.fullmatch(_DURATION, text, re.IGNORECASE)
    if not text or not parts:
        expected = f"a duration such as 90 (seconds), 10m or 1h30m{hint}"
        raise InvalidOptionError(name, text, expected)
    found = parts.groups()
    pairs = zip(found[::2], found[1::2], _SECONDS.values(), strict=True)
    return sum(float(f"{whole}.{part or 0}") * unit for whole, part, unit in pairs if whole)


def size(name: str, text: str) -> int:
    """A size in bytes: ``500000000``, ``512M``, ``40G``, ``40GiB``, ``1.5T``.

    As in coreutils ``G`` and ``GiB`` are 2³⁰ bytes, and ``GB`` is 10⁹.
    """
    parts = re.fullmatch(_SIZE, text, re.IGNORECASE)
    if not parts or (parts[2] and not parts[3]):  # there are no parts of a byte
        raise InvalidOptionError(name, text, "a size such as 40G, 40GiB, 512M, or bytes")
    digits, part, unit, suffix = parts.groups()
    if not unit:
        return int(digits)
    base = 1000 if suffix.lower() == "b" else 1024
    factor: int = base ** (_UNITS.index(unit.lower()) + 1)
    below: int = 10 ** len(part or "")
    return int(digits) * factor + int(part or 0) * factor // below


def gpus(name: str, text: str) -> tuple[int | str, ...]:
    """GPUs: ``0,2``, ``4-7``, ``GPU-3f…``, ``0000:07:00.0``, in any mix, each once."""
    found: list[int | str] = []
    for part in map(str.strip, text.split(",")):
        ends = [natural(end) for end in part.split("-")]
        first, last = ends[0], ends[-1]
        if len(ends) <= 2 and first is not None and last is not None and first <= last < MOST_GPUS:
            found.extend(range(first, last + 1))
        elif part.startswith(("GPU-", "MIG-")) or re.fullmatch(_PCI_ADDRESS, part.lower()):
            found.append(part)
        else:
            expected = "GPUs by index (0,2 or 4-7), by UUID (GPU-…, MIG-…) or by PCI address"
            raise InvalidOptionError(name, text, f"{expected} (0000:07:00.0)")
    twice = sorted({str(gpu) for gpu in found if found.count(gpu) > 1})
    if twice:
        raise InvalidOptionError(name, text, f"each GPU once, not {', '.join(twice)} twice")
    return tuple(found)
