"""How long it takes to read the CPUs of a large machine, beside gpu_affinity's reader.

python benchmarks/read_sysfs.py --peer PATH_TO_A_CHECKOUT_OF_GPU_AFFINITY
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from types import SimpleNamespace

import large_machine

from gpuaff._system.kernel import Tree
from gpuaff.topology.sysfs import read_cpus


def timed(run: Callable[[], object], times: int) -> list[float]:
    """Milliseconds of each of some runs."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        taken.append((time.perf_counter() - start) * 1e3)
    return taken


def peer_reader(checkout: str, root: pathlib.Path) -> Callable[[], object]:
    """gpu_affinity's reader of siblings, led to the tree; it runs twice per set_affinity."""
    sys.path.insert(0, checkout)
    from gpu_affinity import gpu_affinity as peer

    peer.pathlib = SimpleNamespace(Path=lambda _: root)
    return lambda: (peer.get_thread_siblings_list(), peer.get_thread_siblings_list())


def main() -> None:
    """Measure, interleaved, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpus", type=int, default=2048)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--peer")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        large_machine.make(root, cpus=args.cpus)
        assert len(read_cpus(Tree(folder)).cores or ()) == args.cpus // 2
        peer = peer_reader(args.peer, root) if args.peer else None
        ours: list[float] = []
        theirs: list[float] = []
        for _ in range(args.times):
            ours += timed(lambda: read_cpus(Tree(folder)), 1)
            theirs += timed(peer, 1) if peer else []
    print(f"gpuaff, all of {args.cpus} CPUs: median {statistics.median(ours):.1f} ms")
    if theirs:
        print(f"gpu_affinity, siblings, twice: median {statistics.median(theirs):.1f} ms")
        print(f"ratio {statistics.median(ours) / statistics.median(theirs):.2f}")


if __name__ == "__main__":
    main()
