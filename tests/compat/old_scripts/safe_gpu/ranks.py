"""As with Horovod: one process for each GPU, and each claims one."""

import sys

from safe_gpu import safe_gpu

safe_gpu.claim_gpus()

import horovod.torch as hvd
import torch

hvd.init()
torch.zeros(1, device="cuda:0")
print(hvd.rank(), *safe_gpu.gpu_owner.devices_taken)
sys.stdin.readline()  # trains
