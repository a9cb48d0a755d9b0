"""DDP with one process and no launcher: to step through a training script in a debugger.

    python one_process.py

The process group is made through a file, so neither MASTER_ADDR nor a free port is needed.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import gpuaff

affinity = gpuaff.set_affinity(0, 1)  # the only rank of this node

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gpuaff.cpuset import format_cpulist


def main() -> None:
    """One training step, as on many ranks."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        # A name that no earlier run has used: what one has left there confuses the next.
        meeting = Path(folder, "meeting").as_uri()
        dist.init_process_group("nccl" if cuda else "gloo", meeting, rank=0, world_size=1)
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(20, 10).to(device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(2):
            loss = model(torch.ones(5, 20, device=device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        gpu = "-" if affinity.gpu is None else affinity.gpu
        cpus = format_cpulist(os.sched_getaffinity(0))
        print(
            f"rank {dist.get_rank()} of {dist.get_world_size()}  {device}  GPU {gpu}  CPUs {cpus}"
        )
        print(f"loss {losses[0]:.4f}, after one step {losses[1]:.4f}")
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
