"""As in scripts with many flags: enums made from words, NVML counted, the error caught."""

import argparse
import logging
import os
import sys

from pynvml import nvmlDeviceGetCount, nvmlInit


def pin(args):
    import gpu_affinity

    nvmlInit()
    nproc_per_node = nvmlDeviceGetCount()
    local_rank = int(os.environ["SLURM_LOCALID"])
    try:
        affinity = gpu_affinity.set_affinity(
            local_rank,
            nproc_per_node,
            mode=gpu_affinity.Mode(args.affinity),
            scope=gpu_affinity.Scope.SOCKET,
            multithreading=gpu_affinity.Multithreading[args.threads.upper()],
            balanced=True,
            min_physical_cores=args.cores,
            max_physical_cores=args.cores,
        )
    except gpu_affinity.GPUAffinityError as error:
        logging.warning("no affinity: %s", error)
        return None
    return affinity


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--affinity", default="single_unique")
    parser.add_argument("--threads", default="single_logical")
    parser.add_argument("--cores", type=int, default=1)
    affinity = pin(parser.parse_args())
    print(sorted(affinity) if affinity else "none", len(affinity or ()))
    sys.stdin.readline()  # trains


if __name__ == "__main__":
    main()
