"""Pin each rank to its own share of the cores next to its GPU, and print them.

torchrun --nproc-per-node 8 examples/pin.py
"""

from __future__ import annotations

import argparse
import logging
import os
import sys

import gpuaff
from gpuaff.cpuset import format_cpulist


def arguments() -> argparse.Namespace:
    """Read the command line; torchrun's variables are the defaults."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--local_rank",
        "--local-rank",
        type=int,
        default=os.environ.get("LOCAL_RANK") or None,
        help="this process's number on its node (default: $LOCAL_RANK)",
    )
    parser.add_argument(
        "--nproc",
        type=int,
        default=os.environ.get("LOCAL_WORLD_SIZE") or None,
        help="processes on this node (default: $LOCAL_WORLD_SIZE, else one for each visible GPU)",
    )
    parser.add_argument("--mode", choices=list(gpuaff.Mode), help="how near cores are cut")
    parser.add_argument("--scope", choices=list(gpuaff.Scope), help="what counts as near")
    args = parser.parse_args()
    if args.local_rank is not None and args.nproc is None:
        args.nproc = max(len(gpuaff.Topology.observe(links=False).visible), args.local_rank + 1)
    return args


def main() -> None:
    """Pin, and say where."""
    # gpuaff says at level INFO where a rank is; without this only warnings are shown.
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    args = arguments()
    affinity = gpuaff.set_affinity(args.local_rank, args.nproc, mode=args.mode, scope=args.scope)
    # One write, so that lines of several ranks don't run into each other.
    sys.stdout.write(f"{affinity.rank}: core affinity: {format_cpulist(affinity)}\n")


if __name__ == "__main__":
    main()
