"""Look at a DDP set-up before the real training: who runs where, on which GPU and which CPUs.

    srun python ddp_minimal.py                    in a job of Slurm: see job.slurm
    torchrun --nproc-per-node 2 ddp_minimal.py    without Slurm

Fails where a node does not show as many GPUs as it was promised, or torch cannot use them. Where
there is no GPU, and none was promised, all of it runs on the CPU.
"""

from __future__ import annotations

import argparse
import math
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


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    text = "compute on the CPU; GPUs are counted all the same"
    parser.add_argument("--no-cuda", action="store_true", help=text)
    return parser.parse_args()


def world(ranks: gpuaff.Ranks) -> tuple[int, int]:
    """This rank of all nodes, and how many there are; an error where that is not known."""
    if ranks.rank is not None and ranks.size is not None:
        return ranks.rank, ranks.size
    bad = [one.message for one in ranks.warnings if one.code in ("bad-rank", "world-unknown")]
    if bad or ranks.local_size > 1:  # each would take itself for the only one
        why = bad or ["RANK and WORLD_SIZE are not set"]
        raise SystemExit(f"{host()}: which rank this is, and of how many, is not known: {why[0]}")
    return 0, 1


def check_gpus(ranks: gpuaff.Ranks) -> str:
    """Compare what this node was promised, and needs, with what this process sees.

    One that sees too few would share a GPU with another rank, or stop at ``cuda:3``.
    """
    visible = len(gpuaff.Topology.observe(links=False).visible)
    promised = int(os.environ.get("SLURM_GPUS_ON_NODE") or 0)  # to the job, on this node
    shown = f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '(unset)')}"
    if promised and visible != promised:
        raise SystemExit(
            f"{host()} has {promised} GPUs for this job, and this process sees {visible} ({shown}):"
            " ask for GPUs per node, not per task, and leave the variable as Slurm has set it; if "
            "it is right, see what nvidia-smi finds there"
        )
    if not visible:
        return "no GPU here: all of it on the CPU"
    if visible < ranks.local_size:
        raise SystemExit(
            f"{host()} has {ranks.local_size} processes, and this one sees {visible} GPUs ({shown})"
            ": start as many processes on a node as it has GPUs, and let each see all of them"
        )
    gpus = f"{promised} GPUs promised, {visible}" if promised else f"{visible} GPUs"
    return f"on the first node {ranks.local_size} ranks, {gpus} visible"


def check_torch() -> bool:
    """Whether torch can use the GPUs; an error where it cannot, and there are some."""
    if torch.cuda.is_available():
        return True
    if visible := len(gpuaff.Topology.observe(links=False).visible):
        raise SystemExit(
            f"{host()}: torch {torch.__version__} cannot use the {visible} GPUs that are visible: "
            "install a build of it for CUDA that this driver is new enough for "
            "(https://pytorch.org/get-started), or stay on the CPU with --no-cuda"
        )
    return False


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
    args = arguments()
    ranks = gpuaff.ranks()  # what torchrun or srun has put into the environment
    local_rank, (rank, world_size) = ranks.local_rank, world(ranks)
    gpus = check_gpus(ranks)
    cuda = not args.no_cuda and check_torch()
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
        "forward": forward(rank, device),
    }
    everybody: list[dict[str, object]] = [{} for _ in range(world_size)]
    dist.all_gather_object(everybody, found)
    sums = [float(str(one["forward"])) for one in everybody]
    # Not to the last digit: GPUs of two kinds round in their own ways.
    same = all(math.isclose(one, sums[0], rel_tol=1e-4, abs_tol=1e-4) for one in sums)
    if rank == 0:
        nodes = len({str(one["host"]) for one in everybody})
        print(f"{world_size} ranks on {nodes} node(s) by {dist.get_backend()}; {gpus}\n")
        print("".join(f"{name:>12}" for name in found))
        for one in everybody:
            cells = (f"{c:.4f}" if isinstance(c, float) else str(c) for c in one.values())
            print("".join(f"{cell:>12}" for cell in cells))
        print(f"\nforward pass: {'the same on all ranks' if same else 'THE RANKS DIFFER'}")
    backend = dist.get_backend()
    dist.barrier()
    dist.destroy_process_group()
    if backend == "gloo":
        # A thread of gloo's may be busy with tensors still, and abort Python's own end
        # (PyTorch's issue 190489).
        sys.stdout.flush()
        os._exit(not same)
    sys.exit(not same)


if __name__ == "__main__":
    main()
