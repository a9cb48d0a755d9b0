"""How long it takes to list the accelerators of a large machine, and to cut it among them.

python benchmarks/domains.py
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable

import large_machine

from gpuaff._system.kernel import Tree
from gpuaff.allocator.domains import gpu_domains
from gpuaff.cpuset import format_cpulist
from gpuaff.topology.model import Gpu, Topology
from gpuaff.topology.sysfs import accelerators, read_cpus

GPUS = 16


def make_devices(root: pathlib.Path, machine: Topology, count: int) -> None:
    """Write PCI devices: GPUs next to every other node, and bridges."""
    nodes = machine.numa_nodes or ()
    for number in range(count):
        folder = root / f"sys/bus/pci/devices/0000:{number // 8:02x}:00.{number % 8}"
        folder.mkdir(parents=True)
        node = nodes[number * 2 % len(nodes)]
        kind = "0x030200" if number < GPUS else "0x060400"
        files = {
            "class": kind,
            "vendor": "0x10de",
            "numa_node": str(node.id),
            "local_cpulist": format_cpulist(node.cpus),
        }
        for name, text in files.items():
            (folder / name).write_text(text + "\n")


def median(run: Callable[[], object], times: int) -> float:
    """Milliseconds."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        taken.append((time.perf_counter() - start) * 1e3)
    return statistics.median(taken)


def main() -> None:
    """Measure, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpus", type=int, default=2048)
    parser.add_argument("--devices", type=int, default=300)
    parser.add_argument("--times", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        large_machine.make(root, cpus=args.cpus)
        machine = read_cpus(Tree(folder))
        make_devices(root, machine, args.devices)
        devices = accelerators(Tree(folder), machine)
        assert len(devices) == GPUS
        listing = median(lambda: accelerators(Tree(folder), machine), args.times)
    gpus = tuple(Gpu(index=n, pci_bus_id=one.pci_bus_id) for n, one in enumerate(devices))
    topology = machine._replace(gpus=gpus, accelerators=devices)
    cutting = median(lambda: gpu_domains(topology), args.times)
    print(f"{GPUS} accelerators among {args.devices} PCI devices: median {listing:.1f} ms")
    print(f"domains of {args.cpus} CPUs: median {cutting:.1f} ms")


if __name__ == "__main__":
    main()
