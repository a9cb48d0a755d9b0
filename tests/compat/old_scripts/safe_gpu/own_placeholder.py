"""As in scripts without a framework of safe_gpu's: a placeholder and an owner of their own."""

import logging
import sys

import stand_in_cuda
from safe_gpu.safe_gpu import GPUOwner


class MyPlaceholder:
    def __call__(self, device_no):
        stand_in_cuda.retain(device_no)
        return device_no

    def release(self, placeholder):
        stand_in_cuda.release(placeholder)
        print(f"let {placeholder} go")


logger = logging.getLogger("mine")
logger.addHandler(logging.StreamHandler())
logger.setLevel(logging.INFO)
owner = GPUOwner(2, MyPlaceholder(), logger=logger, debug_sleep=0.1)
print(*owner.devices_taken, owner.placeholders)
sys.stdin.readline()  # trains
owner.release_gpus()
print(owner.devices_taken)
sys.stdin.readline()
