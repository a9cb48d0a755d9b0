"""What a call of ``claim_gpus`` asks for, read from its arguments. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import islice

from gpuaff.errors import InvalidOptionError
from gpuaff.options import suggestion, whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

Name: TypeAlias = "int | str"
"""How a device is named: NVML's index, a UUID or the beginning of one, or a PCI address."""

MOST = 1024
"""More GPUs than any machine has."""

AUTO = "auto"

_FOREVER = 1e9
"""Seconds that nobody waits; from there on a wait has no limit."""


class VisibleAs(str, Enum):
    """How CUDA_VISIBLE_DEVICES is written."""

    INDEX = "index"
    """Numbers, in the order of PCI addresses, with CUDA_DEVICE_ORDER=PCI_BUS_ID (case D6)."""
    UUID = "uuid"
    """UUIDs, as MIG instances always are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked for; the attributes are ``claim_gpus``' arguments.

    Attributes:
        count: how many; None is as many as the scheduler has granted.
        gpus: exactly these.
        candidates: some of these.
        min_free_memory: in bytes.
        max_utilization: in percent.
        wait: for how long, in seconds; None is without limit.
        visible: how CUDA_VISIBLE_DEVICES is written; None leaves it alone.
    """

    count: int | None
    gpus: tuple[Name, ...] | None = None
    candidates: tuple[Name, ...] | None = None
    min_free_memory: int | None = None
    max_utilization: int | None = None
    wait: float | None = 0.0
    visible: VisibleAs | None = VisibleAs.INDEX


def read(
    n: object,
    *,
    gpus: object = None,
    candidates: object = None,
    min_free_memory: object = None,
    max_utilization: object = None,
    wait: object = 0,
    visible: object = VisibleAs.INDEX,
) -> Request:
    """Read the arguments.

    Raises:
        InvalidOptionError: one of them cannot be meant.
    """
    exactly, some = _names("gpus", gpus), _names("candidates", candidates)
    if exactly is not None and some is not None:
        raise InvalidOptionError("candidates", candidates, "nothing, as gpus= names them all")
    count = _count(n)
    if exactly is not None:
        if count not in (None, 1, len(exactly)):
            raise InvalidOptionError("n", n, f"{len(exactly)}, as many as gpus= names, or nothing")
        count = len(exactly)
    return Request(
        count=count,
        gpus=exactly,
        candidates=some,
        min_free_memory=_at_most("min_free_memory", min_free_memory, "a number of bytes", 2**63),
        max_utilization=_at_most("max_utilization", max_utilization, "percent, from 0 to 100", 100),
        wait=_seconds(wait),
        visible=_visible(visible),
    )


def _count(n: object) -> int | None:
    if isinstance(n, str) and n == AUTO:
        return None
    count = whole(n)
    if count is None or not 0 < count <= MOST:
        expected = f'a number of GPUs from 1 to {MOST}, or "{AUTO}": as many as were granted'
        raise InvalidOptionError("n", n, expected)
    return count


def _at_most(option: str, value: object, expected: str, most: int) -> int | None:
    if value is None:
        return None
    number = whole(value)
    if number is None or not 0 <= number <= most:
        raise InvalidOptionError(option, value, expected)
    return number


def _seconds(wait: object) -> float | None:
    if wait is None:
        return None
    seconds = wait if isinstance(wait, float) else whole(wait)
    if seconds is None or not seconds >= 0:
        expected = "seconds to wait, 0 (not at all) or more, or None (without limit)"
        raise InvalidOptionError("wait", wait, expected)
    return float(seconds) if seconds < _FOREVER else None


def _visible(value: object) -> VisibleAs | None:
    if value is None:
        return None
    words = [word.value for word in VisibleAs]
    if isinstance(value, str) and value in words:
        return VisibleAs(value)
    hint = suggestion(value, words) if isinstance(value, str) else ""
    raise InvalidOptionError("visible", value, f"one of {', '.join(words)}, or None{hint}")


def _names(option: str, value: object) -> tuple[Name, ...] | None:
    if value is None:
        return None
    expected = "GPUs by index, UUID or PCI address, such as [0, 2] or ['GPU-8f3c…']"
    given: object = value
    number = whole(value)
    if number is not None:
        given = (number,)
    elif isinstance(value, str):
        given = [part.strip() for part in value.split(",")]
    # Bytes would be numbers.
    if not isinstance(given, Iterable) or isinstance(given, bytes | bytearray | memoryview):
        raise InvalidOptionError(option, value, expected)
    found = [_name(one) for one in islice(given, MOST + 1)]
    names = tuple(name for name in found if name is not None)
    if not names or len(names) < len(found) or len(names) > MOST:
        raise InvalidOptionError(option, value, expected)
    return names


def _name(value: object) -> Name | None:
    """One GPU's name; None when it is none."""
    return (value or None) if isinstance(value, str) else whole(value)
