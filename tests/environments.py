"""What launchers put into the environment of each rank (``data/environments``).

A file is a list of records: ``name``, ``command``, and the ``ranks`` by local rank, each with its
``environ``. A record has ``seen`` where it was recorded from a real run (those of its variables
that concern ranks, masks and GPUs), ``documented`` where it was written down from the launcher's
documentation.
``own`` and ``parent`` are the masks of the rank and of its parent at that moment. ``told`` are the
numbers of a rank that are not its place in the list, of as many.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuaff.cpuset import CpuSet, parse_cpulist
from gpuaff.launch.binding import Ancestry, Masks, classify_masks
from gpuaff.launch.ranks import Ranks

FOLDER = Path(__file__).parent / "data" / "environments"


@dataclass(frozen=True)
class Started:
    """One rank, as its launcher started it."""

    environ: Mapping[str, str]
    ranks: Ranks
    own: CpuSet
    parent: CpuSet
    parent_name: str
    told: Mapping[str, int | None]

    def masks(self, **changes: Any) -> Masks:
        """What it finds out of all ranks' masks, on a machine of CPUs 0-3."""
        seen = {"own": self.own, "starter": self.parent, "starter_name": self.parent_name}
        return masks_seen(self.environ, self.ranks, **{**seen, **changes})


def masks_seen(
    environ: Mapping[str, str],
    ranks: Ranks,
    *,
    own: CpuSet,
    starter: CpuSet | None,
    starter_name: str | None = None,
    online: CpuSet = frozenset(range(4)),
    cpuset: CpuSet | None = None,
) -> Masks:
    """What a rank finds out that sees such masks."""
    above = Ancestry(parent=None, starter=starter, starter_name=starter_name)
    return classify_masks(
        ranks, own=own, above=above, online=online, cpuset=lambda: cpuset, get=environ.get
    )


def variables(text: str) -> dict[str, str]:
    """An environment as a shell has it: ``A=1 B=2``."""
    return dict(word.split("=", 1) for word in text.split())


def table(name: str) -> list[tuple[str, Any]]:
    """Texts of schedulers, and what each means: a part of ``data/schedulers.json``."""
    tables = json.loads((FOLDER.parent / "schedulers.json").read_text("utf-8"))
    return list(tables[name].items())


def recorded(launcher: str) -> list[str]:
    """The names of a launcher's recorded starts."""
    return [record["name"] for record in json.loads((FOLDER / f"{launcher}.json").read_text())]


def started(launcher: str, name: str) -> list[Started]:
    """All ranks of a recorded start, by local rank."""
    records = json.loads((FOLDER / f"{launcher}.json").read_text())
    (record,) = (record for record in records if record["name"] == name)
    size = len(record["ranks"])
    return [
        Started(
            environ=rank["environ"],
            told={"local_rank": number, "local_size": size, **rank.get("told", {})},
            ranks=Ranks(local_rank=number, local_size=size),
            own=parse_cpulist(rank.get("own", "0-3")),
            parent=parse_cpulist(record.get("parent", "0-3")),
            parent_name=record.get("parent_name", launcher),
        )
        for number, rank in enumerate(record["ranks"])
    ]
