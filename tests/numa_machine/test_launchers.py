"""``set_affinity()`` without numbers, by the variables of launchers that bind nobody."""

from __future__ import annotations

from typing import Any

import pytest

from tests.numa_machine.seen import ON_THE_MACHINE, Found, assert_pinned, codes

pytestmark = ON_THE_MACHINE


def gpus(seen: Any) -> list[tuple[int, int]]:
    """Each rank, and its GPU."""
    return [(said["rank"], said["gpu"]) for said in seen["said"]]


@pytest.mark.parametrize("launcher", ["srun", "mpirun", "mpich"])
def test_each_rank_is_next_to_the_gpu_of_its_number(found: Found, launcher: str) -> None:
    # GPUs 0 and 3 share node 1, GPUs 1 and 2 share node 0: two of four cores for each.
    seen = found("launchers")[launcher]
    assert gpus(seen) == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert_pinned(seen, "8-11", "0-3", "4-7", "12-15")
    assert codes(seen) == [set()] * 4


@pytest.mark.case("D10")
def test_each_task_is_next_to_the_gpu_that_srun_gave_it(found: Found) -> None:
    """``--gpu-bind=map_gpu:1,3,0,2``: each sees one GPU, as device 0."""
    # Cores are cut in the order of the GPUs, whichever task has them.
    seen = found("launchers")["srun map_gpu"]
    assert gpus(seen) == [(0, 1), (1, 3), (2, 0), (3, 2)]
    assert_pinned(seen, "0-3", "12-15", "8-11", "4-7")
    assert codes(seen) == [set()] * 4
