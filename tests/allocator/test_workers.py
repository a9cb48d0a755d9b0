"""The cut of a rank's cores among its workers."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuaff.allocator.cores import allowed_cores, workers_parts
from gpuaff.cpuset import CpuSet, parse_cpulist
from gpuaff.topology.model import Topology
from tests.strategies import topologies

DGX_RANK_0 = [frozenset((cpu, cpu + 128)) for cpu in range(48, 56)]
"""The cores of rank 0 of eight on a DGX A100: CPUs 48-55 and their siblings 176-183."""


def cut(cores: list[CpuSet], workers: int) -> list[CpuSet]:
    return list(workers_parts(cores, workers))


def cpus(*lists: str) -> list[CpuSet]:
    return [parse_cpulist(text) for text in lists]


def test_one_core_is_left_to_the_main_process() -> None:
    assert cut(DGX_RANK_0, 7) == cpus(
        "49,177", "50,178", "51,179", "52,180", "53,181", "54,182", "55,183"
    )


def test_blocks_differ_by_one_core_at_most() -> None:
    # Seven cores for three: 2 + 2 + 3.
    assert cut(DGX_RANK_0, 3) == cpus("49-50,177-178", "51-52,179-180", "53-55,181-183")


def test_one_worker_has_all_but_the_first_core() -> None:
    assert cut(DGX_RANK_0, 1) == cpus("49-55,177-183")


def test_more_workers_than_cores_share_equally() -> None:
    cores = cpus("0", "1", "2", "3", "4")  # four for the workers
    assert cut(cores, 8) == cpus("1", "1", "2", "2", "3", "3", "4", "4")
    # Six by four: two groups, three workers on two cores each.
    assert cut(cores, 6) == cpus("1-2", "1-2", "1-2", "3-4", "3-4", "3-4")
    assert cut(cores, 5) == cpus(*["1-4"] * 5), "nothing divides both: all share all"


def test_the_only_core_is_everybodys() -> None:
    assert cut(cpus("3,67"), 2) == cpus("3,67", "3,67")
    assert cut(cpus("0", "1"), 2) == cpus("1", "1")


CORES = st.lists(st.integers(1, 4), min_size=1, max_size=40).map(
    lambda sizes: [frozenset(range(start, end)) for start, end in pairwise([0, *_running(sizes)])]
)


def _running(sizes: list[int]) -> list[int]:
    return [sum(sizes[: place + 1]) for place in range(len(sizes))]


@given(cores=CORES, workers=st.integers(1, 60))
def test_whole_cores_and_all_of_them(cores: list[CpuSet], workers: int) -> None:
    parts = cut(cores, workers)
    assert len(parts) == workers
    assert all(parts)
    rest = cores[1:] if len(cores) > 1 else cores
    assert frozenset().union(*parts) == frozenset().union(*rest)
    for part in parts:
        assert all(core <= part or core.isdisjoint(part) for core in cores)


@given(cores=CORES, workers=st.integers(1, 60))
def test_nobody_has_more_than_others(cores: list[CpuSet], workers: int) -> None:
    """What a worker has of a core is one over those who share it."""
    parts, rest = cut(cores, workers), cores[1:] or cores
    users = [sum(core <= part for part in parts) for core in rest]
    groups = Counter(parts)
    if workers <= len(rest):
        assert set(users) == {1}, "each core is one worker's"
        sizes = [sum(core <= part for core in rest) for part in parts]
        assert max(sizes) - min(sizes) <= 1
    else:
        assert len(set(users)) == 1, "each core has equally many"
        assert len(set(groups.values())) == 1
        assert max(map(len, groups)) > 0
        sizes = [sum(core <= part for core in rest) for part in parts]
        assert len(set(sizes)) == 1, "each worker has equally many"


@given(topology=topologies(), workers=st.integers(1, 20))
def test_never_outside_of_what_is_allowed(topology: Topology, workers: int) -> None:
    if not topology.allowed:
        return
    cores = allowed_cores(topology, topology.allowed).cpus
    for part in workers_parts(cores, workers):
        assert part <= topology.allowed


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_the_fast_core_is_the_main_processs(workers: int) -> None:
    # An E core with the lowest ids, as on some Arm boards: cores 0-1 are slow, 2-3 fast.
    machine = Topology(
        cpus=frozenset(range(4)),
        cores=tuple(cpus("0", "1", "2", "3")),
        efficiency_cpus=frozenset((0, 1)),
    )
    parts = workers_parts(allowed_cores(machine, machine.cpus).cpus, workers)
    assert frozenset().union(*parts) == frozenset((0, 1, 3))
