"""A plan as JSON has it."""

from __future__ import annotations

from dataclasses import replace

from gpuaff.allocator.planner import plan

from allocator.described import dgx_a100


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
