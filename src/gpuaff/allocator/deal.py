"""Socket scope: the cores that belong to no GPU's node are dealt to those that do.

This is gpu-affinity rule 4. The partition is made over node cores, and each node core brings
along the cores that were dealt to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

Dealt: TypeAlias = Mapping[int, tuple[int, ...]]
"""The cores dealt to each node core; one without an entry got none."""


def deal(socket: Sequence[int], node_cores: Sequence[int]) -> Dealt:
    """Deal a socket's other cores, ascending and round-robin, to its node cores, ascending.

    gpu_affinity drops cores where that does not come out even; here every core is dealt.
    """
    takers = sorted(node_cores)
    others = sorted(set(socket).difference(takers))
    first_dealt = zip(takers, range(len(others)), strict=False)
    return {taker: tuple(others[turn :: len(takers)]) for taker, turn in first_dealt}


def with_dealt(cores: Sequence[int], dealt: Dealt) -> tuple[int, ...]:
    """Node cores, then all first-dealt, then all second-dealt …: trimming keeps node cores."""
    rounds = zip_longest(*(dealt.get(core, ()) for core in cores))
    return (*cores, *(core for core in chain.from_iterable(rounds) if core is not None))
