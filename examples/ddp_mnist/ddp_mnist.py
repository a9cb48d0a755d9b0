"""Train a small network on handwritten digits, on any number of GPUs and nodes.

    srun python ddp_mnist.py                       in a job of Slurm: see job.slurm
    torchrun --nproc-per-node 4 ddp_mnist.py       on one node
    gpuaff run -n 4 -- torchrun --nproc-per-node 4 ddp_mnist.py    on a machine that others use too
    python ddp_mnist.py                            one process

The digits are MNIST's where ``--data`` names the folder of its four idx files, else the small ones
that come with scikit-learn. Where there is no GPU it trains on the CPU.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import time
from pathlib import Path

import gpuaff

if __name__ == "__main__":  # and not in a worker that is spawned, and imports this file again
    affinity = gpuaff.set_affinity()  # before torch, so that its threads start on the right CPUs

import digits
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, Subset

from gpuaff.cpuset import format_cpulist
from gpuaff.integrations.torch import worker_init_fn


def arguments() -> argparse.Namespace:
    """What can be chosen."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--batch-size", type=int, default=64, help="images a step, on each rank (default: 64)")
    add("--test-batch-size", type=int, default=1000, help="the same while testing (default: 1000)")
    add("--epochs", type=int, default=14, help="default: 14")
    add("--lr", type=float, default=1.0, help="learning rate of the first epoch (default: 1.0)")
    add("--gamma", type=float, default=0.7, help="it is multiplied by this each epoch: 0.7")
    add("--no-cuda", action="store_true", help="train on the CPU even where there are GPUs")
    add("--dry-run", action="store_true", help="one step and one test, to see that all works")
    add("--seed", type=int, default=1, help="of weights and order (default: 1)")
    add("--log-interval", type=int, default=10, help="steps between two lines (default: 10)")
    add("--save-model", action="store_true", help="write the weights to mnist_cnn.pt at the end")
    add("--data", type=Path, help="a folder with MNIST's idx files, packed by gzip or not")
    add("--csv", type=Path, help="a file for one row an epoch: what ../sweep reads")
    return parser.parse_args()


def network(side: int) -> nn.Module:
    """Two convolutions and two layers, for images of so many pixels by so many."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(64 * (side // 2) ** 2, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    )


def train(
    args: argparse.Namespace,
    model: nn.Module,
    loader: DataLoader,
    epoch: int,
    optimizer: torch.optim.Optimizer,
) -> float:
    """One epoch; the mean loss over the images of all ranks."""
    model.train()
    device = next(model.parameters()).device
    total = torch.zeros(2, device=device)  # loss, images
    for step, (images, labels) in enumerate(loader):
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()  # here DDP takes the mean of all ranks' gradients
        optimizer.step()
        total[0] += loss.detach() * len(labels)
        total[1] += len(labels)
        if dist.get_rank() == 0 and step % args.log_interval == 0:
            # Every rank has come as far as this one, with other images.
            done = step * args.batch_size * dist.get_world_size()
            size = len(loader.dataset)
            print(
                f"Train Epoch: {epoch} [{done}/{size} ({done / size:.0%})]\tLoss: {loss.item():.6f}"
            )
        if args.dry_run:
            break
    dist.all_reduce(total)
    return float(total[0] / total[1])


def test(model: nn.Module, loader: DataLoader) -> tuple[float, int]:
    """Mean loss over all test images, and how many were right: each rank looks at its part."""
    model.eval()
    device = next(model.parameters()).device
    total = torch.zeros(3, device=device)  # loss, right, all
    with torch.no_grad():
        for images, labels in loader:
            labels = labels.to(device)
            scores = model(images.to(device))
            total[0] += functional.cross_entropy(scores, labels, reduction="sum")
            total[1] += (scores.argmax(1) == labels).sum()
            total[2] += len(labels)
    dist.all_reduce(total)
    loss, right, count = total.tolist()
    if dist.get_rank() == 0:
        print(
            f"\nTest set: Average loss: {loss / count:.4f}, "
            f"Accuracy: {right:.0f}/{count:.0f} ({right / count:.0%})\n"
        )
    return loss / count, int(right)


def world(ranks: gpuaff.Ranks) -> tuple[int, int]:
    """This rank of all nodes, and how many there are; an error where that is not known."""
    if ranks.rank is not None and ranks.size is not None:
        return ranks.rank, ranks.size
    bad = [one.message for one in ranks.warnings if one.code in ("bad-rank", "world-unknown")]
    if bad or ranks.local_size > 1:  # each would train alone, and write over the others' files
        why = bad or ["RANK and WORLD_SIZE are not set"]
        raise SystemExit(f"which rank this is, and of how many, is not known: {why[0]}")
    return 0, 1


def can_use_cuda() -> bool:
    """Whether there are GPUs; an error where torch cannot use them, instead of days on the CPU."""
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


def meet(*, cuda: bool) -> torch.device:
    """Join the process group; this rank's device."""
    ranks = gpuaff.ranks()  # what torchrun or srun has put into the environment
    rank, world_size = world(ranks)
    device = torch.device("cpu")
    if cuda:
        # Where each rank sees one GPU alone (srun --gpus-per-task=1), that is CUDA's device 0.
        device = torch.device("cuda", ranks.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    # Who is alone has nobody to meet, and needs no MASTER_ADDR and MASTER_PORT.
    store = dist.HashStore() if world_size == 1 else None
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        device_id=device if cuda else None,  # or NCCL has to guess it
    )
    return device


