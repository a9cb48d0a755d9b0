"""The GPUs, put together from the table, the list, and what is known of the CPUs.

The list "CPU Affinity" is printed for people: nvidia-smi cuts it after six entries (case A25).
What looks cut counts only with the NUMA nodes' own lists at hand, whose node is then taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.topology.model import Gpu, NumaNode, Source
from gpuaff.topology.pasted.cpus import Machine
from gpuaff.topology.pasted.nvidia_smi import Listed, Row, Table
from gpuaff.topology.pasted.text import Reading

_PRINTED = 6
"""After so many entries nvidia-smi ends a list."""

_MOST = 256
"""How many GPUs a machine may have."""

_NOTES = {
    "affinity-unknown": "the CPUs near {} are not told: add the whole output of "
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


def cpu_lists(reading: Reading, table: Table) -> frozenset[CpuSet]:
    """The different lists of CPUs in the table's cells, cut ones included."""
    cells = (reading.cpulist(row.cpu) for row in table.rows.values())
    return frozenset(cell for cell in cells if cell)


def assemble(
    reading: Reading, table: Table, listed: Mapping[int, Listed], machine: Machine
) -> tuple[Gpu, ...]:
    """Every GPU that the text names, those of which it tells no more than that included.

    Raises:
        TopologyError: it names more GPUs than any machine has.
    """
    placer = _Placer(reading, table, machine)
    indices = sorted({*table.gpus, *listed})
    if len(indices) > _MOST:
        raise reading.error(f"it names {len(indices)} GPUs: not one machine's")
    gpus = tuple(
        placer.place(index, table.rows.get(index, Row()), listed.get(index)) for index in indices
    )
    for code, numbers in placer.doubts.items():
        reading.note(code, _NOTES[code].format(f"GPU {format_cpulist(numbers)}"))
    _note_lacks(reading, table, gpus)
    return gpus


def links(
    reading: Reading, table: Table, gpus: tuple[Gpu, ...]
) -> tuple[tuple[str, ...], ...] | None:
    """The matrix of links between these GPUs; None unless every row is whole."""
    names = [f"GPU{gpu.index}" for gpu in gpus]
    rows = [table.rows.get(gpu.index, Row()).links for gpu in gpus]
    whole = all(
        row.get(own) == "X" and row.keys() >= set(names)
        for own, row in zip(names, rows, strict=True)
    )
    if gpus and not whole:
        reading.note(
            "links-unknown",
            "how the GPUs are connected is not told for all of them: add `nvidia-smi topo -m`, "
            "whole",
        )
    return tuple(tuple(row[name] for name in names) for row in rows) if gpus and whole else None


def _note_lacks(reading: Reading, table: Table, gpus: tuple[Gpu, ...]) -> None:
    missing = set(table.gpus) - table.rows.keys()
    if missing:
        reading.note(
            "rows-missing",
            f"the table's header names GPU {format_cpulist(missing)} but has no row for it: cut?",
        )
    if not gpus:
        reading.note("no-gpus", "no NVIDIA GPU is told of: add `nvidia-smi topo -m`")
    elif any(gpu.uuid is None for gpu in gpus):
        reading.note("uuids-unknown", "the UUIDs of the GPUs are not told: add `nvidia-smi -L`")


class _Placer:
    """Finds where each GPU sits, and gathers what is doubtful about it.

    Attributes:
        doubts: the GPUs for each kind of doubt.
    """

    def __init__(self, reading: Reading, table: Table, machine: Machine) -> None:
        self._reading = reading
        self._machine = machine
        self._nodes = {node.id: node for node in machine.nodes or ()}
        named = frozenset().union(*cpu_lists(reading, table))
        self._all_named = machine.told and named == machine.cpus
        self._memory_nodes = {_number(row.gpu_numa) for row in table.rows.values()}
        self.doubts: dict[str, set[int]] = {}

    def place(self, index: int, row: Row, listed: Listed | None) -> Gpu:
        """The GPU with this index."""
        named = self._read(index, row.cpu)
        numa_node = self._node(index, self._read(index, row.numa), named or frozenset())
        near = self._near(index, row.cpu, named) if named else None
        numa_node, near = self._agree(index, numa_node, near)
        known = numa_node in self._nodes or near is not None
        if not known and index not in self.doubts.get("affinity-cut", ()):
            self._doubt("affinity-unknown", index)
        return Gpu(
            index=index,
            uuid=listed.uuid if listed else None,
            name=listed.name if listed else None,
            node_cpus=near,
            numa_node=numa_node,
            memory_node=_number(row.gpu_numa),
            source=Source.GIVEN if near or numa_node is not None else None,
            mig=listed.mig if listed else None,
        )

    def _doubt(self, code: str, index: int) -> None:
        self.doubts.setdefault(code, set()).add(index)

    def _read(self, index: int, cell: str) -> CpuSet | None:
        """The ids in a cell; None when it is empty or unreadable."""
        ids = self._reading.cpulist(cell) if cell else None
        if cell and not ids:
            self._doubt("cell-unreadable", index)
        return ids or None

    def _node(self, index: int, ids: CpuSet | None, named: CpuSet) -> int | None:
        """The one node among these that has CPUs (cases A9, A10, A24)."""
        if not ids:
            return None
        if self._nodes:
            found = {id_ for id_ in ids if id_ in self._nodes and self._nodes[id_].cpus}
            if len(found) > 1:
                found = {id_ for id_ in found if named and named <= self._nodes[id_].cpus}
            elif not found:
                self._doubt("node-dropped", index)
                return None
        else:
            found = set(ids - self._memory_nodes)
        if len(found) != 1:
            self._doubt("numa-ambiguous", index)
            return None
        return found.pop()

    def _near(self, index: int, cell: str, named: CpuSet) -> CpuSet | None:
        if self._looks_cut(cell):
            holder = self._holder(named)
            if holder is None:
                self._doubt("affinity-cut", index)
            return holder.cpus if holder else None
        if self._machine.told and not named <= self._machine.cpus:
            self._doubt("ids-dropped", index)
        return named & self._machine.cpus or None

    def _looks_cut(self, cell: str) -> bool:
        return not self._all_named and looks_cut(cell)

    def _holder(self, cpus: CpuSet) -> NumaNode | None:
        return next((node for node in self._nodes.values() if cpus <= node.cpus), None)

    def _agree(
        self, index: int, numa_node: int | None, near: CpuSet | None
    ) -> tuple[int | None, CpuSet | None]:
        """Node and CPUs, if they belong together; else the node alone, with its own CPUs."""
        node = self._nodes.get(numa_node) if numa_node is not None else None
        if node is None or near is None or near & node.cpus:
            return numa_node, near
        self._doubt("contradiction", index)
        return numa_node, None


def looks_cut(cell: str) -> bool:
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


def _number(cell: str) -> int | None:
    return int(cell) if cell.isascii() and cell.isdigit() and len(cell) < 6 else None
