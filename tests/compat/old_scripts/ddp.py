"""As in most training scripts: torchrun's variable, one process for each GPU."""

import argparse
import os
import sys

import gpu_affinity
import torch


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=os.getenv("LOCAL_RANK", 0))
    return parser.parse_args()


def main():
    args = parse_args()
    nproc_per_node = torch.cuda.device_count()
    affinity = gpu_affinity.set_affinity(args.local_rank, nproc_per_node)
    print(f"{args.local_rank}: core affinity: {affinity}")
    sys.stdin.readline()  # trains


if __name__ == "__main__":
    main()
