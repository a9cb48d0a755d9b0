"""``spread``: worker processes of several ranks, each on cores of its own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.numa_machine.seen import ON_THE_MACHINE, Found

pytestmark = ON_THE_MACHINE


def assert_workers(step: Any, *cpus: list[str]) -> None:
    """Each rank's workers said that they have these CPUs, and all their three threads have them."""
    assert step["said"] == list(cpus)
    assert step["threads"] == [[[one] * 3 for one in of_rank] for of_rank in cpus]


# Rank 0 has node 1, rank 1 has node 0: four cores each. The first is left to the main process.


@pytest.mark.case("C10", "B19")
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_each_worker_has_a_core_of_its_ranks(found: Found, method: str) -> None:
    """The fork server was started when the rank had all CPUs yet."""
    seen = found("workers")
    assert [said["cpus"] for said in seen["said"]] == ["8-15", "0-7"]
    start = seen[method]["start"]
    assert_workers(start, ["10-11", "12-13", "14-15"], ["2-3", "4-5", "6-7"])
    assert seen[method]["codes"] == [[]] * 6


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_the_main_process_is_not_moved(found: Found, method: str) -> None:
    seen = found("workers")
    for step in ("start", "swap", "restore"):
        assert seen[method][step]["mains"] == [["8-15"], ["0-7"]]
    assert seen["restored"] == ["0-15", "0-15"]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_second_call_cuts_the_share_and_not_the_part(found: Found, method: str) -> None:
    swapped = found("workers")[method]["swap"]
    assert_workers(swapped, ["14-15", "12-13", "10-11"], ["6-7", "4-5", "2-3"])


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_restore_gives_all_threads_of_a_worker_the_ranks_share(found: Found, method: str) -> None:
    assert_workers(found("workers")[method]["restore"], ["8-15"] * 3, ["0-7"] * 3)


# Four ranks, two cores each; the second one is for workers.


@pytest.mark.case("C10")
def test_workers_of_ranks_on_the_same_node_do_not_meet(found: Found) -> None:
    one, two = found("workers_of_four_ranks")
    assert_workers(one["start"], ["10-11"], ["2-3"], ["6-7"], ["14-15"])
    assert_workers(two["start"], ["10-11"] * 2, ["2-3"] * 2, ["6-7"] * 2, ["14-15"] * 2)
    assert two["start"]["mains"] == [["8-11"], ["0-3"], ["4-7"], ["12-15"]]


def test_the_ranks_restore_in_a_forked_worker_moves_all_of_its_threads(found: Found) -> None:
    one, two = found("workers_of_four_ranks")
    assert_workers(one["restore rank"], *[["0-15"]] * 4)
    assert_workers(two["restore rank"], *[["0-15"] * 2] * 4)
    assert two["restore rank"]["mains"] == [["8-11"], ["0-3"], ["4-7"], ["12-15"]]
