"""What a call of ``claim_gpus`` requests, from its arguments. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import islice

from gpuaff import options
from gpuaff.errors import InvalidOptionError
from gpuaff.options import MOST_GPUS, suggestion, whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

Name: TypeAlias = "int | str"
"""A device: NVML's index, a UUID or the beginning of one, or a PCI address."""


_FOREVER = 1e9
"""Seconds (31 years): a longer wait has no limit."""

_EXPECTED_COUNT = f'a number of GPUs from 1 to {MOST_GPUS}, or "auto": as many as were granted'
_EXPECTED_NAMES = "GPUs by index, UUID or PCI address, such as [0, 2] or ['GPU-8f3c…']"


class VisibleAs(str, Enum):
    """How CUDA_VISIBLE_DEVICES is written."""

    INDEX = "index"
    """Numbers, in the order of PCI addresses, with CUDA_DEVICE_ORDER=PCI_BUS_ID (case D6)."""
    UUID = "uuid"
    """UUIDs, as MIG instances always are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The arguments of ``claim_gpus`` that say which GPUs it requests.

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


def parse_request(
    n: object,
    *,
    gpus: object = None,
    candidates: object = None,
    min_free_memory: object = None,
    max_utilization: object = None,
    wait: object = 0,
    visible: object = VisibleAs.INDEX,
) -> Request:
    """Check the arguments.

    Raises:
        InvalidOptionError: one of them is invalid.
    """
    exactly, some = _names("gpus", gpus), _names("candidates", candidates)
    if exactly is not None and some is not None:
        raise InvalidOptionError("candidates", candidates, "nothing, as gpus= names them all")
    count = (
        None
        if isinstance(n, str) and n == "auto"
        else options.count("n", n, most=MOST_GPUS, expected=_EXPECTED_COUNT)
    )
    if exactly is not None:
        if count not in (None, 1, len(exactly)):
            raise InvalidOptionError("n", n, f"{len(exactly)}, as many as gpus= names, or nothing")
        count = len(exactly)
    percent = "percent, from 0 to 100"
    return Request(
        count=count,
        gpus=exactly,
        candidates=some,
        min_free_memory=_limit("min_free_memory", min_free_memory, 2**63, "a number of bytes"),
        max_utilization=_limit("max_utilization", max_utilization, 100, percent),
        wait=_seconds(wait),
        visible=_visible(visible),
    )


def _limit(option: str, value: object, most: int, expected: str) -> int | None:
    if value is None:
        return None
    return options.count(option, value, least=0, most=most, expected=expected)


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
    given = value
    if (number := whole(value)) is not None:
        given = (number,)
    elif isinstance(value, str):
        given = [part.strip() for part in value.split(",")]
    # Iterating over bytes gives numbers.
    if not isinstance(given, Iterable) or isinstance(given, bytes | bytearray | memoryview):
        raise InvalidOptionError(option, value, _EXPECTED_NAMES)
    names = tuple(
        one if isinstance(one, str) else whole(one) for one in islice(given, MOST_GPUS + 1)
    )
    if not 0 < len(names) <= MOST_GPUS or None in names or "" in names:
        raise InvalidOptionError(option, value, _EXPECTED_NAMES)
    return tuple(name for name in names if name is not None)
