"""One job of ``check.py`` that knows nothing of the others: pins itself, starts CUDA, waits."""

from __future__ import annotations

import json
import sys

import gpuaff


def main() -> None:
    """Tell what happened in one line; end when standard input does."""
    affinity = gpuaff.set_affinity(0, 1, partition="machine", mode=sys.argv[1], memory="preferred")
    import torch

    affinity.reapply()
    total = float(torch.ones(1024, device="cuda").sum())
    checked = gpuaff.check()
    said = {
        "gpu": affinity.gpu,
        "cpus": sorted(affinity),
        "partition": None if affinity.plan is None else str(affinity.plan.partition),
        "memory": affinity.memory,
        "codes": [warning.code for warning in affinity.warnings],
        "sum": total,
        "check": checked.ok,
        "checked": str(checked),
    }
    print(json.dumps(said), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
