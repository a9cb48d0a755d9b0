"""Topologies from text that was pasted into bug reports.

Recognized are ``nvidia-smi topo -m``, ``nvidia-smi -L``, ``lscpu``, ``lscpu -p``, ``lscpu -e`` and
``numactl -H``, in English, in any mix and order, with any white space, quoting and escape codes;
other lines are ignored. A paste is often cut, and a command often missing: what the text does not
contain stays None, and a note names the command whose output would; what may be wrong is not used.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

from gpuaff._system.nvml_records import Matrix
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.formatting import counted
from gpuaff.options import natural
from gpuaff.topology.model import Gpu, Source, Topology
from gpuaff.topology.pasted.cpus import assemble
from gpuaff.topology.pasted.nvidia_smi import Row, Rows, read_list, read_table
from gpuaff.topology.pasted.text import Paste

_PRINTED = 6
"""nvidia-smi ends a list of CPUs after so many entries (case A25)."""

_MOST_GPUS = 256
_NO_ROW = Row({})

_ROCM = re.compile(
    r"^(?:GPU\[\d{1,3}\]\s{0,20}:|ROCm System Management|AMD-SMI |CPU_CORES_AFFINITY:)",
    re.ASCII | re.MULTILINE,
)

_NOTES = {
    "affinity-unknown": "the CPUs near {} are unknown: add the whole output of "
    "`nvidia-smi topo -m` and of `lscpu`",
    "affinity-cut": "the CPU list of {} looks cut after six entries, as nvidia-smi does with odd "
    "and even numbering: add the output of `lscpu`, whose list of the NUMA node is whole",
    "cell-unreadable": "the affinity of {} cannot be read: cut in the middle?",
    "ids-dropped": "the table names CPUs near {} that this machine does not have; left out",
    "node-dropped": "the table names a NUMA node for {} that has no CPUs by the rest of the text",
    "numa-ambiguous": "the table names several NUMA nodes for {} and not which has its CPUs: add "
    "the output of `lscpu`",
    "contradiction": "the CPUs and the NUMA node of {} do not belong together by the rest of the "
    "text, which counts",
}


def parse(text: str, *, name: str = "pasted text") -> Topology:
    """Parse pasted text.

    Args:
        text: what was pasted.
        name: what errors call it, e.g. the path of the file.

    Raises:
        TopologyError: it describes neither CPUs nor NVIDIA GPUs, or it is far larger than what
            those commands print (4 MiB, 200 000 lines, 10 000 of them a table's, 2 million CPU
            ids or 256 GPUs).
    """
    paste = Paste(text, name)
    is_rocm = bool(_ROCM.search(paste.text))
    (named, rows), listed = read_table(paste), read_list(paste)
    near = frozenset(filter(None, (paste.cpulist(row.affinity[0]) for row in rows.values())))
    machine, is_complete = assemble(paste, near)
    if not (machine.cpus or named or listed):
        raise paste.error(_nothing_found(paste, is_rocm=is_rocm))
    indices = sorted({*named, *listed})
    if len(indices) > _MOST_GPUS:
        raise paste.error(f"it names {len(indices)} GPUs: not one machine's")
    placer = _Placer(paste, rows, machine, is_complete)
    gpus = tuple(placer.gpu(listed.get(index, Gpu(index=index))) for index in indices)
    for code, doubtful in placer.doubts.items():
        paste.note(code, _NOTES[code].format(f"GPU {format_cpulist(doubtful)}"))
    _note_missing(paste, named - rows.keys(), gpus)
    links = _links(paste, rows, gpus)
    if is_rocm:
        paste.note(
            "rocm-ignored",
            "the output of rocm-smi or amd-smi is ignored: only that of NVIDIA's tools is used",
        )
    visible = tuple(gpu.index for gpu in gpus)
    return replace(machine, gpus=gpus, links=links, visible=visible, notes=tuple(paste.notes))


def _nothing_found(paste: Paste, *, is_rocm: bool) -> str:
    translated = [note.message for note in paste.notes if note.code == "lscpu-translated"]
    if translated:
        return translated[0]
    found = "only AMD's GPUs are in it" if is_rocm else "no CPU and no NVIDIA GPU in it"
    count = len(paste.lines) - (paste.cut_line < 0)  # nothing follows the last newline
    add = "paste the output of `nvidia-smi topo -m` and of `lscpu`, whole"
    return f"{found} ({counted(count, 'line')}); {add}"


def _note_missing(paste: Paste, without_row: set[int], gpus: tuple[Gpu, ...]) -> None:
    if without_row:
        missing = format_cpulist(without_row)
        message = f"the table's header names GPU {missing} but has no row for it: cut?"
        paste.note("rows-missing", message)
    if not gpus:
        paste.note("no-gpus", "there is no NVIDIA GPU in it: add `nvidia-smi topo -m`")
    elif any(gpu.uuid is None for gpu in gpus):
        paste.note("uuids-unknown", "the UUIDs of the GPUs are unknown: add `nvidia-smi -L`")


def _links(paste: Paste, rows: Rows, gpus: tuple[Gpu, ...]) -> Matrix | None:
    """The matrix of links between these GPUs; None unless every row is whole."""
    names = [f"GPU{gpu.index}" for gpu in gpus]
    links = [rows.get(gpu.index, _NO_ROW).links for gpu in gpus]
    pairs = zip(names, links, strict=True)
    if gpus and all(row.get(own) == "X" and row.keys() >= set(names) for own, row in pairs):
        return tuple(tuple(row[name] for name in names) for row in links)
    if gpus:
        message = "the connections of some GPUs are unknown: add `nvidia-smi topo -m`, whole"
        paste.note("links-unknown", message)
    return None


class _Placer:
    """Finds where each GPU sits.

    Attributes:
        doubts: the GPUs for each code of :data:`_NOTES`.
    """

    def __init__(self, paste: Paste, rows: Rows, machine: Topology, is_complete: bool) -> None:
        self._paste, self._rows, self._cpus = paste, rows, machine.cpus
        self._is_complete = is_complete
        lists = filter(None, (paste.cpulist(row.affinity[0]) for row in rows.values()))
        self._are_all_named = is_complete and frozenset().union(*lists) == machine.cpus
        self._nodes = {node.id: node.cpus for node in machine.numa_nodes or ()}
        self._memory_nodes = {natural(row.affinity[2]) for row in rows.values()}
        self.doubts: dict[str, set[int]] = defaultdict(set)

    def gpu(self, listed: Gpu) -> Gpu:
        """A GPU as it is listed, with its place."""
        index = listed.index
        cpu, numa, gpu_numa = self._rows.get(index, _NO_ROW).affinity
        named = self._ids(index, cpu)
        numa_node = self._node(index, self._ids(index, numa), named)
        near = self._near(index, cpu, named) if named else None
        of_node = None if numa_node is None else self._nodes.get(numa_node)
        if of_node is not None and near is not None and near.isdisjoint(of_node):
            self.doubts["contradiction"].add(index)
            near = None
        is_known = of_node is not None or near is not None
        if not is_known and index not in self.doubts.get("affinity-cut", ()):
            self.doubts["affinity-unknown"].add(index)
        return replace(
            listed,
            node_cpus=near,
            numa_node=numa_node,
            memory_node=natural(gpu_numa),
            source=Source.GIVEN if near or numa_node is not None else None,
        )

    def _ids(self, index: int, cell: str) -> CpuSet:
        """The ids in a cell; none when it is empty or unreadable."""
        ids = self._paste.cpulist(cell) if cell else None
        if cell and not ids:
            self.doubts["cell-unreadable"].add(index)
        return ids or frozenset()

    def _node(self, index: int, ids: CpuSet, named: CpuSet) -> int | None:
        """The one node among these that has CPUs (cases A9, A10, A24)."""
        if not ids:
            return None
        found = {id_ for id_ in ids if self._nodes.get(id_)} if self._nodes else set(ids)
        if not found:
            self.doubts["node-dropped"].add(index)
            return None
        if not self._nodes:
            found -= self._memory_nodes
        elif len(found) > 1:
            found = {id_ for id_ in found if named and named <= self._nodes[id_]}
        if len(found) != 1:
            self.doubts["numa-ambiguous"].add(index)
            return None
        return found.pop()

    def _near(self, index: int, cell: str, named: CpuSet) -> CpuSet | None:
        """The CPUs near it that the machine has; of a list that looks cut, its node's."""
        if _looks_cut(cell) and not self._are_all_named:
            holders = [node for node in self._nodes.values() if named <= node]
            if not holders:
                self.doubts["affinity-cut"].add(index)
            return holders[0] if holders else None
        if self._is_complete and not named <= self._cpus:
            self.doubts["ids-dropped"].add(index)
        return named & self._cpus or None


def _looks_cut(cell: str) -> bool:
    """Whether a list may have been cut: six entries of one length at one distance.

    Whole lists of that form are rare (a socket of six single-threaded cores, numbered by turns);
    a list of seven shows that this nvidia-smi does not cut.
    """
    if ":" in cell:
        return False
    entries = [[int(id_) for id_ in entry.split("-")] for entry in cell.split(",")]
    lengths = {entry[-1] - entry[0] for entry in entries}
    gaps = {after[0] - before[0] for before, after in pairwise(entries)}
    return len(entries) == _PRINTED and len(lengths) == 1 and len(gaps) == 1 and min(gaps) > 1
