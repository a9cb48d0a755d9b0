"""One training run by DataParallel or by DistributedDataParallel; compare.py starts both.

    python train.py dp
    torchrun --nproc-per-node 2 train.py ddp

Takes all GPUs that it sees: ``dp`` in one process, ``ddp`` one in each. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

import gpuaff

if "ddp" in sys.argv[1:]:  # this rank's part of the CPUs
    gpuaff.set_affinity()
# DataParallel's one process keeps the CPUs of all its GPUs, which the claim of compare.py brought.

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    TensorDataset,
)

FEATURES, CLASSES = 512, 100


def arguments() -> argparse.Namespace:
    """How large the run is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method", choices=["dp", "ddp"])
    parser.add_argument("--samples", type=int, default=65536, help="in an epoch")
    parser.add_argument("--batch-size", type=int, default=512, help="samples a step for each GPU")
    parser.add_argument("--width", type=int, default=4096, help="of the hidden layers")
    parser.add_argument("--epochs", type=int, default=4, help="the first one is not timed")
    parser.add_argument("--parts", type=int, help="into how many a step is cut: one a GPU")
    parser.add_argument("--no-cuda", action="store_true", help="train on the CPU")
    return parser.parse_args()


def made_up(samples: int) -> TensorDataset:
    """Samples that can be learnt: the class is the nearest of a hundred points."""
    torch.manual_seed(0)
    points = torch.randn(CLASSES, FEATURES)
    classes = torch.randint(CLASSES, (samples,))
    return TensorDataset(points[classes] + 2 * torch.randn(samples, FEATURES), classes)


def network(width: int) -> nn.Module:
    """Four layers: much to copy from GPU to GPU beside what there is to compute."""
    return nn.Sequential(
        nn.Linear(FEATURES, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, CLASSES),
    )


def can_use_cuda() -> bool:
    """Whether there are GPUs; an error where torch cannot use them, instead of a slow run."""
    if torch.cuda.is_available():
        return True
    visible = len(gpuaff.Topology.observe(links=False).visible)
    promised = os.environ.get("SLURM_GPUS_ON_NODE") or "0"
    if visible or promised != "0":
        raise SystemExit(
            f"torch {torch.__version__} cannot use a GPU here ({visible} visible, {promised} "
            "promised by Slurm): install a build of it for CUDA that this driver is new enough for "
            "(https://pytorch.org/get-started), or train on the CPU with --no-cuda"
        )
    return False


def train(args: argparse.Namespace) -> dict[str, object]:
    """Train; what it took."""
    # DataParallel is one process, whatever a launcher around it has set.
    place = os.environ if args.method == "ddp" else {}
    local_rank = int(place.get("LOCAL_RANK", "0"))
    world_size = int(place.get("WORLD_SIZE", "1"))
    cuda = not args.no_cuda and can_use_cuda()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    data = made_up(args.samples)
    model = network(args.width).to(device)
    # A step takes equally many samples in both ways, so that both learn the same.
    if args.method == "dp":
        # One process: in each step it copies the weights to every GPU, sends each a part of the
        # samples, and fetches scores and gradients back to the first.
        sampler = RandomSampler(data)
        size = args.batch_size * (args.parts or max(1, torch.cuda.device_count()))
        model = DataParallel(model)
    else:
        # Weights stay on every GPU; gradients are averaged while they are computed.
        dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
        sampler, size = DistributedSampler(data), args.batch_size
        model = DistributedDataParallel(model, device_ids=[local_rank] if cuda else None)
    batches = BatchSampler(sampler, size, drop_last=True)
    loader = DataLoader(data, sampler=batches, batch_size=None, pin_memory=cuda)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    losses = []
    seconds = 0.0
    for epoch in range(args.epochs):
        if args.method == "ddp":
            sampler.set_epoch(epoch)
        start = time.perf_counter()
        total = torch.zeros((), device=device)
        for samples, classes in loader:
            optimizer.zero_grad()
            scores = model(samples.to(device, non_blocking=True))
            loss = functional.cross_entropy(scores, classes.to(device, non_blocking=True))
            loss.backward()
            optimizer.step()
            total += loss.detach()
        if args.method == "ddp":
            dist.all_reduce(total)
            total /= world_size
        losses.append(total.item() / len(loader))  # item() waits for the GPU
        if epoch > 0 or args.epochs == 1:  # libraries are loaded in the first
            seconds += time.perf_counter() - start

    # The most that tensors have taken of each GPU, in MiB.
    mine = range(torch.cuda.device_count()) if args.method == "dp" else [local_rank]
    memory = [torch.cuda.max_memory_allocated(gpu) >> 20 for gpu in mine] if cuda else []
    cpus = [len(os.sched_getaffinity(0))]
    if args.method == "ddp":
        everybody: list[tuple[list[int], list[int]]] = [([], [])] * world_size
        dist.all_gather_object(everybody, (memory, cpus))
        memory, cpus = ([n for one in everybody for n in one[kind]] for kind in (0, 1))
    return {
        "method": args.method,
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        "processes": world_size,
        "cpus": cpus,
        "omp_threads": torch.get_num_threads(),
        "samples_per_s": round(len(loader) * size * world_size * max(1, args.epochs - 1) / seconds),
        "memory_mib": memory,
        "epochs": args.epochs,
        "losses": losses,
    }


def main() -> None:
    """Train, and let one rank print what it took."""
    args = arguments()
    found = train(args)
    if args.method == "dp" or dist.get_rank() == 0:
        print(json.dumps(found))
    if args.method == "ddp":
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
