"""A DataLoader whose workers are each on their part of the rank's cores; prints where each is.

python dataloader.py --workers 2
torchrun --nproc-per-node 2 dataloader.py --workers 2
"""

from __future__ import annotations

import argparse
import os
import sys

import gpuaff
from gpuaff.cpuset import format_cpulist
from gpuaff.integrations.torch import worker_init_fn

# Before torch. What is spawned imports this file again, and must not be pinned as a rank is.
affinity = gpuaff.set_affinity() if __name__ == "__main__" else None

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info


class WhereAmI(Dataset[str]):
    """Each item tells which worker has made it, and on which CPUs."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> str:
        torch.ones(500, 500).matmul(torch.ones(500, 500))  # as a transformation of the data would
        return f"worker {get_worker_info().id}: cpus {format_cpulist(os.sched_getaffinity(0))}"


def main() -> None:
    """Load, and say where each worker was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2, help="worker processes (default: 2)")
    parser.add_argument("--method", choices=["fork", "spawn", "forkserver"], default="fork")
    args = parser.parse_args()
    loader = DataLoader(
        WhereAmI(2 * args.workers),
        batch_size=None,
        num_workers=args.workers,
        worker_init_fn=worker_init_fn,
        multiprocessing_context=args.method,
    )
    lines = sorted(set(loader))
    here = f"main process: cpus {format_cpulist(os.sched_getaffinity(0))}"
    rank = affinity.rank if affinity is not None else None
    sys.stdout.write("".join(f"rank {rank}: {line}\n" for line in [here, *lines]))


if __name__ == "__main__":
    main()
