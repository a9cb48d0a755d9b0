"""What ``nvidia-smi topo -m`` and ``nvidia-smi -L`` print.

A row of the table has as many words for links as the header names devices, then the cells of
affinity. nvidia-smi prints "GPU NUMA ID", and every N/A, one tab too far to the right, and lists
"NUMA Affinity" as nodes and ranges of nodes (case A24). Where tabs became blanks an empty cell
leaves no trace: what could then stand in two columns is not used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple

from gpuaff.topology.model import Gpu, MigInstance
from gpuaff.topology.pasted.text import Paste

_HEADER = re.compile(
    r"(GPU\d{1,3}(?:\s+[A-Za-z][\w.:-]{0,39}\d)*)\s+CPU\b(.{0,200})", re.ASCII | re.IGNORECASE
)
_LINK = re.compile(r"X|NV\d{1,3}|SYS|SOC|NODE|PHB|PXB|PIX|PSB|C2C", re.ASCII)
"""How two devices are connected. ROCm's tables have the same shape and other words."""

_ROW = re.compile(rf"GPU(\d{{1,3}})\s+(?:{_LINK.pattern})\b.*", re.ASCII)

_LISTED = re.compile(r"GPU\s{1,4}(\d{1,3}):\s*(.*)", re.ASCII)
_MAKER = re.compile(r"(?:NVIDIA|Tesla|GeForce|Quadro|TITAN|GRID)\b", re.ASCII)
"""How names begin in lists without UUIDs: PyTorch's and vLLM's environment reports."""

_HEX = r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}"
_UUID = re.compile(f"GPU-{_HEX}", re.ASCII)
_MIG = re.compile(
    rf"MIG\s.{{0,60}}?\(UUID:\s?(MIG-(?:{_HEX}|GPU-{_HEX}/(\d{{1,3}})/(\d{{1,3}})))\)", re.ASCII
)
"""A MIG instance. Since driver 470 its UUID does not contain its ids."""


class Row(NamedTuple):
    """The row of one GPU: how it is connected with each device, and the cells of affinity.

    A cell is empty when it is missing or N/A; ``links`` is empty where the row is not whole.
    """

    links: Mapping[str, str] = {}
    cpu: str = ""
    numa: str = ""
    gpu_numa: str = ""


class _Table(NamedTuple):
    """A table as found: the devices and columns that its header names, and its lines by GPU."""

    devices: Sequence[str]
    columns: int
    lines: dict[int, str]


def read_table(paste: Paste) -> tuple[set[int], Mapping[int, Row]]:
    """The table of ``nvidia-smi topo -m``: the GPUs that it names, and the rows by GPU.

    Of several tables the one with most rows counts, and of rows for one GPU the first.
    """
    tables: list[_Table] = []
    for line in paste.lines:
        if header := _HEADER.fullmatch(line):
            columns = 1 + sum(name in header[2] for name in ("NUMA Aff", "GPU NUMA"))
            tables.append(_Table(header[1].split(), columns, {}))
        elif row := _ROW.fullmatch(line):
            if tables:
                tables[-1].lines.setdefault(int(row[1]), line)
            else:
                message = "there are rows of a table without its header, which are not used"
                paste.note("header-missing", f"{message}: add `nvidia-smi topo -m`, whole")
    if not tables:
        return set(), {}
    table = max(tables, key=lambda one: len(one.lines))
    known = table.lines.items()
    if any(not other.lines.items() <= known for other in tables):
        message = "there are tables of `nvidia-smi topo -m` that differ"
        paste.note("contradiction", f"{message}; the one with most rows counts")
    named = {int(name[3:]) for name in table.devices if re.fullmatch(r"GPU\d{1,3}", name)}
    return named | table.lines.keys(), _rows(paste, table)


