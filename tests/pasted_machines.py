"""What people pasted, what each figure was read from, and the plans that follow.

All of it was worked out by hand from the files in ``data/pastes``; the topologies in
``data/topologies`` were written from the same table of cells, and not by the parser.

Unless a comment says otherwise the plans follow from one rule: the cores near a GPU, ascending,
are cut into as many blocks as there are GPUs with the same list. Lists that are two equal runs of
CPUs, all at one distance d, tell that the cores are i and i + d; where nothing tells which CPUs
share a core, each counts as one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.topology.model import MigInstance, Topology

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Cells:
    """Where the figures of GPUs were read: lines of the paste, one after another.

    Attributes:
        line: the number of the first GPU's line in the file, from 1.
        gpus: the GPUs of this and the following lines.
        cpu: the cell "CPU Affinity" of each.
        numa: the cell "NUMA Affinity"; None where there is no such column.
        gpu_numa: the cell "GPU NUMA ID"; None where there is no such column.
    """

    line: int
    gpus: range
    cpu: str
    numa: str | None
    gpu_numa: str | None


@dataclass(frozen=True)
class Plan:
    """One plan: the cpulist of each rank."""

    ranks: list[str]
    balanced: bool = True


@dataclass(frozen=True)
class Pasted:
    """One file.

    Attributes:
        name: its name without the suffix.
        cells: where the GPUs' figures stand.
        cpus: what told the CPUs, cores, packages and nodes, if not the union of the cells.
        plans: the plans that follow.
    """

    name: str
    cells: list[Cells]
    plans: list[Plan]
    cpus: str = ""

    @property
    def text(self) -> str:
        return (DATA / "pastes" / f"{self.name}.txt").read_text("utf-8")

    @property
    def saved_path(self) -> Path:
        return DATA / "topologies" / f"{self.name}.json"

    @property
    def saved(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.saved_path.read_text("utf-8"))
        return found


def one(gpu: int) -> range:
    return range(gpu, gpu + 1)


MACHINES = [
    # Empty cells: not one CPU is known, so no rank gets any.
    Pasted("01-wsl2-1gpu-empty-affinity", [Cells(4, one(0), "", "", "N/A")], [Plan([""])]),
    Pasted("02-kvm-vm-1gpu-8cpu", [Cells(4, one(0), "0-7", "0", "N/A")], [Plan(["0-7"])]),
    # 24 cores a node, CPU i with i + 48: twelve cores for each of two GPUs.
    Pasted(
        "04-a30x4-2socket-xeon6342",
        [
            Cells(13, range(2), "0-23,48-71", "0", "N/A"),
            Cells(15, range(2, 4), "24-47,72-95", "1", "N/A"),
        ],
        [Plan(["0-11,48-59", "12-23,60-71", "24-35,72-83", "36-47,84-95"])],
        cpus="line 3 on-line list; lines 5-7 threads, cores, sockets (2 x 24 x 2 = 96, so the "
        "cores are i, i + 48); lines 9-10 nodes, one to each socket",
    ),
    Pasted(
        "06-a100x2-kvm-1numa-32vcpu",
        [Cells(16, range(2), "0-31", "0", "N/A")],
        [Plan(["0-15", "16-31"])],
        cpus="line 3 on-line list; line 5 one thread per core; line 7 one socket; line 12 node",
    ),
    # 24 cores a node, i with i + 48, for four GPUs: six cores each.
    Pasted(
        "08-v100x8-dgx1-no-gpu-numa-id",
        [
            Cells(3, range(4), "0-23,48-71", "0", None),
            Cells(7, range(4, 8), "24-47,72-95", "1", None),
        ],
        [
            Plan(
                [
                    "0-5,48-53",
                    "6-11,54-59",
                    "12-17,60-65",
                    "18-23,66-71",
                    "24-29,72-77",
                    "30-35,78-83",
                    "36-41,84-89",
                    "42-47,90-95",
                ],
            )
        ],
    ),
    Pasted("09-gh200x1-gpu-numa-id-1", [Cells(11, one(0), "0-71", "0", "1")], [Plan(["0-71"])]),
    # Sixteen cores, i with i + 128, for two GPUs: eight each.
    Pasted(
        "11-a100x2-slurm-10cores-numa3",
        [Cells(3, range(2), "48-63,176-191", "3", "N/A")],
        [Plan(["48-55,176-183", "56-63,184-191"])],
    ),
    # 56 cores a node, i with i + 112, for four GPUs: fourteen each. The next machine is alike.
    Pasted(
        "12-rtx4090x8-all-sys",
        [
            Cells(3, range(4), "0-55,112-167", "0", "N/A"),
            Cells(7, range(4, 8), "56-111,168-223", "1", "N/A"),
        ],
        [
            Plan(
                [
                    "0-13,112-125",
                    "14-27,126-139",
                    "28-41,140-153",
                    "42-55,154-167",
                    "56-69,168-181",
                    "70-83,182-195",
                    "84-97,196-209",
                    "98-111,210-223",
                ],
            )
        ],
    ),
    Pasted(
        "14-h200x8-12nic-dgx-style",
        [
            Cells(5, range(4), "0-55,112-167", "0", "N/A"),
            Cells(9, range(4, 8), "56-111,168-223", "1", "N/A"),
        ],
        [
            Plan(
                [
                    "0-13,112-125",
                    "14-27,126-139",
                    "28-41,140-153",
                    "42-55,154-167",
                    "56-69,168-181",
                    "70-83,182-195",
                    "84-97,196-209",
                    "98-111,210-223",
                ],
            )
        ],
    ),
    # 56 cores, i with i + 112, for two GPUs: 28 each.
    Pasted(
        "15-h100x2-both-on-numa1",
        [Cells(4, range(2), "56-111,168-223", "1", "N/A")],
        [Plan(["56-83,168-195", "84-111,196-223"])],
    ),
    Pasted(
        "19-4gpu-cloud-1numa-indented",
        [Cells(3, range(4), "0-47", "0", "N/A")],
        [Plan(["0-11", "12-23", "24-35", "36-47"])],
    ),
    Pasted("20-gb10-spark-1gpu", [Cells(4, one(0), "0-19", "0", "N/A")], [Plan(["0-19"])]),
    Pasted(
        "21-aws-p3-8xlarge-v100x4-numa-na-shifted",
        [Cells(4, range(4), "0-31", "N/A", None)],
        [Plan(["0-7", "8-15", "16-23", "24-31"])],
    ),
    Pasted(
        "22-desktop-2gpu-numa-na",
        [Cells(4, range(2), "0-11", "N/A", "N/A")],
        [Plan(["0-5", "6-11"])],
    ),
    # One core, its two hyperthreads far apart: it suffices for one rank, and more share it.
    Pasted(
        "24-a100x4-slurm-one-core-numa-0-3",
        [Cells(5, range(4), "0,64", "0-3", None)],
        [Plan(["0,64"]), Plan(["0,64", "0,64", "0,64", "0,64"])],
    ),
    # Four GPUs share 24 cores (i with i + 48), two GPUs the other 24: 24 / 4 = 6 and 24 / 2 = 12,
    # so balanced all get six, which leaves the cores 36-47 free.
    Pasted(
        "26-6gpu-4plus2-unbalanced",
        [
            Cells(4, range(4), "0-23,48-71", "0", "N/A"),
            Cells(8, range(4, 6), "24-47,72-95", "1", "N/A"),
        ],
        [
            Plan(
                [
                    "0-5,48-53",
                    "6-11,54-59",
                    "12-17,60-65",
                    "18-23,66-71",
                    "24-29,72-77",
                    "30-35,78-83",
                ]
            ),
            Plan(
                [
                    "0-5,48-53",
                    "6-11,54-59",
                    "12-17,60-65",
                    "18-23,66-71",
                    "24-35,72-83",
                    "36-47,84-95",
                ],
                balanced=False,
            ),
        ],
    ),
    Pasted(
        "28-a100x2-128core-no-smt",
        [Cells(3, one(0), "0-63", "0", None), Cells(4, one(1), "64-127", "1", None)],
        [Plan(["0-63", "64-127"])],
    ),
    # Two GPUs on each of four nodes of sixteen cores, i with i + 128: eight each (a DGX A100 by
    # another name: gpu-affinity rule 4 has its answers).
    Pasted(
        "29-a100x8-nps4-with-lscpu-8numa",
        [
            Cells(12, range(2), "48-63,176-191", "3", None),
            Cells(14, range(2, 4), "16-31,144-159", "1", None),
            Cells(16, range(4, 6), "112-127,240-255", "7", None),
            Cells(18, range(6, 8), "80-95,208-223", "5", None),
        ],
        [
            Plan(
                [
                    "48-55,176-183",
                    "56-63,184-191",
                    "16-23,144-151",
                    "24-31,152-159",
                    "112-119,240-247",
                    "120-127,248-255",
                    "80-87,208-215",
                    "88-95,216-223",
                ],
            )
        ],
        cpus="lines 2-9: the union of the eight nodes",
    ),
    # 128 cores a node, i with i + 256, for two GPUs: 64 each.
    Pasted(
        "30-l40x4-512cpu-2socket",
        [
            Cells(4, range(2), "0-127,256-383", "0", "N/A"),
            Cells(6, range(2, 4), "128-255,384-511", "1", "N/A"),
        ],
        [Plan(["0-63,256-319", "64-127,320-383", "128-191,384-447", "192-255,448-511"])],
    ),
    # Cut lists are not used: the twelve CPUs that they name are shared by all four.
    Pasted(
        "31-4gpu-interleaved-both-sockets-truncated",
        [
            Cells(4, range(2), "0,2,4,6,8,10", "0", "N/A"),
            Cells(6, range(2, 4), "1,3,5,7,9,11", "1", "N/A"),
        ],
        [Plan(["0-2", "3-5", "6-8", "9-11"])],
    ),
    Pasted(
        "33-rtx5090x2-1numa-desktop",
        [Cells(3, range(2), "0-63", "0", "N/A")],
        [Plan(["0-31", "32-63"])],
    ),
    # 24 cores are known, i with i + 48: six for each of four GPUs. GPUs without a row share them
    # too, and of sixteen each has one, for 24 / 16 is less than two.
    Pasted(
        "35-dgx2-v100x16-no-numa-column-partial",
        [Cells(4, range(4), "0-23,48-71", None, None)],
        [
            Plan(["0-5,48-53", "6-11,54-59", "12-17,60-65", "18-23,66-71"]),
            Plan(
                [
                    "0,48",
                    "1,49",
                    "2,50",
                    "3,51",
                    "4,52",
                    "5,53",
                    "6,54",
                    "7,55",
                    "8,56",
                    "9,57",
                    "10,58",
                    "11,59",
                    "12,60",
                    "13,61",
                    "14,62",
                    "15,63",
                ],
            ),
        ],
    ),
    # No GPU: a rank keeps all.
    Pasted(
        "37-gh200-lscpu-9-nodes",
        [],
        [Plan(["0-71"])],
        cpus="line 4: node 0; lines 5-12: eight nodes without CPUs",
    ),
    Pasted(
        "46-h100x8-1numa-192cpu-vm",
        [Cells(5, range(8), "0-191", "0", "N/A")],
        [
            Plan(
                ["0-23", "24-47", "48-71", "72-95", "96-119", "120-143", "144-167", "168-191"],
            )
        ],
    ),
    Pasted(
        "49-gh200x4-alps-gpu-numa-id-4-12-20-28",
        [
            Cells(4, one(0), "0-71", "0", "4"),
            Cells(5, one(1), "72-143", "1", "12"),
            Cells(6, one(2), "144-215", "2", "20"),
            Cells(7, one(3), "216-287", "3", "28"),
        ],
        [Plan(["0-71", "72-143", "144-215", "216-287"])],
        cpus="lines 13-16: the union of the four nodes that are listed of the 36 in line 12",
    ),
]


def plain(topology: Topology) -> dict[str, Any]:
    """A topology as its JSON should be, written apart from the package's own writer."""
    return {
        "schema_version": 1,
        "cpus": _list(topology.cpus) or None,
        "allowed": _list(topology.allowed) or None,
        "cores": topology.cores and [_list(core) for core in topology.cores],
        "efficiency_cpus": _list(topology.efficiency_cpus),
        "packages": topology.packages
        and [{"id": package.id, "cpus": _list(package.cpus)} for package in topology.packages],
        "l3": topology.l3 and [_list(domain) for domain in topology.l3],
        "numa_nodes": topology.numa_nodes
        and [
            {
                "id": node.id,
                "cpus": _list(node.cpus),
                "has_memory": node.has_memory,
                "distances": node.distances and list(node.distances),
            }
            for node in topology.numa_nodes
        ],
        "gpus": [
            {
                "index": gpu.index,
                "uuid": gpu.uuid,
                "pci_bus_id": gpu.pci_bus_id,
                "name": gpu.name,
                "node_cpus": _known(gpu.node_cpus),
                "socket_cpus": _known(gpu.socket_cpus),
                "local_cpus": _known(gpu.local_cpus),
                "numa_node": gpu.numa_node,
                "memory_node": gpu.memory_node,
                "source": gpu.source and gpu.source.value,
                "mig": gpu.mig and [_instance(instance) for instance in gpu.mig],
            }
            for gpu in topology.gpus
        ],
        "links": topology.links and [list(row) for row in topology.links],
        "visible": list(topology.visible),
    }


def _instance(instance: MigInstance) -> dict[str, Any]:
    return {
        "uuid": instance.uuid,
        "gpu_instance": instance.gpu_instance,
        "compute_instance": instance.compute_instance,
    }


def _list(cpus: CpuSet) -> str:
    return format_cpulist(cpus)


def _known(cpus: CpuSet | None) -> str | None:
    return None if cpus is None else _list(cpus)
