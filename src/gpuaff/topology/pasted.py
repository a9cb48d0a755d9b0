"""Topologies from text that was pasted into bug reports.

Recognized are ``nvidia-smi topo -m``, ``nvidia-smi -L``, ``lscpu``, ``lscpu -p``, ``lscpu -e`` and
``numactl -H``, in English, in any mix and order; other lines are ignored. What the text does not
contain stays None, and a note names the command whose output would; what may be wrong is not used.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise, takewhile
from typing import NamedTuple, TypeVar

from gpuaff._system.nvml_records import Matrix
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.errors import TopologyError
from gpuaff.formatting import one_line
from gpuaff.notices import Notice
from gpuaff.options import natural
from gpuaff.topology.lscpu import read_cpulist, read_machine
from gpuaff.topology.model import Gpu, MigInstance, Source, Topology

MAX_CHARS = 4 << 20
_LONGEST = 400

_COLOURS = re.compile(r"\x1b?\[[0-9;]{0,20}m", re.ASCII)
"""nvidia-smi underlines its header; some pastes have lost the escape character."""

_PLAIN = str.maketrans({"\r": "\n", "|": "\t", "\xa0": " ", "\0": None, "\ufeff": None})
_MARKS = " \t#>*/`"
"""What stands around a line that was quoted, indented, put into a comment or a code fence."""

_HEADER = re.compile(r"(GPU\d{1,3}(?:\s+[A-Za-z][\w.:-]{0,39}\d)*)\s+CPU\b(.{0,200})", re.ASCII)
_LINK = re.compile(r"X|NV\d{1,3}|SYS|SOC|NODE|PHB|PXB|PIX|PSB|C2C", re.ASCII)
"""How two devices are connected. ROCm's tables have the same shape and other words."""

_ROW = re.compile(rf"GPU(\d{{1,3}})(?!.*\b(?:OK|.?NS)\b)\s+(?:{_LINK.pattern})\b.*", re.ASCII)
"""Not one of ``nvidia-smi topo -p2p``, which prints OK, NS, CNS and the like."""


_LISTED = re.compile(r"GPU\s{1,4}(\d{1,3}):\s*(.*)", re.ASCII)
_MAKER = re.compile(r"(?:NVIDIA|Tesla|GeForce|Quadro|TITAN|GRID)\b", re.ASCII)
"""How names begin in lists without UUIDs: PyTorch's and vLLM's environment reports."""

_HEX = r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}"
_UUID = re.compile(f"GPU-{_HEX}", re.ASCII)
_MIG = re.compile(
    rf"MIG\s.{{0,60}}?\(UUID:\s?(MIG-(?:{_HEX}|GPU-{_HEX}/(\d{{1,3}})/(\d{{1,3}})))\)", re.ASCII
)
"""A MIG instance. Since driver 470 its UUID does not contain its ids."""

_WHOLE_TABLE = "`nvidia-smi topo -m`, whole"

_ROCM = re.compile(
    r"(?am)^(?:GPU\[\d{1,3}\]\s{0,20}:|ROCm System Management|AMD-SMI |CPU_CORES_AFFINITY:)"
)

