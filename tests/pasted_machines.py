"""What people pasted, what each figure was read from, and the plans that follow.

All of it was worked out by hand from the files in ``data/pastes``: ``data/topologies`` has the
machines, ``data/pasted_plans.json`` the plans and where the table's figures stand.

Unless ``why`` says otherwise the plans follow from one rule: the cores near a GPU, ascending, are
cut into as many blocks as there are GPUs with the same list. Lists that are two equal runs of CPUs,
all at one distance d, tell that the cores are i and i + d; where nothing tells which CPUs share a
core, each counts as one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

DATA = Path(__file__).parent / "data"


class Cells(NamedTuple):
    """Where the figures of GPUs were read: lines of the paste, one after another.

    Attributes:
        line: the number of the first GPU's line in the file, from 1.
        first: that GPU.
        gpus: how many GPUs this and the following lines have.
        cpu: the cell "CPU Affinity" of each.
        numa: the cell "NUMA Affinity"; None where there is no such column.
        gpu_numa: the cell "GPU NUMA ID"; None where there is no such column.
    """

    line: int
    first: int
    gpus: int
    cpu: str
    numa: str | None
    gpu_numa: str | None


class Pasted(NamedTuple):
    """One file: its name without the suffix, the cells, and the cpulists of each plan's ranks."""

    name: str
    cells: list[Cells]
    plans: list[list[str]]
    unbalanced: list[list[str]]

    @property
    def text(self) -> str:
        return (DATA / "pastes" / f"{self.name}.txt").read_text("utf-8")

    @property
    def saved_path(self) -> Path:
        return DATA / "topologies" / f"{self.name}.json"

    @property
    def saved(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.saved_path.read_text("utf-8"))
        return found


MACHINES = [
    Pasted(
        name,
        [Cells(*cells) for cells in found["cells"]],
        found["plans"],
        found.get("unbalanced", []),
    )
    for name, found in json.loads((DATA / "pasted_plans.json").read_text("utf-8")).items()
]