def cores() -> int:
    """How many physical cores this rank has; CPUs, where the machine does not tell its cores."""
    known = gpuaff.Topology.observe(links=False).cores
    return sum(not core.isdisjoint(affinity) for core in known) if known else len(affinity)


def learn(args: argparse.Namespace, device: torch.device) -> None:
    """Train, test after each epoch, and let rank 0 write what is left of it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    # One core of the share is for the training itself, on each of the others a worker loads images.
    mine = cores()
    workers = min(8, mine - 1)
    options = {
        "num_workers": workers,
        "worker_init_fn": worker_init_fn,
        "persistent_workers": workers > 0,
        "pin_memory": device.type == "cuda",
    }
    to_train, to_test = digits.load(args.data)
    # Each epoch the sampler deals the images anew, to each rank as many as to the others …
    sampler = DistributedSampler(to_train, seed=args.seed)
    train_loader = DataLoader(to_train, args.batch_size, sampler=sampler, **options)
    # … which it reaches by dealing some twice. In a test each image is to count once.
    part = Subset(to_test, range(rank, len(to_test), world_size))
    test_loader = DataLoader(part, args.test_batch_size, **options)

    side = to_train[0][0].shape[-1]
    model = DistributedDataParallel(
        network(side).to(device), device_ids=[device.index] if device.type == "cuda" else None
    )
    optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    gpu = "none" if affinity.gpu is None else affinity.gpu
    cpus = format_cpulist(os.sched_getaffinity(0))
    place = f"{device}, GPU {gpu}, CPUs {cpus}, {workers} workers"
    # One write, so that lines of several ranks don't run into each other.
    print(f"rank {rank} of {world_size}: {place}\n", end="", flush=True)

    least = torch.tensor(mine, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)  # ranks mostly have equally many

    rows: list[tuple[object, ...]] = []
    for epoch in range(1, args.epochs + 1):
        start = time.perf_counter()
        sampler.set_epoch(epoch)  # or every epoch has the same order
        train_loss = train(args, model, train_loader, epoch, optimizer)
        seconds = time.perf_counter() - start
        test_loss, right = test(model, test_loader)
        scheduler.step()
        accuracy = right / len(to_test)
        rows.append((int(least), epoch, train_loss, test_loss, accuracy, seconds))
        if args.dry_run:
            break

    if rank == 0:  # the others have the same weights, and would write over each other's file
        if args.save_model:
            torch.save(model.module.state_dict(), "mnist_cnn.pt")
        if args.csv:
            with args.csv.open("w", newline="") as file:
                writer = csv.writer(file)
                names = ["cores", "epoch", "train_loss", "test_loss", "accuracy", "seconds"]
                writer.writerow(names)
                writer.writerows(rows)


def main() -> None:
    """Meet the other ranks, and learn with them."""
    args = arguments()
    device = meet(cuda=not args.no_cuda and can_use_cuda())
    learn(args, device)
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
