"""Machines that are told by the words between their GPUs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from gpuaff.topology.model import Gpu, Topology

DATA = Path(__file__).parents[1] / "data" / "topologies"


def pasted(name: str) -> Topology:
    """A machine that somebody pasted."""
    return Topology.from_dict(json.loads((DATA / f"{name}.json").read_text("utf-8")))


def linked(
    size: int, word: Callable[[int, int], str], *, nodes: Sequence[int | None] | None = None
) -> Topology:
    """A machine of so many GPUs.

    Args:
        size: how many.
        word: the link between GPUs i and j, where i is the lower.
        nodes: the NUMA node of each; None: unknown.
    """
    return Topology(
        gpus=tuple(Gpu(index=i, numa_node=nodes[i] if nodes else None) for i in range(size)),
        links=tuple(
            tuple("X" if i == j else word(min(i, j), max(i, j)) for j in range(size))
            for i in range(size)
        ),
    )


def islands(*sizes: int, near: str = "NV4", far: str = "SYS") -> Topology:
    """GPUs 0, 1, … in islands of these sizes."""
    home = [island for island, size in enumerate(sizes) for _ in range(size)]
    return linked(len(home), lambda i, j: near if home[i] == home[j] else far)