_NOTES = {
    "affinity-unknown": "the CPUs near {} are unknown: add all of `nvidia-smi topo -m` and `lscpu`",
    "affinity-cut": "the CPU list of {} looks cut after six entries: add `lscpu`, which has it all",
    "cell-glued": "the cells of {} ran into each other and are not used: paste it with its tabs",
    "cell-unreadable": "the affinity of {} cannot be read: cut in the middle?",
    "contradiction": "the CPUs and the NUMA node of {} do not fit; the rest of the text counts",
    "ids-dropped": "the table names CPUs near {} that this machine does not have; left out",
    "node-dropped": "the NUMA node of {} in the table has no CPUs by the rest of the text",
    "numa-ambiguous": "which of the NUMA nodes of {} in the table has CPUs is unknown: add `lscpu`",
    "rows-missing": "the table's header names {} but has no row for it: cut?",
}
"""What is said of GPUs, by the codes of the notes."""

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Paste:
    """One text, without escape codes, marks and empty lines, and the notes about it."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_CHARS:
            raise self.error(f"{len(text)} characters are more than {MAX_CHARS}; cut out the part")
        valid = text.encode("utf-8", "replace").decode("utf-8")
        plain = _COLOURS.sub("", valid).translate(_PLAIN)
        self.lines = [*filter(None, (line.strip(_MARKS) for line in plain.split("\n")))]
        self.text = "\n".join(self.lines)
        self.notes: dict[Notice, None] = {}

    def note(self, code: str, message: str, *, add: str = "") -> None:
        """Add a note, once; ``add`` is the command whose output has what is missing."""
        message += f": add the output of {add}" if add else ""
        self.notes[Notice(code, one_line(message, _LONGEST))] = None

    def error(self, problem: str) -> TopologyError:
        """The error that says why this text is refused."""
        return TopologyError("pasted text", problem)

    def keep(self, found: dict[_Key, _Value], key: _Key, value: _Value, what: str) -> None:
        """Keep the first value that the text has for a key; another one is a contradiction."""
        if found.setdefault(key, value) != value:
            self.note("contradiction", f"{what} are there twice, and differ; the first counts")


def parse(text: str) -> Topology:
    """Parse pasted text, as :meth:`gpuaff.Topology.parse` does."""
    paste = Paste(text)
    if _ROCM.search(paste.text):
        paste.note("rocm-ignored", "the output of rocm-smi or amd-smi is ignored: not NVIDIA's")
    (named, whole), listed = _read_table(paste), _read_list(paste)
    near = frozenset(filter(None, (read_cpulist(row.cpu) for row in whole.values())))
    machine = read_machine(paste, near)
    rows = {index: whole.get(index, _Row()) for index in sorted({*named, *listed})}
    if not (machine.cpus or rows):
        why = "".join(f"{note.message}; " for note in paste.notes if "unknown" not in note.code)
        add = "paste the output of `nvidia-smi topo -m` and of `LC_ALL=C lscpu`, whole"
        raise paste.error(f"no CPU and no NVIDIA GPU in it; {why}{add}")
    placer = _Placer(rows, machine)
    placer.doubts["rows-missing"].update(named - whole.keys())
    gpus = tuple(placer.gpu(listed.get(index, Gpu(index=index)), rows[index]) for index in rows)
    for code, doubtful in placer.doubts.items():
        if doubtful:
            paste.note(code, _NOTES[code].format(f"GPU {format_cpulist(doubtful)}"))
    if not gpus:
        paste.note("no-gpus", "there is no NVIDIA GPU in it", add="`nvidia-smi topo -m`")
    elif any(gpu.uuid is None for gpu in gpus):
        paste.note("uuids-unknown", "the UUIDs of the GPUs are unknown", add="`nvidia-smi -L`")
    links = _links(rows)
    if gpus and not links:
        paste.note("links-unknown", "the connections of some GPUs are unknown", add=_WHOLE_TABLE)
    return replace(machine, gpus=gpus, links=links, visible=tuple(rows), notes=tuple(paste.notes))


def _links(rows: Mapping[int, _Row]) -> Matrix | None:
    """The matrix of links between these GPUs; None unless every row is whole."""
    by_name = {f"GPU{index}": row.links for index, row in rows.items()}
    if all(row.keys() >= by_name.keys() and row[own] == "X" for own, row in by_name.items()):
        return tuple(tuple(row[name] for name in by_name) for row in by_name.values()) or None
    return None


class _Placer:
    """Finds where each GPU sits; ``doubts`` has the GPUs for each code of :data:`_NOTES`."""

    def __init__(self, rows: Mapping[int, _Row], machine: Topology) -> None:
        self._cpus = machine.cpus
        self._nodes = {node.id: node.cpus for node in machine.numa_nodes or ()}
        self._memory_nodes = {natural(row.gpu_numa) for row in rows.values()}
        self.doubts: dict[str, set[int]] = defaultdict(set)

    def gpu(self, listed: Gpu, row: _Row) -> Gpu:
        """A GPU as it is listed, with its place."""
        index = listed.index
        named = self._ids(index, row.cpu)
        numa_node = self._node(index, self._ids(index, row.numa), named)
        near = self._near(index, row.cpu, named) if named else None
        of_node = self._nodes.get(-1 if numa_node is None else numa_node)
        if of_node is not None and near is not None and near.isdisjoint(of_node):
            self.doubts["contradiction"].add(index)
            near = None
        if of_node is None and near is None and index not in self.doubts["affinity-cut"]:
            self.doubts["affinity-unknown"].add(index)
        return replace(
            listed,
            node_cpus=near,
            numa_node=numa_node,
            memory_node=natural(row.gpu_numa),
            source=Source.GIVEN if near or numa_node is not None else None,
        )

    def _ids(self, index: int, cell: str) -> CpuSet:
        """The ids in a cell; none when it is empty or unreadable."""
        ids = read_cpulist(cell)
        if cell and not ids:
            self.doubts["cell-glued" if "N/A" in cell else "cell-unreadable"].add(index)
        return ids or frozenset()

    def _node(self, index: int, ids: CpuSet, named: CpuSet) -> int | None:
        """The one node among these that has CPUs, or whose list is missing (A9, A10, A24)."""
        if not ids:
            return None
        found = {id_ for id_ in ids if self._nodes.get(id_, True)}
        if not found:
            self.doubts["node-dropped"].add(index)
            return None
        if not self._nodes:
            found -= self._memory_nodes
        elif len(found) > 1:
            found = {id_ for id_ in found if named and named <= self._nodes.get(id_, frozenset())}
        if len(found) != 1:
            self.doubts["numa-ambiguous"].add(index)
            return None
        return found.pop()

    def _near(self, index: int, cell: str, named: CpuSet) -> CpuSet | None:
        """The CPUs near it that the machine has; of a list that looks cut, its node's."""
        if _looks_cut(cell):
            holders = [node for node in self._nodes.values() if named <= node]
            if not holders:
                self.doubts["affinity-cut"].add(index)
            return holders[0] if holders else None
        if not named <= self._cpus:
            self.doubts["ids-dropped"].add(index)
        return named & self._cpus or None


