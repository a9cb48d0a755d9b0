"""What was pasted (``data/pastes``), and the machines and plans that follow, worked out by hand.

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


class Pasted(NamedTuple):
    """One file: its name without the suffix, and the cpulists of each plan's ranks."""

    name: str
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
    Pasted(name, found["plans"], found.get("unbalanced", []))
    for name, found in json.loads((DATA / "pasted_plans.json").read_text("utf-8")).items()
]
