"""As in most scripts: the GPUs are claimed at the top, before the framework touches them."""

import argparse
import logging
import os
import sys

from safe_gpu import safe_gpu

parser = argparse.ArgumentParser()
parser.add_argument("--nb-gpus", type=int, default=1)
args = parser.parse_args()

logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
safe_gpu.claim_gpus(args.nb_gpus)

import torch

taken = safe_gpu.gpu_owner.devices_taken
assert len(safe_gpu.gpu_owner.placeholders) == args.nb_gpus
model = [torch.zeros(1, device=f"cuda:{i}") for i in range(args.nb_gpus)]
print(f"on {taken}, visible: {os.environ['CUDA_VISIBLE_DEVICES']}")
sys.stdin.readline()  # trains