def _looks_cut(cell: str) -> bool:
    """Whether nvidia-smi may have cut a list: six entries of one length at one distance (A25)."""
    # Whole lists of that form are rare: a socket of six cores with a thread each, by turns.
    if ":" in cell:
        return False
    entries = [[int(id_) for id_ in entry.split("-")] for entry in cell.split(",")]
    lengths = {entry[-1] - entry[0] for entry in entries}
    gaps = {after[0] - before[0] for before, after in pairwise(entries)}
    return len(entries) == 6 and len(lengths) == 1 and len(gaps) == 1 and min(gaps) > 1


# ---- ``nvidia-smi topo -m`` and ``nvidia-smi -L`` ----------------------------------------------

# A row of the table has as many words for links as the header names devices, then the cells of
# affinity. nvidia-smi prints "GPU NUMA ID", and every N/A, one tab too far to the right, and lists
# "NUMA Affinity" as nodes and ranges of nodes (case A24). Where tabs became blanks an empty cell
# leaves no trace: what could then stand in two columns is not used.


class _Row(NamedTuple):
    """The row of one GPU: its links by device, and the cells of affinity."""

    links: Mapping[str, str] = {}  # empty where the row is not whole
    cpu: str = ""  # a cell is empty when it is missing or N/A
    numa: str = ""
    gpu_numa: str = ""


