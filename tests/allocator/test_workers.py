"""The cut of a rank's cores among its workers."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuaff.allocator.cores import allowed_cores, workers_parts
from gpuaff.cpuset import CpuSet, parse_cpulist
from gpuaff.topology.model import Topology

# The cores of rank 0 of eight on a DGX A100.
DGX_RANK_0 = " ".join(f"{cpu},{cpu + 128}" for cpu in range(48, 56))


def cpus(lists: str) -> list[CpuSet]:
    return list(map(parse_cpulist, lists.split()))


@pytest.mark.parametrize(
    ("cores", "workers", "parts"),
    [
        (DGX_RANK_0, 1, "49-55,177-183"),  # all but the first core, which is the main process's
        (DGX_RANK_0, 3, "49-50,177-178 51-52,179-180 53-55,181-183"),  # 2 + 2 + 3
        (DGX_RANK_0, 7, "49,177 50,178 51,179 52,180 53,181 54,182 55,183"),
        ("0 1 2 3 4", 8, "1 1 2 2 3 3 4 4"),  # four cores for eight workers
        ("0 1 2 3 4", 6, "1-2 1-2 1-2 3-4 3-4 3-4"),  # two groups of three
        ("0 1 2 3 4", 5, "1-4 1-4 1-4 1-4 1-4"),  # nothing divides both: all share all
        ("3,67", 2, "3,67 3,67"),  # the only core is everyone's
        ("0 1", 2, "1 1"),
    ],
)
def test_one_core_is_the_main_processs_and_workers_share_the_others(
    cores: str, workers: int, parts: str
) -> None:
    assert list(workers_parts(cpus(cores), workers)) == cpus(parts)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=40), st.integers(1, 60))
def test_parts_are_whole_cores_and_all_alike(widths: list[int], workers: int) -> None:
    cores = [frozenset(range(*ends)) for ends in pairwise(accumulate(widths, initial=0))]
    parts, rest = workers_parts(cores, workers), cores[1:] or cores
    assert len(parts) == workers
    held = [[core for core in rest if core <= part] for part in parts]
    assert [frozenset().union(*own) for own in held] == list(parts), "whole cores"
    sizes = [len(own) for own in held]
    users = {sum(core in own for own in held) for core in rest}
    assert len(users) == 1, "each core has equally many workers"
    if workers <= len(rest):
        assert users == {1}
        assert 1 <= min(sizes) <= max(sizes) <= min(sizes) + 1
    else:
        assert len(set(sizes)) == 1, "each worker has equally many cores"
        assert min(sizes) > 0


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_the_fast_core_is_the_main_processs(workers: int) -> None:
    # An E core with the lowest ids, as on some Arm boards: cores 0-1 are slow, 2-3 fast.
    machine = Topology(
        cpus=frozenset(range(4)),
        cores=tuple(cpus("0 1 2 3")),
        efficiency_cpus=frozenset((0, 1)),
    )
    parts = workers_parts(allowed_cores(machine, machine.cpus).cpus, workers)
    assert frozenset().union(*parts) == frozenset((0, 1, 3))
