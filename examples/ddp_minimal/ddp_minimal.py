"""Look at a DDP set-up before the real training: who runs where, on which GPU and which CPUs.

    srun python ddp_minimal.py                    in a job of Slurm: see job.slurm
    torchrun --nproc-per-node 2 ddp_minimal.py    without Slurm

Fails where a node does not show as many GPUs as it was promised. Without a GPU all of it runs on
the CPU.
"""

from __future__ import annotations

import os
import socket
import sys

import gpuaff

affinity = gpuaff.set_affinity()  # before torch, so that its threads start on the right CPUs

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gpuaff.cpuset import format_cpulist


def host() -> str:
    """This node, by the name that Slurm's commands have for it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def check_gpus() -> str:
    """Compare what this node was promised with what this process sees.

    One that sees too few would share a GPU with another rank, or stop at ``cuda:3``.
    """
    visible = len(gpuaff.Topology.observe(links=False).visible)
    if not visible:
        return "no GPU here: all of it on the CPU"
    # Slurm tells how many GPUs the job has on this node. Else: one for each process there.
    promised = int(os.environ.get("SLURM_GPUS_ON_NODE") or gpuaff.ranks().local_size)
    assert visible == promised, (
        f"{host()} has {promised} GPUs for this job, and this process sees {visible} "
        f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')}): ask for GPUs per node, "
        "not per task, and start as many processes as there are GPUs"
    )
    return f"each node: {promised} GPUs promised, {visible} visible"


def forward(rank: int, device: torch.device) -> float:
    """Send the same numbers through the model on each rank; the sum of what comes out."""
    torch.manual_seed(rank)  # each rank begins with weights of its own …
    model = nn.Linear(20, 10).to(device)
    # … until DDP gives all of them those of rank 0.
    on_gpu = device.type == "cuda"
    model = DistributedDataParallel(model, device_ids=[device.index] if on_gpu else None)
    with torch.no_grad():
        return float(model(torch.ones(5, 20, device=device)).sum())


def main() -> None:
    """Meet the other ranks, do one forward pass, and let rank 0 print what all of them found."""
    ranks = gpuaff.ranks()  # what torchrun, srun or mpirun has put into the environment
    rank, local_rank, world_size = ranks.rank or 0, ranks.local_rank, ranks.size or 1
    gpus = check_gpus()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    # The ranks meet at MASTER_ADDR:MASTER_PORT; torchrun sets both, job.slurm too.
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        rank=rank,
        world_size=world_size,
        device_id=device if cuda else None,  # or NCCL has to guess it
    )

    found: dict[str, object] = {
        "rank": rank,
        "local rank": local_rank,
        "host": host(),
        "GPU": "-" if affinity.gpu is None else affinity.gpu,
        "CPUs": format_cpulist(os.sched_getaffinity(0)),  # as the kernel has it by now
        "forward": f"{forward(rank, device):.4f}",
    }
    everybody: list[dict[str, object]] = [{} for _ in range(world_size)]
    dist.all_gather_object(everybody, found)
    if rank == 0:
        nodes = len({str(one["host"]) for one in everybody})
        print(f"{world_size} ranks on {nodes} node(s) by {dist.get_backend()}; {gpus}\n")
        print("".join(f"{name:>12}" for name in found))
        for one in everybody:
            print("".join(f"{cell!s:>12}" for cell in one.values()))
        same = len({one["forward"] for one in everybody}) == 1
        print(f"\nforward pass: {'the same on all ranks' if same else 'THE RANKS DIFFER'}")
    backend = dist.get_backend()
    dist.barrier()
    dist.destroy_process_group()
    if backend == "gloo":
        # A thread of gloo's may be busy with tensors still, and abort Python's own end
        # (PyTorch's issue 190489).
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
