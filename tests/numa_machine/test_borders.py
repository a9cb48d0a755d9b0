"""Borders: cpusets, numactl, other ranks' masks, other jobs; also those that move."""

from __future__ import annotations

import pytest

from tests.numa_machine.seen import ON_THE_MACHINE, PAGES, Found, assert_pinned, codes

pytestmark = ON_THE_MACHINE

# Borders.


@pytest.mark.case("A5", "A6")
def test_a_cpuset_smaller_than_the_machine(found: Found) -> None:
    seen = found("small_cpuset")
    assert_pinned(seen, "8-9", "2-3", "4-5", "10-11")
    assert codes(seen) == [{"mask-narrow"}] * 4


@pytest.mark.case("A2")
def test_none_of_the_near_cpus_is_in_the_cpuset(found: Found) -> None:
    seen = found("cpuset_of_one_node")
    # For all four GPUs node 0 is the nearest that is allowed, so its four cores are cut for all.
    assert_pinned(seen, "0-1", "2-3", "4-5", "6-7")
    assert [said["source"] for said in seen["said"]] == ["nearest", "nvml", "nvml", "nearest"]
    assert codes(seen) == [{"near-not-allowed"}] * 4


@pytest.mark.case("A2")
def test_numactl_around_a_job_is_a_border(found: Found) -> None:
    seen = found("job_started_by_numactl")
    assert seen["said"]["cpus"] == "0-1"
    assert set(seen["threads"]) == {"0-1"}
    assert seen["said"]["codes"] == ["near-not-allowed"]
    assert seen["touched"] == {"pages": {"0": PAGES}, "policy": "bind:0"}, "its policy stays"


def test_numactl_around_each_rank(found: Found) -> None:
    seen = found("ranks_started_by_numactl")
    assert_pinned(seen, "8-15", "0-7", "0-7", "8-15")
    assert all("masks-unknown" in said for said in codes(seen))


def test_ranks_with_masks_of_their_own(found: Found) -> None:
    seen = found("masks_of_their_own")["unknown"]
    assert_pinned(seen, "8-13", "0-7", "2-7", "10-15")
    assert all("masks-unknown" in said for said in codes(seen))


def test_ranks_that_are_told_the_masks_of_all(found: Found) -> None:
    # Cores 5 and 6 may go to rank 0 or 3, cores 1 to 3 to rank 1 or 2; two for each.
    seen = found("masks_of_their_own")["told"]
    assert_pinned(seen, "8-11", "0-3", "4-7", "12-15")
    assert not any("masks-unknown" in said for said in codes(seen))


def test_strangers_jobs_overlap_each_for_itself(found: Found) -> None:
    assert_pinned(found("two_jobs")["job"], "8-15", "0-7", "0-7", "8-15")


def test_strangers_jobs_are_disjoint_within_borders(found: Found) -> None:
    assert_pinned(found("two_jobs")["machine"], "8-11", "0-3", "4-7", "12-15")


# Cpusets that change.


@pytest.mark.case("A17")
def test_a_cpuset_that_shrinks_under_a_pinned_process(found: Found) -> None:
    seen = found("cpuset_that_shrinks")
    part, all_of_it = seen["steps"]
    assert seen["first"]["cpus"] == "0-3"
    # The kernel has moved the threads within what is left; only then they are pinned again.
    assert len(set(part["meanwhile"])) == len(set(all_of_it["meanwhile"])) == 1
    assert part["said"]["cpus"] == "2-3"
    assert part["threads"] == ["2-3"] * 4
    assert all_of_it["said"]["cpus"] == "10-11", "node 1 is the nearest; its four cores for four"
    assert all_of_it["threads"] == ["10-11"] * 4
    assert "near-not-allowed" in all_of_it["said"]["codes"]


@pytest.mark.case("A17")
def test_restore_when_the_cpuset_has_grown_again(found: Found) -> None:
    seen = found("cpuset_that_shrinks")
    assert seen["restored"] == "0-15"
    assert seen["after"] == ["0-15"] * 4


@pytest.mark.case("A17", "G4")
def test_a_cpuset_that_shrinks_during_a_call(found: Found) -> None:
    gone, cut = found("cpuset_that_shrinks_meanwhile")
    # Refused, so planned again: node 0 has cores 0 and 1 left, one for each GPU.
    assert (gone["said"]["cpus"], set(gone["threads"])) == ("2-3", {"2-3"})
    assert not {"pin-failed", "mask-cut"} & set(gone["said"]["codes"])
    assert (cut["said"]["cpus"], set(cut["threads"])) == ("4-5", {"4-5"})
    assert "mask-cut" in cut["said"]["codes"]
