"""How long does planning take on a large machine?

    python benchmarks/plan.py                       2048 CPUs, 16 GPUs, every mode and scope
    python benchmarks/plan.py --masks               the same, each rank with a mask of its own
    python benchmarks/plan.py --peer CHECKOUT       beside NVIDIA's gpu_affinity, in one run

A time is the median CPU time of several plans in one warm process, from a topology that is in
memory: nothing that an earlier plan worked out is used again. The peer is handed the same
machine in place of NVML and sysfs, so that only its planning is timed too.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from statistics import median
from typing import Any
from unittest import mock

from gpuaff.allocator.model import Mode, Scope
from gpuaff.allocator.plan import plan
from gpuaff.errors import GPUAffinityError
from gpuaff.topology.model import Gpu, NumaNode, Package, Source, Topology


def main() -> None:
    """Print the median time of a plan, in milliseconds, for each mode and scope."""
    options = _arguments()
    machine = _machine(options)
    print(f"{len(machine.cpus)} CPUs, {len(machine.cores or ())} cores, {len(machine.gpus)} GPUs,")
    print(
        f"{options.nodes} NUMA nodes, {options.sockets} sockets; CPU ms, median of {options.runs}"
    )
    masks = _masks(machine) if options.masks else None
    peer = _Peer(options.peer, machine) if options.peer else None
    print(f"{'mode':20}{'scope':8}{'gpuaff':>9}" + (f"{'peer':>9}{'ratio':>9}" if peer else ""))
    for mode, scope in product(Mode, Scope):
        own = _median(lambda: _own(machine, mode, scope, masks), options.runs)  # noqa: B023 - called at once
        line = f"{mode!s:20}{scope!s:8}{own:9.2f}"
        if peer is not None:
            theirs = _median(lambda: peer.plan(mode, scope), options.runs)  # noqa: B023 - called at once
            line += f"{theirs:9.2f}{theirs / own:9.1f}"
        print(line, flush=True)


def _own(machine: Topology, mode: Mode, scope: Scope, masks: list[frozenset[int]] | None) -> object:
    return plan(machine, len(machine.gpus), mode=mode, scope=scope, rank_allowed=masks)


def _masks(machine: Topology) -> list[frozenset[int]]:
    """For each rank the CPUs near its GPU, so that masks overlap where near sets do."""
    return [frozenset(set(gpu.node_cpus or ())) for gpu in machine.gpus]


def _median(call: Callable[[], object], runs: int) -> float:
    times = []
    for _ in range(runs):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return 1000 * median(times)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cpus", type=int, default=2048, help="logical CPUs (default: 2048)")
    parser.add_argument("--smt", type=int, default=2, help="CPUs of a core (default: 2)")
    parser.add_argument("--gpus", type=int, default=16, help="GPUs and ranks (default: 16)")
    parser.add_argument("--nodes", type=int, default=16, help="NUMA nodes (default: 16)")
    parser.add_argument("--sockets", type=int, default=2, help="sockets (default: 2)")
    parser.add_argument("--runs", type=int, default=15, help="plans per figure (default: 15)")
    parser.add_argument(
        "--overlap", action="store_true", help="near sets that overlap (the peer refuses these)"
    )
    parser.add_argument(
        "--masks", action="store_true", help="a mask for each rank (the peer cannot have these)"
    )
    parser.add_argument("--peer", metavar="PATH", help="a checkout of gpu_affinity to compare with")
    return parser.parse_args()


def _machine(options: argparse.Namespace) -> Topology:
    count = options.cpus // options.smt
    cores = tuple(frozenset(range(core, count * options.smt, count)) for core in range(count))
    nodes = _parts(cores, options.nodes)
    sockets = _parts(cores, options.sockets)
    online = frozenset(range(count * options.smt))
    return Topology(
        cpus=online,
        allowed=online,
        cores=cores,
        l3=tuple(_parts(cores, max(count // 8, 1))),
        packages=tuple(Package(id=place, cpus=cpus) for place, cpus in enumerate(sockets)),
        numa_nodes=tuple(NumaNode(id=place, cpus=cpus) for place, cpus in enumerate(nodes)),
        gpus=tuple(
            Gpu(
                index=gpu,
                # Sets of their own, as a driver's answers are read one by one.
                node_cpus=frozenset(
                    set(online - cores[gpu] if options.overlap else _of(nodes, gpu, options.gpus))
                ),
                socket_cpus=frozenset(set(_of(sockets, gpu, options.gpus))),
                source=Source.NVML,
            )
            for gpu in range(options.gpus)
        ),
        visible=tuple(range(options.gpus)),
    )


def _parts(cores: tuple[frozenset[int], ...], ways: int) -> list[frozenset[int]]:
    size = len(cores) // ways
    return [frozenset().union(*cores[at * size : (at + 1) * size]) for at in range(ways)]


def _of(parts: list[frozenset[int]], gpu: int, gpus: int) -> frozenset[int]:
    return parts[gpu * len(parts) // gpus]


class _Peer:
    """gpu_affinity's own functions, with a described machine where NVML and sysfs were."""

    def __init__(self, path: str, machine: Topology) -> None:
        sys.path.insert(0, path)
        self._module: Any = importlib.import_module("gpu_affinity.gpu_affinity")
        self._machine = machine
        self._siblings = [tuple(sorted(core)) for core in machine.cores or () if len(core) == 2]

    def plan(self, mode: Mode, scope: Scope) -> object:
        """All ranks' CPUs, which it works out before it takes its own."""
        module, count = self._module, len(self._machine.gpus)
        theirs, smt = module.Scope(str(scope)), module.Multithreading.ALL_LOGICAL
        with self._readers():
            if mode is Mode.ALL:
                return module.get_all(count, theirs, smt, 1, None)
            if mode is Mode.SINGLE:
                return module.get_single(count, theirs, smt)
            if mode is Mode.SINGLE_UNIQUE:
                return module.get_single_unique(count, theirs, smt)
            return module.get_unique(count, theirs, smt, module.Mode(str(mode)), 1, None)

    @contextmanager
    def _readers(self) -> Iterator[None]:
        lists = {
            gpu.index: {
                "node": sorted(gpu.node_cpus or ()),
                "socket": sorted(gpu.socket_cpus or ()),
            }
            for gpu in self._machine.gpus
        }

        class Device:
            def __init__(self, index: int) -> None:
                self.index = index

            def get_cpu_affinity(self, scope: object) -> list[int]:
                return lists[self.index][str(scope)]

        siblings = mock.Mock(return_value=self._siblings)
        with (
            mock.patch.multiple(self._module, Device=Device, get_thread_siblings_list=siblings),
            mock.patch.object(os, "sched_getaffinity", return_value=set(self._machine.allowed)),
        ):
            yield


if __name__ == "__main__":
    try:
        main()
    except (GPUAffinityError, ImportError) as error:
        sys.exit(f"benchmarks/plan.py: {error}")
