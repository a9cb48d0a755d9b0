"""A plan as a record, and as JSON has it."""

from __future__ import annotations

import pytest

from gpuaff.allocator.plan import plan
from gpuaff.errors import GPUAffinityError
from gpuaff.notices import Notice
from gpuaff.pinning.state import refuse_if_broken
from tests.allocator.described import codes, dgx_a100


def test_the_keys_of_a_plan() -> None:
    found = plan(dgx_a100(), 8).to_dict()
    ranks, warnings = found.pop("ranks"), found.pop("warnings")
    assert found == {
        "schema_version": 1,
        "mode": "unique_contiguous",
        "scope": "node",
        "partition": "job",
        "border_rule": None,
    }
    assert ranks[0] == {
        "rank": 0,
        "gpu": 0,
        "cpus": "48-55,176-183",
        "cores": 8,
        "numa_nodes": [3],
        "source": "nvml",
        "reserved": "",
    }
    assert [set(warning) for warning in warnings] == [{"code", "message"}]


def test_no_gpu_is_null() -> None:
    found = plan(dgx_a100()._replace(visible=()), 1).to_dict()
    assert found["ranks"][0]["gpu"] is None


def test_the_share_of_a_rank_is_found_by_its_number() -> None:
    """Where the others' cannot be known, a plan has the own one only."""
    full = plan(dgx_a100(), 8)
    assert [full.share_of(rank) for rank in range(8)] == list(full.shares)
    own = full._replace(shares=(full.shares[5],))
    assert own.share_of(5) is full.shares[5]
    for rank in (0, 1, 4, 8):
        with pytest.raises(KeyError, match=f"^{rank}$"):
            own.share_of(rank)


def test_what_the_topology_says_of_the_visible_devices_is_carried_over() -> None:
    notes = Notice("visible-duplicate", "GPU 0 is listed twice"), Notice("nvml-missing", "none")
    machine = dgx_a100()._replace(notes=notes)
    assert codes(plan(machine, 8, scope="socket")) == ["visible-duplicate"]
    assert codes(plan(machine._replace(visible=()), 2)) == ["visible-duplicate", "no-gpu"]


def test_strict_does_not_accept_unknown_l3_domains() -> None:
    found = plan(dgx_a100(), 8, mode="core_complex")
    with pytest.raises(GPUAffinityError, match="complex-unknown; strict"):
        refuse_if_broken(found.warnings)
