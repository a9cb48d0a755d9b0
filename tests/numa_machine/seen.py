"""What the tests of the emulated machine share: how they look at what a scenario found.

The machine (``machine.sh``): node 0 has CPUs 0-7, node 1 has 8-15; cores are pairs (0,1), (2,3) …;
two cores have an L3 cache. GPUs 0 to 3 are on nodes 1, 0, 0, 1. Expected CPUs are worked out by
hand from that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

Found: TypeAlias = Callable[[str], Any]
"""The type of the fixture ``found``."""

ON_THE_MACHINE = [
    pytest.mark.slow,
    pytest.mark.fake_driver,
    pytest.mark.needs("numa-machine"),
    pytest.mark.xdist_group("numa-machine"),
    pytest.mark.timeout(1200),
]
"""What marks each of these tests."""

PAGES = 16 << 20 >> 12
"""How many pages a rank touches, if not told otherwise."""


def assert_pinned(seen: Any, *cpus: str) -> None:
    """Each rank said that it has these CPUs, and each of its threads has them."""
    assert [said["cpus"] for said in seen["said"]] == list(cpus)
    assert [set(threads) for threads in seen["threads"]] == [{one} for one in cpus]


def codes(seen: Any) -> list[set[str]]:
    """The warnings of each rank."""
    return [set(said["codes"]) for said in seen["said"]]