def _rows(paste: Paste, table: _Table) -> Mapping[int, Row]:
    count, rows = len(table.devices), {}
    cells = {gpu: _cells(line) for gpu, line in table.lines.items()}
    longest = max((sum(map(bool, row)) for row in cells.values()), default=0)
    for gpu, row in cells.items():
        links = [*takewhile(_LINK.fullmatch, row[:count])]
        tail, filled = row[count:], sum(map(bool, row))
        is_last = paste.is_cut and paste.lines[-1] == table.lines[gpu]
        expected = count + table.columns if is_last else longest
        # A row that ends with N/A is whole: its empty cells left no trace.
        if len(links) < count or (filled < expected and not row[-1].endswith("N/A")):
            paste.note(
                "row-cut",
                f"the row of GPU {gpu} is shorter than it should be and not used: paste the whole "
                "output of `nvidia-smi topo -m`",
            )
            rows[gpu] = Row()
            continue
        affinity = _affinity(tail, table.columns, has_tabs="\t" in table.lines[gpu])
        rows[gpu] = Row(dict(zip(table.devices, links, strict=True)), *affinity)
    return rows


def _cells(line: str) -> list[str]:
    """A row's cells behind its name: separated by tabs, where an empty one counts, and blanks."""
    return [word for cell in line.split("\t") for word in (cell.split() or [""])][1:]


def _affinity(tail: Sequence[str], columns: int, *, has_tabs: bool) -> Sequence[str]:
    """CPU Affinity, NUMA Affinity and GPU NUMA ID, from the cells behind the links."""
    # A lone number may be a node as well as a CPU.
    is_cpus = tail[:1] == ["N/A"] or any(mark in "".join(tail[:1]) for mark in "-,")
    if has_tabs or is_cpus or len(tail) >= columns:
        cpu, rest = "".join(tail[:1]), tail[1:]
    else:
        cpu, rest = "", tail
    words = [cell for cell in rest if cell]
    if len(words) > 1 or columns < 3:
        numa, gpu_numa = (*words, "", "")[:2]
    elif not words or rest[1:2] == words:
        numa = gpu_numa = ""  # the second may be a shifted NUMA Affinity, or GPU NUMA ID in place
    else:
        numa, gpu_numa = (words[0], "") if rest[0] else ("", words[0])
    return ["" if cell == "N/A" else cell for cell in (cpu, numa, gpu_numa)]


def read_list(paste: Paste) -> Mapping[int, Gpu]:
    """The GPUs of ``nvidia-smi -L``: name, UUID and MIG instances, as far as they are listed."""
    found: dict[int, Gpu] = {}
    uuids: set[str] = set()
    gpu: Gpu | None = None
    for line in paste.lines:
        if listed := _listed(line):
            gpu = found.get(listed.index, listed)
            if gpu.uuid is None and gpu.name == listed.name:
                gpu = listed
            if (gpu.name, gpu.uuid) != (listed.name, listed.uuid or gpu.uuid):
                message = f"GPU {gpu.index} is listed twice and differently"
                paste.note("contradiction", f"{message}; the first counts")
            found[gpu.index] = gpu
        elif gpu and (mig := _MIG.match(line)) and mig[1] not in uuids:
            uuids.add(mig[1])
            ids = [-1 if number is None else int(number) for number in mig.groups()[1:]]
            instance = MigInstance(uuid=mig[1], gpu_instance=ids[0], compute_instance=ids[1])
            gpu = found[gpu.index] = replace(gpu, mig=(*(gpu.mig or ()), instance))
    for gpu in found.values():
        if gpu.uuid and gpu.uuid.lower() in uuids:
            message = f"two GPUs have the UUID of GPU {gpu.index}"
            paste.note("contradiction", f"{message}; it is left out")
            found[gpu.index] = replace(gpu, uuid=None)
        uuids.add((gpu.uuid or "").lower())
    return found


def _listed(line: str) -> Gpu | None:
    match = _LISTED.match(line)
    name, has_uuid, uuid = (match[2] if match else "").partition("(UUID:")
    if match is None or (not has_uuid and not _MAKER.match(name)):
        return None
    uuid = uuid.strip(" \t)")
    known = uuid if _UUID.fullmatch(uuid) else None
    return Gpu(index=int(match[1]), name=name.strip()[:100] or None, uuid=known)
