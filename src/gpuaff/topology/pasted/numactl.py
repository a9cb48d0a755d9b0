"""What ``numactl -H`` (``--hardware``) says: each node's CPUs and memory, and the distances."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from gpuaff.cpuset import CpuSet
from gpuaff.records import dataclass, field
from gpuaff.topology.pasted.reading import Reading

_NODE = re.compile(r"node (\d{1,4}) (cpus|size):(.*)", re.ASCII)
_NUMBERS = re.compile(r"\d[\d\s]*", re.ASCII)
_DISTANCES = re.compile(r"(\d{1,4}):\s+(\d[\d\s]*)", re.ASCII)
_ITSELF = 10
"""The distance of a node to itself, and so the least there is."""

_SIZE = re.compile(r"(\d{1,12}) [kMG]B", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Numactl:
    """What was found.

    Attributes:
        nodes: the CPUs of each node; empty for one without.
        has_memory: whether each node has memory.
        distances: for each node, its distance to every node of the matrix.
    """

    nodes: Mapping[int, CpuSet] = field(default_factory=dict)
    has_memory: Mapping[int, bool] = field(default_factory=dict)
    distances: Mapping[int, Mapping[int, int]] = field(default_factory=dict)


def read(reading: Reading) -> Numactl:
    """Read the lines of ``numactl -H``; of two that differ the first one counts."""
    nodes: dict[int, CpuSet] = {}
    has_memory: dict[int, bool] = {}
    for node, what, value in _entries(_whole_lines(reading)):
        if what == "cpus":
            _keep(reading, nodes, node, value)
        elif size := _SIZE.fullmatch(value):
            has_memory.setdefault(node, int(size[1]) > 0)
    distances = _distances(reading.lines)
    return Numactl(nodes=nodes, has_memory=has_memory, distances=distances)


def _whole_lines(reading: Reading) -> Sequence[str]:
    """The lines, but for a list with which the text breaks off: a size follows each list."""
    last = reading.lines[reading.cut_line] if reading.cut_line >= 0 else ""
    cut = _NODE.match(last) or _NUMBERS.fullmatch(last)
    return reading.lines[: reading.cut_line] if cut else reading.lines


def _entries(lines: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """Each ``node N what: value``, joined with the lines onto which a list was wrapped."""
    head: tuple[int, str] | None = None
    value: list[str] = []
    for line in (*lines, ""):
        if head and head[1] == "cpus" and _NUMBERS.fullmatch(line):
            value.append(line)
            continue
        if head:
            yield *head, " ".join(value)
        found = _NODE.match(line)
        head = (int(found[1]), found[2]) if found else None
        value = [found[3].strip()] if found else []


def _keep(reading: Reading, nodes: dict[int, CpuSet], node: int, value: str) -> None:
    cpus = reading.cpulist(",".join(value.split()))
    if cpus is None:
        reading.note(
            "line-unreadable", f"numactl: the CPUs of node {node} cannot be read ({value[:40]!r})"
        )
    elif nodes.setdefault(node, cpus) is not cpus:
        reading.note(
            "contradiction",
            f"numactl tells the CPUs of node {node} twice and differently; the first is used",
        )


def _distances(lines: Sequence[str]) -> Mapping[int, Mapping[int, int]]:
    """The matrix below ``node distances:``, as far as its rows are whole."""
    columns: list[int] = []
    matrix: dict[int, Mapping[int, int]] = {}
    for line in lines:
        words = line.split()
        if words[:1] == ["node"] and _NUMBERS.fullmatch(" ".join(words[1:])):
            columns = [int(word[:5]) for word in words[1:]]
        elif row := _DISTANCES.fullmatch(line):
            numbers = [int(word[:5]) for word in row[2].split()]
            if len(numbers) == len(columns) and min(numbers) >= _ITSELF:
                matrix.setdefault(int(row[1]), dict(zip(columns, numbers, strict=True)))
    return matrix
