"""Ranks that each claim a GPU for themselves, as Horovod's processes may; their device is then 0.

mpirun -n 2 python horovod_style.py          (or srun --mpi=pmix -n 2: all ranks in one MPI world)
mpirun -n 2 python horovod_style.py --cuda-first
"""

from __future__ import annotations

import argparse
import ctypes
import sys

import gpuaff


def start_cuda() -> None:
    """What `torch.cuda.is_available()`, `tf.config.list_physical_devices()` and others do."""
    ctypes.CDLL("libcuda.so.1").cuInit(0)


def devices() -> int:
    """How many GPUs CUDA shows."""
    cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    return count.value


def main() -> int:
    """Claim, and say what the training would use."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuda-first", action="store_true", help="the wrong order")
    args = parser.parse_args()
    local_rank = gpuaff.ranks().local_rank  # by whatever launcher

    if args.cuda_first:
        start_cuda()
    try:
        claim = gpuaff.claim_gpus(wait=60)  # 1. before CUDA, and before hvd.init()
    except gpuaff.ClaimError as error:
        sys.stdout.write(f"local rank {local_rank}: {type(error).__name__}: {error}\n")
        return 1
    from mpi4py import MPI  # 2. here in the place of: import horovod.torch as hvd; hvd.init()

    # 3. torch.cuda.set_device(0), and not hvd.local_rank(): CUDA shows this rank its GPU alone.
    start_cuda()
    sys.stdout.write(
        f"local rank {local_rank}: GPU {claim.gpus[0].index}, device {claim.gpus[0].local} of "
        f"{devices()}\n"
    )
    sys.stdout.flush()
    MPI.COMM_WORLD.Barrier()  # 4. in the place of training: no rank ends before all have a GPU
    return 0


if __name__ == "__main__":
    sys.exit(main())
