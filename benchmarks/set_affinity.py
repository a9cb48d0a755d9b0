"""A whole process that pins itself, beside one that uses gpu_affinity.

python benchmarks/set_affinity.py --nproc 4 --peer PATH_TO_A_CHECKOUT_OF_GPU_AFFINITY

Needs GPUs, or a fake driver in LD_LIBRARY_PATH (``tests/fakedriver/make.py``).
"""

from __future__ import annotations

import argparse
import os
import sys

import timing

DROP_IN = "from gpuaff.compat import gpu_affinity"


def main() -> None:
    """Measure, in turns, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--peer", required=True)
    args = parser.parse_args()
    call = f"set_affinity(0, {args.nproc})"
    path = os.pathsep.join([args.peer, os.environ.get("PYTHONPATH", "")])
    costs = timing.compare(
        {
            "python -c pass": [sys.executable, "-c", "pass"],
            "gpu_affinity": [sys.executable, "-c", f"import gpu_affinity; gpu_affinity.{call}"],
            "gpuaff.compat": [sys.executable, "-c", f"{DROP_IN}; gpu_affinity.{call}"],
            "gpuaff": [sys.executable, "-c", f"import gpuaff; gpuaff.{call}"],
        },
        times=args.times,
        env={**os.environ, "PYTHONPATH": path},
    )
    timing.show(costs, "gpu_affinity")


if __name__ == "__main__":
    main()
