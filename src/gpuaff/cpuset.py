"""Sets of logical CPU ids, and the two ways in which Linux writes them.

A *cpulist* is ``0-3,8`` (``Documentation/admin-guide/cputopology.rst``); a *mask* is
comma-separated 32-bit hexadecimal words, the highest first (``00000001,0000000f``). A set has no
fixed size: some machines have thousands of CPUs (cases G1, G2).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeAlias

CpuSet: TypeAlias = frozenset[int]
"""Logical CPUs by their OS ids."""

# Linux' own limit (NR_CPUS) is 8192 on x86-64 and arm64. Without one a typing error such as
# ``0-99999999`` would exhaust the memory.
MAX_CPU_ID = 65_535
"""The highest id accepted."""

_ELEMENT = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9})/(\d{1,9}))?)?", re.ASCII)
_MASK = r"(?:0x)?[0-9a-fA-F]+(?:,[0-9a-fA-F]{1,8})*"


def parse_cpulist(text: str) -> CpuSet:
    """Read a cpulist; blanks around elements are allowed, and an empty text is the empty set.

    A range may carry the kernel's stride: ``0-31:2/8`` is the first 2 of every 8.

    Raises:
        ValueError: anything else, or an id above :data:`MAX_CPU_ID`.
    """
    cpus: set[int] = set()
    named = 0
    for element in text.split(",") if text.strip() else ():
        ids = _element(element.strip())
        named += len(ids)
        if named > 4 * MAX_CPU_ID:  # a megabyte of "0-65535," would take minutes
            raise ValueError("the list names the same CPUs again and again")
        cpus.update(ids)
    return frozenset(cpus)


def _element(text: str) -> Sequence[int]:
    match = _ELEMENT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a CPU id or a range such as 0-3")
    first, last, used, group = match.groups()
    start, end = int(first), int(last or first)
    if end < start:
        raise ValueError(f"{text!r} runs backwards")
    if end > MAX_CPU_ID:
        raise ValueError(f"{text!r} is above the highest CPU id, {MAX_CPU_ID}")
    ids = range(start, end + 1)
    if used is None:
        return ids
    if not 0 < int(used) <= int(group):
        raise ValueError(f"{text!r}: the stride {used}/{group} is invalid")
    return [cpu for cpu in ids if (cpu - start) % int(group) < int(used)]


def format_cpulist(cpus: Iterable[int]) -> str:
    """Write CPUs as the shortest ascending cpulist, e.g. ``0-3,8``; ``""`` when empty."""
    runs: list[list[int]] = []  # the first and the last of each
    for cpu in sorted(cpus):
        if runs and cpu <= runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{first}-{last}" if first < last else f"{first}" for first, last in runs)


def grouped(cpus: Iterable[int], key: Callable[[int], Hashable]) -> tuple[CpuSet, ...]:
    """The CPUs that have one key in one group; the groups by their lowest ids."""
    groups: dict[Hashable, set[int]] = {}
    for cpu in sorted(cpus):
        groups.setdefault(key(cpu), set()).add(cpu)
    return tuple(map(frozenset, groups.values()))


def parse_mask(text: str) -> CpuSet:
    """Read a mask as sysfs and Slurm write it, ``00000001,0000000f`` or ``0xff``; or ValueError."""
    stripped = text.strip()
    if not re.fullmatch(_MASK, stripped):
        raise ValueError(f"{stripped[:40]!r} is not a hexadecimal CPU mask")
    first, *rest = stripped.removeprefix("0x").split(",")
    digits = first.lstrip("0") + "".join(word.zfill(8) for word in rest)
    if len(digits) * 4 > MAX_CPU_ID + 4:
        raise ValueError(f"the mask names CPUs above {MAX_CPU_ID}")
    return from_bits(int(digits or "0", 16))


def format_mask(cpus: Iterable[int]) -> str:
    """Write CPUs as a mask of 32-bit words, the highest first, as sysfs does."""
    digits = f"{sum(1 << cpu for cpu in set(cpus)):x}"
    padded = digits.zfill(-(-len(digits) // 8) * 8)
    return ",".join(padded[at : at + 8] for at in range(0, len(padded), 8))


def from_bits(bits: int) -> CpuSet:
    """The positions of the set bits of a number of any size."""
    lowest_first = bin(bits)[:1:-1]  # shifting a large number bit by bit takes quadratic time
    return frozenset(place for place, bit in enumerate(lowest_first) if bit == "1")
