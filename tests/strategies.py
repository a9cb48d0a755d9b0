"""Hypothesis strategies for whole machines, for every test module that needs one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeVar

from hypothesis import strategies as st

from gpuaff.cpuset import MAX_CPU_ID, CpuSet
from gpuaff.notices import Notice
from gpuaff.topology.model import Accelerator, Gpu, MigInstance, NumaNode, Package, Source, Topology

_T = TypeVar("_T")


def cpu_sets(
    *, min_size: int = 0, max_size: int = 40, max_id: int = MAX_CPU_ID
) -> st.SearchStrategy[CpuSet]:
    """Sets of CPU ids, dense and sparse."""
    ids = st.one_of(st.integers(0, min(max_id, 99)), st.integers(0, max_id))
    return st.frozensets(ids, min_size=min_size, max_size=max_size)


def _union(sets: Sequence[CpuSet]) -> CpuSet:
    return frozenset().union(*sets)


@st.composite
def _cut(draw: st.DrawFn, items: Sequence[_T], most: int) -> list[list[_T]]:
    """Cut a list into 1 … ``most`` pieces of neighbours, none of them empty."""
    count = draw(st.integers(1, min(most, len(items))))
    borders = draw(
        st.lists(
            st.integers(1, max(1, len(items) - 1)),
            min_size=count - 1,
            max_size=count - 1,
            unique=True,
        )
    )
    edges = [0, *sorted(borders), len(items)]
    return [list(items[a:b]) for a, b in pairwise(edges)]


@st.composite
def _core_sets(draw: st.DrawFn, max_cores: int) -> tuple[list[CpuSet], CpuSet]:
    """The CPUs of each core, and those of them that are slow (a hybrid processor)."""
    count = draw(st.integers(1, max_cores))
    threads = draw(st.sampled_from([1, 2, 2, 2, 4, 8]))
    slow = draw(st.integers(0, count - 1)) if threads == 2 and draw(st.booleans()) else 0
    widths = [threads] * (count - slow) + [1] * slow
    ids = list(range(sum(widths)))
    if draw(st.booleans()):  # sparse: some ids are offline or were never there
        first = draw(st.sampled_from([0, 1, 64, 1020]))
        gaps = draw(st.sets(st.integers(0, len(ids) + 7), max_size=8))
        ids = [first + i for i in range(len(ids) + 8) if i not in gaps][: len(ids)]
    neighbours = draw(st.booleans()) or slow
    cores: list[CpuSet] = []
    start = 0
    for place, width in enumerate(widths):
        if neighbours:  # a core's CPUs are 0,1 – 2,3 – …, as on POWER and most hybrids
            cores.append(frozenset(ids[start : start + width]))
        else:  # i and i + n, as on most x86 servers
            cores.append(frozenset(ids[place::count]))
        start += width
    return cores, _union(cores[count - slow :]) if slow else frozenset()


@st.composite
def _nodes(draw: st.DrawFn, places: Sequence[CpuSet]) -> tuple[NumaNode, ...]:
    """Nodes with these CPUs, between them some without any, some ids left out."""
    sets: list[CpuSet] = list(places)
    for _ in range(draw(st.integers(0, 3))):
        sets.insert(draw(st.integers(0, len(sets))), frozenset())
    ids = sorted(
        draw(
            st.one_of(
                st.just(set(range(len(sets)))),
                st.sets(st.integers(0, 300), min_size=len(sets), max_size=len(sets)),
            )
        )
    )
    far = draw(st.sampled_from([12, 21, 32, 255]))
    has_distances = draw(st.booleans())
    memory = st.sampled_from([True, True, False, None])
    return tuple(
        NumaNode(
            id=number,
            cpus=cpus,
            has_memory=draw(memory),
            distances=tuple(10 if other == number else far for other in ids)
            if has_distances
            else None,
        )
        for number, cpus in zip(ids, sets, strict=True)
    )


@st.composite
def _gpus(
    draw: st.DrawFn,
    places: Sequence[tuple[CpuSet, CpuSet, int | None]],
    counts: tuple[int, int],
    complete: bool,
) -> tuple[Gpu, ...]:
    """GPUs beside these places (the node's CPUs, the socket's, the node's id)."""
    return tuple(
        _gpu(draw, index, places, complete=complete) for index in range(draw(st.integers(*counts)))
    )


@st.composite
def _accelerators(
    draw: st.DrawFn, places: Sequence[tuple[CpuSet, CpuSet, int | None]]
) -> tuple[Accelerator, ...] | None:
    """Devices of any vendor beside these places, or nowhere; or not told."""
    numbers = draw(st.none() | st.sets(st.integers(0, 0xFFFF), max_size=5))
    spots = st.sampled_from([(None, None, None), *places])
    chosen = [(number, draw(spots)) for number in sorted(numbers or ())]
    devices = tuple(
        Accelerator(
            pci_bus_id=_address(number),
            vendor=draw(st.sampled_from(["10de", "1002", "8086"])),
            local_cpus=near,
            numa_node=node,
        )
        for number, (near, _, node) in chosen
    )
    return None if numbers is None else tuple(sorted(devices, key=_by_address))


def _address(number: int) -> str:
    """A bus, a function, and a domain of four digits or five."""
    bus, function, domain = number % 256, number // 256 % 4, number // 1024
    return f"{0xFFF0 + domain:04x}:{bus:02x}:00.{function}"


def _by_address(device: Accelerator) -> tuple[int, str]:
    domain, rest = device.pci_bus_id.split(":", 1)
    return int(domain, 16), rest


def _gpu(
    draw: st.DrawFn,
    index: int,
    places: Sequence[tuple[CpuSet, CpuSet, int | None]],
    *,
    complete: bool,
) -> Gpu:
    known: dict[str, Any] = {}
    if places and (complete or draw(st.integers(0, 5))):
        node, socket, number = draw(st.sampled_from(places))
        if not complete and draw(st.integers(0, 5)) == 0:  # near sets that overlap
            node |= draw(st.sampled_from(places))[0]
        known = {
            "node_cpus": node,
            "socket_cpus": socket if complete or draw(st.booleans()) else None,
            "local_cpus": draw(st.sampled_from([None, node])),
            "numa_node": number,
            "source": draw(st.sampled_from([Source.NVML, Source.SYSFS, Source.GIVEN])),
        }
    instances = tuple(
        MigInstance(
            uuid=f"MIG-{index:08x}-0000-5000-8000-{number:012x}",
            gpu_instance=number + 1,
            compute_instance=0,
        )
        for number in range(draw(st.integers(0, 2)))
    )
    named = draw(st.booleans())
    return Gpu(
        index=index,
        uuid=f"GPU-{index:08x}-0000-4000-8000-00000000000f" if named else None,
        pci_bus_id=f"0000:{index + 1:02x}:00.0" if named else None,
        name=draw(st.sampled_from([None, "NVIDIA A100-SXM4-80GB", "Tesla V100 »32 GB«"])),
        memory_node=draw(st.sampled_from([None, None, 250])),
        mig=draw(st.sampled_from([None, None, None, instances])),
        **known,
    )


@st.composite
def topologies(
    draw: st.DrawFn,
    *,
    max_cores: int = 24,
    min_gpus: int = 0,
    max_gpus: int = 16,
    complete: bool = False,
) -> Topology:
    """Valid topologies: SMT 1 to 8, sparse ids, hybrid cores, nodes without CPUs, and so on.

    Args:
        draw: given by Hypothesis.
        max_cores: the most physical cores.
        min_gpus: the fewest GPUs.
        max_gpus: the most GPUs.
        complete: whether all about CPUs and all GPUs' near CPUs are known. Otherwise any part
            may be missing, the CPUs themselves too.
    """

    def maybe(value: _T) -> _T | None:
        return value if complete or draw(st.integers(0, 4)) else None

    cores, slow = draw(_core_sets(max_cores))
    order = draw(st.sampled_from([cores, cores[::2] + cores[1::2]]))  # or even ids here, odd there
    sockets = draw(_cut(order, 4))
    halves = [draw(_cut(socket, 4)) for socket in sockets]
    nodes = draw(_nodes([_union(part) for parts in halves for part in parts]))
    numbers = iter([node.id for node in nodes if node.cpus])
    places = [
        (_union(part), _union(socket), next(numbers))
        for socket, parts in zip(sockets, halves, strict=True)
        for part in parts
    ]
    caches = [_union(piece) for parts in halves for part in parts for piece in draw(_cut(part, 3))]
    gpus = draw(_gpus(places, (min_gpus, max_gpus), complete))
    shared: dict[str, Any] = {
        "gpus": gpus,
        "visible": tuple(
            draw(st.permutations([gpu.index for gpu in gpus]))[: draw(st.integers(0, 16))]
        ),
        "accelerators": draw(_accelerators(places)),
        "links": maybe(tuple(tuple("X" if a is b else "NV12" for b in gpus) for a in gpus)),
        "notes": tuple(draw(st.lists(st.just(Notice("some-code", "some message")), max_size=2))),
    }
    if not complete and draw(st.integers(0, 7)) == 0:
        return Topology(**shared)
    cpus = _union(cores)
    some = draw(st.frozensets(st.sampled_from(sorted(cpus)), min_size=1, max_size=12))
    most = cpus - some or cpus
    return Topology(
        cpus=cpus,
        allowed=draw(st.sampled_from([cpus, cpus, most, some])),
        cores=maybe(tuple(sorted(cores, key=min))),
        efficiency_cpus=slow,
        packages=maybe(
            tuple(Package(id=i, cpus=_union(socket)) for i, socket in enumerate(sockets))
        ),
        l3=maybe(tuple(sorted(caches, key=min))),
        numa_nodes=maybe(nodes),
        **shared,
    )
