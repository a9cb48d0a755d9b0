"""Socket scope: the cores that belong to no GPU's node are dealt to those that do.

This is gpu-affinity rule 4. The partition is made over node cores, and each node core brings
along the cores that were dealt to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

Dealt: TypeAlias = Mapping[int, tuple[int, ...]]
"""The cores dealt to each node core, to each as many."""


def deal(socket: Sequence[int], node_cores: Sequence[int]) -> tuple[Dealt, tuple[int, ...]]:
    """Deal a socket's other cores, ascending and round-robin, to its node cores, ascending.

    Returns:
        What full rounds bring, and the cores that make no full round: these belong to no node
        core, or the lowest would have them all.
    """
    takers = sorted(node_cores)
    others = sorted(set(socket).difference(takers))
    dealt = len(others) - len(others) % len(takers)
    rounds = {taker: tuple(others[turn : dealt : len(takers)]) for turn, taker in enumerate(takers)}
    return rounds, tuple(others[dealt:])


def with_dealt(cores: Sequence[int], dealt: Dealt) -> tuple[int, ...]:
    """Node cores, then all first-dealt, then all second-dealt …: trimming keeps node cores."""
    rounds = zip(*(dealt[core] for core in cores), strict=True)
    return (*cores, *chain.from_iterable(rounds))
