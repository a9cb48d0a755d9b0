"""What ``import gpuaff`` costs over starting Python."""

from __future__ import annotations

import argparse
import os
import sys

import timing


def main() -> None:
    """Measure, in turns, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=40)
    args = parser.parse_args()
    python = [sys.executable, "-c"]
    costs = timing.compare(
        {
            "python -c pass": [*python, "pass"],
            "import gpuaff": [*python, "import gpuaff"],
            "import gpuaff.set_affinity": [*python, "from gpuaff import set_affinity"],
        },
        times=args.times,
        env=os.environ,
    )
    timing.show(costs, "python -c pass")


if __name__ == "__main__":
    main()
