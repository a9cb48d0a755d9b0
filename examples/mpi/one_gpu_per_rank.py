"""One MPI rank a GPU, each on the cores next to it; rank 0 prints where all are.

mpirun -n 2 --bind-to none python one_gpu_per_rank.py
"""

from __future__ import annotations

import os
import platform

from mpi4py import MPI

import gpuaff
from gpuaff.cpuset import format_cpulist


def main() -> None:
    """Pin, and tell rank 0."""
    world = MPI.COMM_WORLD
    node = world.Split_type(MPI.COMM_TYPE_SHARED)  # the ranks that share this node's memory
    affinity = gpuaff.set_affinity(node.rank, node.size)
    # From here on: torch, cupy, …; the GPU is cuda:<local rank>.
    cpus = format_cpulist(os.sched_getaffinity(0))
    told = (world.rank, platform.node(), node.rank, affinity.gpu, cpus)
    ranks = world.gather(told, root=0)
    # The mean of a gradient, as a training step would take it.
    total = world.allreduce(float(world.rank + 1)) / world.size
    if world.rank == 0:
        print("rank  host  local rank  GPU  CPUs")
        for rank, host, local, gpu, listed in ranks:
            print(f"{rank:>4}  {host}  {local:>10}  {gpu!s:>3}  {listed}")
        print(f"mean over {world.size} ranks: {total}")


if __name__ == "__main__":
    main()
