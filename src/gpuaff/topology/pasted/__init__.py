"""Topologies from text that was pasted into bug reports.

Recognized are ``nvidia-smi topo -m``, ``nvidia-smi -L``, ``lscpu``, ``lscpu -p``, ``lscpu -e`` and
``numactl -H``, in English, in any mix and order; other lines are ignored. A paste is often cut, and
a command often missing: what the text does not contain stays None, and a note names the command
whose output would; what may be wrong is not used.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from gpuaff._system.nvml_records import Matrix
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.formatting import counted
from gpuaff.options import natural
from gpuaff.topology.model import Gpu, Source, Topology
from gpuaff.topology.pasted.lscpu import read_machine
from gpuaff.topology.pasted.nvidia_smi import Row, read_list, read_table
from gpuaff.topology.pasted.text import Paste

_PRINTED = 6
"""nvidia-smi ends a list of CPUs after so many entries (case A25)."""

_MOST_GPUS = 256

_ROCM = re.compile(
    r"^(?:GPU\[\d{1,3}\]\s{0,20}:|ROCm System Management|AMD-SMI |CPU_CORES_AFFINITY:)",
    re.ASCII | re.MULTILINE,
)

_NOTES = {
    "affinity-unknown": "the CPUs near {} are unknown: add the whole output of "
    "`nvidia-smi topo -m` and of `lscpu`",
    "affinity-cut": "the CPU list of {} looks cut after six entries, as nvidia-smi does with odd "
    "and even numbering: add the output of `lscpu`, whose list of the NUMA node is whole",
    "cell-glued": "the cells of {} ran into each other and are not used: paste the table with its "
    "tabs",
    "cell-unreadable": "the affinity of {} cannot be read: cut in the middle?",
    "ids-dropped": "the table names CPUs near {} that this machine does not have; left out",
    "node-dropped": "the table names a NUMA node for {} that has no CPUs by the rest of the text",
    "numa-ambiguous": "the table names several NUMA nodes for {} and not which has its CPUs: add "
    "the output of `lscpu`",
    "contradiction": "the CPUs and the NUMA node of {} do not belong together by the rest of the "
    "text, which counts",
    "rows-missing": "the table's header names {} but has no row for it: cut?",
}


def parse(text: str, *, name: str = "pasted text") -> Topology:
    """Parse pasted text.

    Args:
        text: what was pasted.
        name: what errors call it, e.g. the path of the file.

    Raises:
        TopologyError: it describes neither CPUs nor NVIDIA GPUs, or it is far larger than what
            those commands print (4 MiB, 2 million CPU ids or 256 GPUs).
    """
    paste = Paste(text, name)
    if _ROCM.search(paste.text):
        message = "the output of rocm-smi or amd-smi is ignored: only NVIDIA's tools are read"
        paste.note("rocm-ignored", message)
    (named, rows), listed = read_table(paste), read_list(paste)
    near = frozenset(filter(None, (paste.cpulist(row.cpu) for row in rows.values())))
    machine, is_complete = read_machine(paste, near)
    indices = sorted({*named, *listed})
    if not (machine.cpus or indices):
        why = "".join(f"{note.message}; " for note in paste.notes if "unknown" not in note.code)
        lines = counted(text.count("\n") + (not text.endswith("\n")), "line")
        add = "paste the output of `nvidia-smi topo -m` and of `LC_ALL=C lscpu`, whole"
        raise paste.error(f"no CPU and no NVIDIA GPU in it ({lines}); {why}{add}")
    if len(indices) > _MOST_GPUS:
        raise paste.error(f"it names {len(indices)} GPUs: not one machine's")
    placer = _Placer(paste, rows, machine, is_complete)
    placer.doubts["rows-missing"].update(named - rows.keys())
    gpus = tuple(placer.gpu(listed.get(index, Gpu(index=index))) for index in indices)
    for code, doubtful in placer.doubts.items():
        if doubtful:
            paste.note(code, _NOTES[code].format(f"GPU {format_cpulist(doubtful)}"))
    if not gpus:
        paste.note("no-gpus", "there is no NVIDIA GPU in it: add `nvidia-smi topo -m`")
    elif any(gpu.uuid is None for gpu in gpus):
        paste.note("uuids-unknown", "the UUIDs of the GPUs are unknown: add `nvidia-smi -L`")
    links = _links([rows.get(index, Row()) for index in indices], indices)
    if gpus and not links:
        message = "the connections of some GPUs are unknown: add `nvidia-smi topo -m`, whole"
        paste.note("links-unknown", message)
    visible = tuple(indices)
    return replace(machine, gpus=gpus, links=links, visible=visible, notes=tuple(paste.notes))


def _links(rows: list[Row], indices: list[int]) -> Matrix | None:
    """The matrix of links between these GPUs; None unless every row is whole."""
    names = [f"GPU{index}" for index in indices]
    pairs = zip(names, rows, strict=True)
    if all(row.links.get(own) == "X" and row.links.keys() >= set(names) for own, row in pairs):
        return tuple(tuple(row.links[name] for name in names) for row in rows) or None
    return None


class _Placer:
    """Finds where each GPU sits.

    Attributes:
        doubts: the GPUs for each code of :data:`_NOTES`.
    """

    def __init__(
        self, paste: Paste, rows: Mapping[int, Row], machine: Topology, is_complete: bool
    ) -> None:
        self._paste, self._rows, self._cpus = paste, rows, machine.cpus
        self._is_complete = is_complete
        lists = filter(None, (paste.cpulist(row.cpu) for row in rows.values()))
        self._are_all_named = is_complete and frozenset().union(*lists) == machine.cpus
        self._nodes = {node.id: node.cpus for node in machine.numa_nodes or ()}
        self._memory_nodes = {natural(row.gpu_numa) for row in rows.values()}
        self.doubts: dict[str, set[int]] = defaultdict(set)

    def gpu(self, listed: Gpu) -> Gpu:
        """A GPU as it is listed, with its place."""
        index = listed.index
        row = self._rows.get(index, Row())
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
        ids = self._paste.cpulist(cell) if cell else None
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
