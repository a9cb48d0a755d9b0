"""What inputs begin with: real texts, machines that ship, and texts made by each format's rules."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from gpuaff.cpuset import format_cpulist
from gpuaff.notices import Notice
from gpuaff.topology import serialize
from gpuaff.topology.model import Accelerator, Gpu, MigInstance, NumaNode, Package, Topology

DATA = Path(__file__).parents[1] / "data"
UUID = "{:08x}-1111-2222-3333-444444444444"


@cache
def pastes() -> tuple[str, ...]:
    """What people pasted, and what lscpu printed for other machines."""
    files = [*sorted((DATA / "pastes").iterdir()), *sorted((DATA / "lscpu").iterdir())]
    files += sorted((DATA / "threads").glob("*.txt"))
    return tuple(file.read_text("utf-8") for file in files)


@cache
def topologies() -> tuple[str, ...]:
    """Saved machines, as JSON text."""
    files = sorted((DATA / "topologies").iterdir())
    shipped = [json.dumps(serialize.named(name).to_dict()) for name in serialize.machine_names()]
    return (*(file.read_text("utf-8") for file in files), *shipped)


class Printer:
    """A random machine, and what the commands print on it."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self.threads = random.choice((1, 2, 2, 4, 8))
        self.sockets = random.randint(1, 4)
        self.nodes = self.sockets * random.choice((1, 1, 2, 4))
        self.per_node = random.choice((1, 2, 4, 6, 16))
        self.gpus = 300 if random.random() < 0.002 else random.choice((0, 1, 2, 4, 8, 16))
        self.apart = random.random() < 0.6
        self.count = self.threads * self.nodes * self.per_node

    def core(self, cpu: int) -> int:
        """The core of a CPU."""
        return cpu % (self.count // self.threads) if self.apart else cpu // self.threads

    def node(self, cpu: int) -> int:
        """The node of a CPU."""
        return self.core(cpu) // self.per_node

    def near(self, node: int) -> str:
        """The CPUs of a node."""
        return format_cpulist(cpu for cpu in range(self.count) if self.node(cpu) == node)

    def text(self) -> str:
        """What some of the commands print, in any order."""
        printers: list[Callable[[], str]] = [self.topo, self.lscpu, self.lscpu_parsable]
        printers += [self.lscpu_extended, self.numactl, self.listed]
        chosen = self._random.sample(printers, self._random.randint(1, 4))
        return "\n".join(printer() for printer in chosen)

    def topo(self) -> str:
        """``nvidia-smi topo -m``."""
        devices = [f"GPU{gpu}" for gpu in range(self.gpus)]
        devices += [f"NIC{nic}" for nic in range(self._random.randint(0, 3))]
        columns = ["CPU Affinity", "NUMA Affinity", "GPU NUMA ID"][: self._random.randint(1, 3)]
        lines = ["\t" + "\t".join([*devices, *columns])]
        for row, device in enumerate(devices):
            links = [self._link(row, column) for column in range(len(devices))]
            node = row * self.nodes // max(1, self.gpus)
            tail = [self.near(node), str(node), "\tN/A"] if row < self.gpus else []
            lines.append("\t".join([device, *links, *tail[: len(columns)]]))
        return "\n".join(lines) + "\n\nLegend:\n\n  X    = Self\n"

    def _link(self, row: int, column: int) -> str:
        return " X " if row == column else self._random.choice(("NV12", "SYS", "NODE", "PIX"))

    def lscpu(self) -> str:
        """``lscpu``."""
        lines = [
            f"CPU(s):                  {self.count}",
            f"On-line CPU(s) list:     0-{self.count - 1}",
            f"Thread(s) per core:      {self.threads}",
            f"Core(s) per socket:      {self.count // self.threads // self.sockets}",
            f"Socket(s):               {self.sockets}",
            f"NUMA node(s):            {self.nodes}",
        ]
        lines += [f"NUMA node{node} CPU(s):    {self.near(node)}" for node in range(self.nodes)]
        return "\n".join(lines) + "\n"

    def _row(self, cpu: int) -> tuple[int, int, int, int]:
        return cpu, self.core(cpu), self.node(cpu) * self.sockets // self.nodes, self.node(cpu)

    def _lscpu_rows(self, header: str, row: str) -> str:
        rows = [row.format(*self._row(cpu)) for cpu in range(self.count)]
        return "\n".join([header, *rows, ""])

    def lscpu_parsable(self) -> str:
        """``lscpu -p``."""
        header = "# CPU,Core,Socket,Node,,L1d,L1i,L2,L3"
        return self._lscpu_rows(header, "{0},{1},{2},{3},,{1},0,0,{3}")

    def lscpu_extended(self) -> str:
        """``lscpu -e``."""
        header = "CPU CORE SOCKET NODE L1d:L1i:L2:L3 ONLINE"
        return self._lscpu_rows(header, "{0:3} {1:4} {2:6} {3:4} 0:0:0:{3} yes")

    def numactl(self) -> str:
        """``numactl -H``."""
        lines = [f"available: {self.nodes} nodes (0-{self.nodes - 1})"]
        for node in range(self.nodes):
            cpus = (str(cpu) for cpu in range(self.count) if self.node(cpu) == node)
            lines += [f"node {node} cpus: {' '.join(cpus)}", f"node {node} size: 64000 MB"]
        ids = [str(node) for node in range(self.nodes)]
        lines += ["node distances:", "node   " + "   ".join(ids)]
        lines += [
            f"  {row}:  " + "  ".join("10" if row == column else "21" for column in ids)
            for row in ids
        ]
        return "\n".join(lines) + "\n"

    def listed(self) -> str:
        """``nvidia-smi -L``."""
        lines = []
        for gpu in range(self.gpus):
            uuid = UUID.format(gpu)
            lines.append(f"GPU {gpu}: NVIDIA A100-SXM4-40GB (UUID: GPU-{uuid})")
            for number in range(self._random.choice((0, 0, 0, 2))):
                name = self._random.choice(
                    (f"MIG-{UUID.format(99 + 2 * gpu + number)}", f"MIG-GPU-{uuid}/{number}/0")
                )
                lines.append(f"  MIG 1g.5gb      Device  {number}: (UUID: {name})")
        return "\n".join(lines) + "\n"


def nested(random: Random, depth: int) -> Any:
    """JSON values of any shape."""
    if depth <= 0 or random.random() < 0.4:
        return random.choice(SCALARS)
    if random.random() < 0.5:
        return [nested(random, depth - 1) for _ in range(random.randint(0, 4))]
    return {random.choice(KEYS): nested(random, depth - 1) for _ in range(random.randint(0, 4))}


SCALARS: Sequence[Any] = [
    None, True, False, 0, 1, -1, 2, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**64, 10**400,
    0.0, 1.5, 1e308, "", " ", "0", "0-3", "4-7", "0-3,8", "0-65535", "3-0", "0-31:2/8", "x", "\0",
    "\n", "é",
    "\ud800", "nvml", "sysfs", "given", "nearest", "all", "GPU-0", "MIG-0", "0000:07:00.0",
    "00000000:07:00.0", "X", "NV12", "a" * 1000, "9" * 5000, "٣",
]  # fmt: skip
_RECORDS = (Topology, Package, NumaNode, Gpu, MigInstance, Accelerator, Notice)
KEYS = ["schema_version", "other", *(name for kind in _RECORDS for name in kind._fields)]
