"""As in scripts that start their own ranks, with names imported one by one."""

import multiprocessing
import sys

from gpu_affinity import GPUAffinityError, Mode, set_affinity

NPROC = 2


def train(rank, ready, done):
    try:
        affinity = set_affinity(rank, NPROC, mode=Mode.UNIQUE_INTERLEAVED)
    except GPUAffinityError as error:
        sys.exit(str(error))
    affinity.add(-1)  # it was a set of the caller's own
    ready.put((rank, multiprocessing.current_process().pid))
    done.wait()


def main():
    fork = multiprocessing.get_context("fork")
    ready, done = fork.Queue(), fork.Event()
    workers = [fork.Process(target=train, args=(rank, ready, done)) for rank in range(NPROC)]
    for worker in workers:
        worker.start()
    print(*(pid for rank, pid in sorted(ready.get() for _ in workers)))
    sys.stdin.readline()  # trains
    done.set()
    for worker in workers:
        worker.join()


if __name__ == "__main__":
    main()
