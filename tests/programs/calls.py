"""Calls ``set_affinity`` with arguments and variables, in turn; prints what came of each call."""

import json
import os
import sys
from typing import Any

import gpuaff


def result(arguments: str) -> dict[str, Any]:
    """What a call returns, or the error that it raises; it is undone."""
    before = os.sched_getaffinity(0)
    try:
        affinity: gpuaff.Affinity = eval(f"gpuaff.set_affinity({arguments})")
    except (TypeError, gpuaff.GpuaffError) as error:
        assert os.sched_getaffinity(0) == before, arguments
        return {"error": type(error).__name__, "text": str(error)}
    assert sorted(affinity) == sorted(os.sched_getaffinity(0)), "the result is what the kernel has"
    affinity.restore()
    plan, rank = affinity.plan, affinity.rank
    return {
        "cpus": sorted(affinity),
        "gpu": affinity.gpu,
        "rank": rank,
        "pinned": affinity.pinned,
        "codes": [warning.code for warning in affinity.warnings],
        "cores": None if plan is None or rank is None else plan.share_of(rank).cores,
    }


found = []
for call, variables in json.loads(sys.argv[1]):
    os.environ |= variables
    found.append(result(call))
    for name in variables:
        del os.environ[name]
print(json.dumps(found))