def _read_table(paste: Paste) -> tuple[set[int], Mapping[int, _Row]]:
    """The table of ``nvidia-smi topo -m``: the GPUs that it names, and the rows by GPU."""
    headers = [header for line in paste.lines if (header := _HEADER.fullmatch(line))]
    found = [row for line in paste.lines if (row := _ROW.fullmatch(line))]
    if not headers:
        if found:
            paste.note("header-missing", "rows without a header are not used", add=_WHOLE_TABLE)
        return set(), {}
    lines = {int(row[1]): row[0] for row in found}
    if len({header[0] for header in headers}) > 1 or len({row[0] for row in found}) > len(lines):
        raise paste.error("tables of `nvidia-smi topo -m` differ: paste that of one machine, whole")
    devices = headers[0][1].split()
    columns = 1 + sum(name in headers[0][2] for name in ("NUMA Aff", "GPU NUMA"))
    rows = {gpu: _row(line, devices, columns) for gpu, line in lines.items()}
    for gpu in rows:
        if not rows[gpu].links:
            paste.note("row-cut", f"the row of GPU {gpu} is cut and not used", add=_WHOLE_TABLE)
    named = {int(name[3:]) for name in devices if re.fullmatch(r"GPU\d{1,3}", name)}
    return named | lines.keys(), rows


def _row(line: str, devices: Sequence[str], columns: int) -> _Row:
    """A row of the table; an empty one where it is not whole."""
    count = len(devices)
    # Cells are separated by tabs, where an empty one counts, and blanks.
    cells = [word for cell in line.split("\t") for word in (cell.split() or [""])][1:]
    links = [*takewhile(_LINK.fullmatch, cells[:count])]
    is_filled = sum(map(bool, cells)) >= count + columns
    # A row that ends with N/A is whole: its empty cells left no trace.
    if len(links) < count or not (is_filled or cells[-1].endswith("N/A")):
        return _Row()
    cpu, *rest = cells[count:]
    is_cpus = "\t" in line or cpu == "N/A" or "-" in cpu or "," in cpu
    if not is_cpus and len(rest) + 1 < columns:  # a lone number may be a node as well
        cpu, rest = "", [cpu, *rest]
    numa, gpu_numa, *_ = [*filter(None, rest), "", ""]
    affinity = ["" if cell == "N/A" else cell for cell in (cpu, numa, gpu_numa)]
    return _Row(dict(zip(devices, links, strict=True)), *affinity)


def _read_list(paste: Paste) -> Mapping[int, Gpu]:
    """The GPUs of ``nvidia-smi -L``: name, UUID and MIG instances, as far as they are listed."""
    found: dict[int, Gpu] = {}
    instances: dict[int, dict[str, MigInstance]] = defaultdict(dict)
    index = -1
    for line in paste.lines:
        if gpu := _listed(line):
            index = gpu.index
            paste.keep(found, index, gpu, f"lines for GPU {index}")
        elif index >= 0 and (mig := _MIG.match(line)):
            ids = [-1 if number is None else int(number) for number in mig.groups()[1:]]
            instance = MigInstance(uuid=mig[1], gpu_instance=ids[0], compute_instance=ids[1])
            instances[index].setdefault(mig[1].lower(), instance)
    uuids = [gpu.uuid.lower() for gpu in found.values() if gpu.uuid]
    uuids += chain.from_iterable(instances.values())
    if len(set(uuids)) < len(uuids):
        raise paste.error("a UUID is at two GPUs: paste the output of one machine")
    return {
        index: replace(gpu, mig=tuple(instances[index].values()) or None)
        for index, gpu in found.items()
    }


def _listed(line: str) -> Gpu | None:
    match = _LISTED.match(line)
    name, has_uuid, uuid = (match[2] if match else "").partition("(UUID:")
    if match is None or (not has_uuid and not _MAKER.match(name)):
        return None
    uuid = uuid.strip(" \t)")
    known = uuid if _UUID.fullmatch(uuid) else None
    return Gpu(index=int(match[1]), name=name.strip()[:100] or None, uuid=known)
