"""The choice against all sets tried one by one, with the rules written down plainly."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuaff.claims.devices.selection import choose
from gpuaff.topology.model import Gpu, Topology
from tests.claims.linked import islands, linked

WORDS = ["NV18", "NV4", "NV2", "NV1", "PIX", "PXB", "PHB", "NODE", "SYS"]
"""The nearest first."""

Kind = tuple[int, int, int]


def packages_of(machine: Topology, gpu: Gpu) -> set[int]:
    near = gpu.local_cpus or gpu.node_cpus or frozenset()
    return {one.id for one in machine.packages or () if near & one.cpus}


class Oracle:
    """The rules of `gpuaff.claims.devices.selection`, for machines whose links are all told."""

    def __init__(self, machine: Topology) -> None:
        assert machine.links is not None
        self.everybody = set(machine.gpu_by_index)
        self.kind: dict[frozenset[int], Kind] = {}
        for a, b in combinations(machine.gpus, 2):
            word = machine.links[a.index][b.index]
            same = a.numa_node is not None and a.numa_node == b.numa_node
            apart = not same and packages_of(machine, a).isdisjoint(packages_of(machine, b))
            self.kind[frozenset((a.index, b.index))] = (WORDS.index(word), not same, apart)
        self.kinds = sorted(set(self.kind.values()))

    def counts(self, gpus: set[int]) -> list[int]:
        """How many pairs of each kind, the nearest kind first."""
        found = Counter(self.kind[frozenset(pair)] for pair in combinations(gpus, 2))
        return [found[kind] for kind in self.kinds]

    def badness(self, gpus: set[int]) -> list[int]:
        return self.counts(gpus)[::-1]

    def left(self, gpus: set[int]) -> list[list[int]]:
        """Smaller is better."""
        more_is_better = [-count for count in self.counts(gpus)]
        best = [
            min((self.badness(set(some)) for some in combinations(gpus, size)), default=[])
            for size in (4, 8)
        ]
        return [more_is_better, *best]

    def best(self, count: int, free: set[int], idle: set[int]) -> tuple[int, ...]:
        sets = list(combinations(sorted(free), count))
        least = min(self.badness(set(some)) for some in sets)
        alike = [some for some in sets if self.badness(set(some)) == least]
        return min(
            alike,
            key=lambda some: (
                self.left((free | idle) - set(some)),
                self.left(self.everybody - set(some)),
                some,
            ),
        )


@st.composite
def machines(draw: st.DrawFn, *, least: int = 2, most: int = 8) -> Topology:
    """Any links; or groups whose links are alike, as machines mostly have; nodes or none."""
    size = draw(st.integers(least, most))
    words = draw(st.lists(st.sampled_from(WORDS), min_size=1, max_size=4, unique=True))
    cells = {
        pair: draw(st.sampled_from(words))
        for pair in ([] if draw(st.booleans()) else combinations(range(size), 2))
    }
    group = [draw(st.integers(0, 2)) for _ in range(size)]
    nodes = [draw(st.sampled_from([0, 1])) for _ in range(size)]

    def word(i: int, j: int) -> str:
        return cells.get((i, j)) or words[0 if group[i] == group[j] else -1]

    return linked(size, word, nodes=draw(st.sampled_from([None, group, nodes])))


def some_of(machine: Topology, *, least: int = 0) -> st.SearchStrategy[set[int]]:
    return st.sets(st.sampled_from(sorted(machine.gpu_by_index)), min_size=least)


def compare(data: st.DataObject, machine: Topology) -> None:
    free = data.draw(some_of(machine, least=1), label="free")
    count = data.draw(st.integers(1, len(free)), label="count")
    idle = data.draw(st.just(free) | some_of(machine), label="idle")
    found = choose(count, free, topology=machine, idle=idle)
    assert found == Oracle(machine).best(count, free, idle)


@given(machines(), st.data())
@settings(max_examples=60)
def test_it_is_the_best_of_all_sets(machine: Topology, data: st.DataObject) -> None:
    compare(data, machine)


@pytest.mark.slow
@given(machines(least=9, most=11), st.data())
@settings(max_examples=60)
def test_it_is_the_best_of_all_sets_of_a_larger_machine(
    machine: Topology, data: st.DataObject
) -> None:
    compare(data, machine)


@pytest.mark.slow
@given(machines(least=16, most=16), st.data())
@settings(max_examples=4)
def test_it_is_the_best_of_all_sets_of_sixteen(machine: Topology, data: st.DataObject) -> None:
    free = data.draw(st.sampled_from([set(range(16)), set(range(3, 16))]), label="free")
    count = data.draw(st.sampled_from([1, 8, 12]), label="count")
    found = choose(count, free, topology=machine)
    assert found == Oracle(machine).best(count, free, free)


@given(machines(), st.data())
def test_the_order_of_what_is_told_plays_no_part(machine: Topology, data: st.DataObject) -> None:
    free = sorted(data.draw(some_of(machine, least=1)))
    count = data.draw(st.integers(1, len(free)))
    found = choose(count, free, topology=machine)
    shuffled = data.draw(st.permutations(free))
    assert choose(count, [*shuffled, shuffled[0]], topology=machine) == found
    assert choose(count, dict.fromkeys(shuffled).keys(), topology=machine) == found
    # Nor does the order of the topology's GPUs.
    order = data.draw(st.permutations(range(len(machine.gpus))))
    assert machine.links is not None
    other = Topology(
        gpus=tuple(machine.gpus[i] for i in order),
        links=tuple(tuple(machine.links[i][j] for j in order) for i in order),
    )
    assert choose(count, free, topology=other) == found


@given(machines(least=1, most=40), st.data())
def test_what_is_chosen_is_free_and_of_the_size(machine: Topology, data: st.DataObject) -> None:
    free = data.draw(some_of(machine, least=1))
    count = data.draw(st.integers(1, len(free)))
    found = choose(count, free, topology=machine)
    assert len(found) == count
    assert list(found) == sorted(set(found) & free)


def test_large_machines_of_islands_are_exact() -> None:
    machine = islands(8, 8, 8, 8)
    assert choose(8, range(3, 32), topology=machine) == tuple(range(8, 16))
    assert choose(2, range(3, 32), topology=machine) == (3, 4)
    assert choose(5, {*range(3, 8), *range(8, 32)}, topology=machine) == (3, 4, 5, 6, 7)


def test_large_machines_of_many_islands_are_built_up() -> None:
    """Eight islands of four have too many sets. 0, 9 and 21 are busy."""
    machine = islands(*[4] * 8)
    free = set(range(32)) - {0, 9, 21}
    assert choose(1, free, topology=machine) == (1,)
    assert choose(2, free, topology=machine) == (1, 2)
    assert choose(3, free, topology=machine) == (1, 2, 3)
    assert choose(4, free, topology=machine) == (4, 5, 6, 7)
    assert choose(7, free, topology=machine) == (1, 2, 3, 4, 5, 6, 7)
