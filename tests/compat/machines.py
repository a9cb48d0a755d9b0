"""The machines and questions on which gpu_affinity's answers are recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

from gpuaff.topology.model import Gpu, Source, Topology
from tests.allocator.described import box, cpus, dgx_a100, one_node, packed_cores, spread_cores

Options: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """A machine, whose ``allowed`` is the mask of every rank, and a job of ``nproc`` ranks on it.

    ``visible`` is CUDA_VISIBLE_DEVICES; ``cpu_count`` what ``os.cpu_count()`` says, by default how
    many CPUs there are.
    """

    machine: Topology
    nproc: int
    visible: str | None = None
    cpu_count: int | None = None


def _options() -> dict[str, Options]:
    modes = ("all", "single", "single_unique", "unique_contiguous", "unique_interleaved")
    unique = modes[3:]
    scopes = ("node", "socket")
    asked: list[Options] = [
        *({"mode": mode, "scope": scope} for mode, scope in product(modes, scopes)),
        *({"mode": mode, "scope": scope, "balanced": False} for mode in unique for scope in scopes),
        *({"mode": mode, "multithreading": "single_logical"} for mode in ("single", unique[0])),
        *({"mode": mode, "max_physical_cores": 1} for mode in ("all", unique[1])),
        *({"mode": mode, "max_physical_cores": 3, "scope": "socket"} for mode in ("all", *unique)),
        *({"mode": mode, "min_physical_cores": 5} for mode in ("all", "single_unique", unique[0])),
    ]
    return {" ".join(f"{name}={value}" for name, value in one.items()): one for one in asked}


OPTIONS = _options()
"""What is asked on each machine, by how the table calls it."""


def dgx_h100(*, allowed: str | None = None) -> Topology:
    """Two nodes of 56 cores (i, i + 112), four GPUs at each."""
    return box(
        spread_cores(112),
        nodes=[range(56), range(56, 112)],
        sockets=[[0], [1]],
        gpus=[0, 0, 0, 0, 1, 1, 1, 1],
        allowed=allowed,
    )


def _overlapping() -> Topology:
    """Four cores; GPU 0 is near the first three, GPU 1 near the last three."""
    machine = one_node(spread_cores(4, smt=1), gpus=2)
    near = (cpus("0-2"), cpus("1-3"))
    gpus = [g._replace(node_cpus=n, socket_cpus=n) for g, n in zip(machine.gpus, near, strict=True)]
    return machine._replace(gpus=tuple(gpus))


def _sparse() -> Topology:
    """Two of the sockets' CPUs 0-3 and 64-67 exist."""
    halves = (cpus("0-3"), cpus("64-67"))
    gpus = [
        Gpu(index=i, node_cpus=half, socket_cpus=half, numa_node=i, source=Source.NVML)
        for i, half in enumerate(halves)
    ]
    online = cpus("0-3,64-67")
    return Topology(
        cpus=online,
        allowed=online,
        cores=tuple(frozenset((cpu,)) for cpu in sorted(online)),
        gpus=tuple(gpus),
        visible=(0, 1),
    )


def _six_gpus() -> Topology:
    """Node 0 with four GPUs, node 1 with two; 24 cores each."""
    return box(
        spread_cores(48),
        nodes=[range(24), range(24, 48)],
        sockets=[[0], [1]],
        gpus=[0, 0, 0, 0, 1, 1],
    )


def _uneven() -> Topology:
    """Node 0: ten cores, three GPUs; node 1: four cores, one GPU; one CPU a core."""
    return box(
        spread_cores(14, smt=1),
        nodes=[range(10), range(10, 14)],
        sockets=[[0], [1]],
        gpus=[0, 0, 0, 1],
    )


def _uneven_deal() -> Topology:
    """One socket: node 0 with cores 0-3 and two GPUs, node 1 with cores 4-9."""
    return box(
        spread_cores(10, smt=1), nodes=[range(4), range(4, 10)], sockets=[[0, 1]], gpus=[0, 0]
    )


CASES: Mapping[str, Case] = {
    "dgx-a100": Case(dgx_a100(), 8),
    "dgx-a100, two ranks": Case(dgx_a100(), 2),
    "dgx-a100, GPUs 6,1,0": Case(dgx_a100(), 3, visible="6,1,0"),
    "dgx-a100, every second core": Case(dgx_a100(allowed="0-127:1/2,128-255:1/2"), 8),
    "dgx-a100, socket 0 allowed": Case(dgx_a100(allowed="0-63,128-191"), 4),
    "dgx-h100": Case(dgx_h100(), 8),
    "dgx-h100, without hyperthreads": Case(dgx_h100(allowed="0-111"), 8),
    "six GPUs": Case(_six_gpus(), 6),
    "uneven": Case(_uneven(), 4),
    "uneven deal": Case(_uneven_deal(), 2),
    "upper siblings": Case(one_node(spread_cores(4), gpus=2, allowed="2-7"), 2),
    "neighbour siblings": Case(one_node(packed_cores(6), gpus=2), 2),
    "one core a GPU": Case(one_node(spread_cores(2), gpus=2), 2),
    "fewer cores than GPUs": Case(one_node(spread_cores(2), gpus=3), 3),
    "more ranks than GPUs": Case(one_node(spread_cores(8), gpus=2), 3),
    "no near CPU allowed": Case(dgx_h100(allowed="0-55"), 8),
    "four threads a core": Case(one_node(packed_cores(4, smt=4), gpus=2), 2),
    "overlapping": Case(_overlapping(), 2),
    "ids above the count": Case(_sparse(), 2),
    "visible: empty": Case(one_node(spread_cores(8), gpus=1), 1, visible=""),
    "visible: doubled": Case(one_node(spread_cores(8), gpus=2), 2, visible="0,0"),
    "visible: ends at -1": Case(one_node(spread_cores(8), gpus=2), 2, visible="1,-1"),
}
