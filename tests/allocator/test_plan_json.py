"""A plan as a record, and as JSON has it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuaff.allocator.plan import plan
from gpuaff.errors import GPUAffinityError
from gpuaff.notices import Notice
from gpuaff.pinning.state import refuse_if_broken
from tests.allocator.described import codes, dgx_a100


def test_a_share_and_the_warnings() -> None:
    found = plan(dgx_a100(), 8).to_dict()
    keys = ["schema_version", "mode", "scope", "partition", "border_rule", "ranks", "warnings"]
    assert list(found) == keys
    assert (found["schema_version"], found["mode"], found["scope"]) == (
        1,
        "unique_contiguous",
        "node",
    )
    assert found["ranks"][0] == {
        "rank": 0,
        "gpu": 0,
        "cpus": "48-55,176-183",
        "cores": 8,
        "numa_nodes": [3],
        "source": "nvml",
        "reserved": "",
    }
    assert [set(warning) for warning in found["warnings"]] == [{"code", "message"}]


def test_no_gpu_is_null() -> None:
    found = plan(replace(dgx_a100(), visible=()), 1).to_dict()
    assert found["ranks"][0]["gpu"] is None
    assert found["ranks"][0]["source"] == "all"


def test_the_share_of_a_rank() -> None:
    found = plan(dgx_a100(), 8)
    assert [found.share_of(rank) for rank in range(8)] == list(found.shares)


def test_the_own_share_only() -> None:
    """Where the others' cannot be known; it may be any rank's, and stands first."""
    full = plan(dgx_a100(), 8)
    own = replace(full, shares=(full.shares[5],))
    assert own.share_of(5) is full.shares[5]
    some = replace(full, shares=(full.shares[5], full.shares[0]))
    assert some.share_of(0) is full.shares[0]


@pytest.mark.parametrize("rank", [0, 1, 4, 8])
def test_a_rank_of_which_nothing_is_known(rank: int) -> None:
    full = plan(dgx_a100(), 8)
    with pytest.raises(KeyError, match=f"^{rank}$"):
        replace(full, shares=(full.shares[5],)).share_of(rank)


def test_what_the_topology_says_of_the_visible_devices_is_carried_over() -> None:
    notes = (
        Notice("visible-duplicate", "GPU 0 is listed twice"),
        Notice("nvml-missing", "no driver"),
    )
    machine = replace(dgx_a100(), notes=notes)
    assert codes(plan(machine, 8, scope="socket")) == ["visible-duplicate"]
    assert codes(plan(replace(machine, visible=()), 2)) == ["visible-duplicate", "no-gpu"]


def test_strict_does_not_accept_unknown_l3_domains() -> None:
    found = plan(dgx_a100(), 8, mode="core_complex")
    with pytest.raises(GPUAffinityError, match="complex-unknown; strict"):
        refuse_if_broken(found.warnings)
