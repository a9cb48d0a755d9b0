"""As its README shows: whether there are GPUs at all is found out by claiming."""

import sys

import safe_gpu.safe_gpu as sg

try:
    sg.claim_gpus(nb_gpus=1, placeholder_fn=sg.PytorchPlaceholder())
    device = "cuda"
except (sg.NvidiasmiError, FileNotFoundError):
    device = "cpu"
except RuntimeError:
    device = "none free"
print(device)
sys.stdin.readline()  # trains
