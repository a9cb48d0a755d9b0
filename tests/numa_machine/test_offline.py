"""CPUs that go offline, and come back: before, between and during calls."""

from __future__ import annotations

import pytest

from gpuaff.cpuset import parse_cpulist
from tests.numa_machine.seen import ON_THE_MACHINE, Found, assert_pinned

pytestmark = ON_THE_MACHINE


@pytest.mark.case("A18")
def test_cpus_that_are_offline_are_in_no_share(found: Found) -> None:
    seen = found("offline_before")
    assert seen["before"] == ["0-31"], "the mask names them"
    assert_pinned(seen, "8-11", "0-2", "4-7", "12,14-15")


@pytest.mark.case("A17", "A18")
def test_a_part_of_the_share_goes_offline(found: Found) -> None:
    seen = found("offline_between_calls")["part"]
    assert seen["cpus"] == ["4-7", "4,6-7", "4-7"]
    assert seen["threads"] == [["4,6-7"] * 4, ["4-7"] * 4]
    assert (seen["restored"], seen["after"]) == ("0-15", ["0-15"] * 4)


@pytest.mark.case("A17", "A18")
def test_all_of_the_share_goes_offline(found: Found) -> None:
    seen = found("offline_between_calls")["whole"]
    # Three cores of node 0 are left, one for each GPU.
    assert seen["cpus"] == ["4-5", "2-3", "4-5"]
    assert seen["threads"] == [["2-3"] * 4, ["4-5"] * 4], "sleeping threads had no CPU at all"
    assert (seen["restored"], seen["after"]) == ("0-15", ["0-15"] * 4)


@pytest.mark.case("A18")
def test_restore_while_the_share_is_offline(found: Found) -> None:
    part, whole = found("offline_at_the_end")
    assert (part["restored"], part["threads"]) == ("0-4,6-15", ["0-4,6-15"] * 4)
    # The kernel may have moved a thread that ran meanwhile to all that there can be, by itself.
    assert whole["restored"] == "0-3,6-15"
    assert set(whole["threads"]) <= {"0-3,6-15", "0-31"}


@pytest.mark.case("A17", "G4")
def test_the_share_goes_offline_during_a_call(found: Found) -> None:
    part, whole = found("offline_meanwhile")
    assert (part["said"]["cpus"], set(part["threads"])) == ("4", {"4"})
    assert "mask-cut" in part["said"]["codes"]
    assert (whole["said"]["cpus"], set(whole["threads"])) == ("2-3", {"2-3"})
    assert whole["said"]["pinned"]


@pytest.mark.case("A17")
def test_cpus_that_come_and_go_during_many_calls(found: Found) -> None:
    seen = found("offline_again_and_again")
    # A CPU may go while the list of its siblings is read, so which of core 2 and 3 is in is open.
    for said in seen["often"]:
        assert said["pinned"], str(said)
        # One may also come between the reading of the rank's mask and of the machine's CPUs. Then
        # the mask looks like one of the rank's own, nothing is cut, and that is said.
        near = range(8) if "masks-unknown" in said["codes"] else range(4, 8)
        assert frozenset() < parse_cpulist(said["cpus"]) <= {*near}, str(said)
    assert seen["said"]["cpus"] == "4-7"
    assert seen["threads"] == ["4-7"] * 4
