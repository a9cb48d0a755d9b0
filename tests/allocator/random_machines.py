"""Hypothesis strategies for machines."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import strategies as st

from gpuaff.cpuset import CpuSet, from_bits
from gpuaff.topology.model import Gpu, NumaNode, Package, Source, Topology
from tests.allocator.described import box, union

MODES = ("all", "single", "single_unique", "unique_interleaved", "unique_contiguous")
UNIQUE = ("unique_interleaved", "unique_contiguous")
SCOPES = ("node", "socket")


def some_of(ids: Iterable[int], *, least: int = 1) -> st.SearchStrategy[CpuSet]:
    """Subsets; drawn as one number, which is much faster than id by id."""
    known = sorted(ids)
    return st.integers(least, 2 ** len(known) - 1).map(
        lambda bits: frozenset(known[place] for place in from_bits(bits))
    )


@st.composite
def cores(draw: st.DrawFn) -> tuple[CpuSet, ...]:
    """Cores of 1 to 8 CPUs each (all alike), numbered in several ways and with gaps."""
    smt = draw(st.sampled_from((1, 2, 2, 4, 8)))
    count = draw(st.integers(1, 16 if smt < 4 else 8))
    order = draw(st.permutations(range(count)))
    packed = draw(st.booleans())
    stride = draw(st.integers(1, 3))
    places = [
        [core * smt + at if packed else at * count + core for at in range(smt)] for core in order
    ]
    return tuple(frozenset(stride * cpu for cpu in core) for core in places)


@st.composite
def regular(draw: st.DrawFn) -> Topology:
    """Machines whose GPUs' near sets are the same or apart, and whole cores.

    Nodes are cut out of the cores in any order, GPUs sit next to any node, the mask is any set
    that leaves every GPU a near CPU.
    """
    all_cores = draw(cores())
    order = draw(st.permutations(range(len(all_cores))))
    count = draw(st.integers(1, min(6, len(all_cores))))
    nodes = [order[at::count] for at in range(count)]
    per_socket = draw(st.integers(1, count))
    sockets = [range(at, min(at + per_socket, count)) for at in range(0, count, per_socket)]
    gpus = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=6))
    visible = draw(st.permutations(range(len(gpus))))
    machine = box(all_cores, nodes=nodes, sockets=sockets, gpus=gpus, visible=visible)
    needed = {draw(st.sampled_from(sorted(gpu.node_cpus or ()))) for gpu in machine.gpus}
    mask = draw(st.one_of(some_of(machine.cpus), st.just(machine.cpus)))
    return machine.with_allowed(mask | needed)


@st.composite
def any_machine(draw: st.DrawFn) -> Topology:
    """Machines of any kind: near sets that overlap, split cores, name CPUs that are not there
    or are not known at all; nodes without CPUs; hybrid; masks with holes."""
    all_cores = draw(cores())
    online = union(all_cores)
    some = some_of(online)
    near = st.one_of(st.none(), some, some_of(range(max(online) + 4)), st.just(online))
    sides = draw(st.lists(some, max_size=3))
    nodes = [*sides, online.difference(*sides), frozenset[int]()]
    apart = [node.difference(*nodes[:at]) for at, node in enumerate(nodes)]
    distance = st.lists(st.integers(11, 13), min_size=len(apart), max_size=len(apart))
    numa = tuple(
        NumaNode(id=2 * at, cpus=node, distances=draw(st.one_of(st.none(), distance.map(tuple))))
        for at, node in enumerate(apart)
    )
    gpus = tuple(
        Gpu(
            index=index,
            node_cpus=draw(near),
            socket_cpus=draw(near),
            local_cpus=draw(near),
            numa_node=draw(st.one_of(st.none(), st.integers(0, 2 * len(apart)))),
            source=draw(st.sampled_from((None, Source.NVML, Source.GIVEN))),
        )
        for index in range(draw(st.integers(1, 4)))
    )
    slow = union(all_cores[place] for place in draw(some_of(range(len(all_cores)), least=0)))
    package = Package(id=0, cpus=online)
    return Topology(
        cpus=online,
        allowed=draw(st.one_of(some, st.just(online))),
        cores=draw(st.sampled_from((all_cores, all_cores, None))),
        efficiency_cpus=draw(st.sampled_from((frozenset[int](), slow))),
        numa_nodes=draw(st.sampled_from((numa, None))),
        packages=draw(st.sampled_from(((package,), None))),
        gpus=gpus,
        visible=tuple(draw(st.permutations(range(len(gpus))))),
    )


def shuffled(machine: Topology) -> Topology:
    """The same machine, told in another order."""
    return machine._replace(
        gpus=machine.gpus[::-1],
        cores=None if machine.cores is None else machine.cores[::-1],
    )
