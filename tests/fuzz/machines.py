"""Random machines, and what may be asked of the planner about them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from random import Random
from typing import Any

from gpuaff.cpuset import CpuSet
from gpuaff.topology import serialize
from gpuaff.topology.model import Gpu, NumaNode, Package, Source, Topology
from tests.fuzz.seeds import UUID, topologies

UNIQUE = ("unique_interleaved", "unique_contiguous", "core_complex")
MODES = ("all", "single", "single_unique", *UNIQUE)


@cache
def known() -> tuple[Topology, ...]:
    """The machines that ship or were saved."""
    return tuple(map(serialize.loads, topologies()))


def machine(random: Random) -> Topology:
    """A machine of any kind, and what a process may use of it."""
    if random.random() < 0.15:
        return _confined(random, random.choice(known()))
    cores = _cores(random)
    online = union(cores)
    nodes = _nodes(random, online)
    slow = union(random.sample(cores, random.randrange(len(cores)))) if _rarely(random) else None
    found = Topology(
        cpus=online if random.random() < 0.98 else frozenset(),
        allowed=online,
        cores=tuple(sorted(cores, key=min)) if random.random() < 0.85 else None,
        efficiency_cpus=slow or frozenset(),
        packages=_packages(random, online),
        l3=_groups(random, cores) if random.random() < 0.7 else None,
        numa_nodes=nodes if random.random() < 0.85 else None,
        gpus=_gpus(random, [node.cpus for node in nodes if node.cpus], online),
    )
    return _confined(random, found._replace(visible=tuple(found.gpu_by_index)))


def union(sets: Iterable[CpuSet]) -> CpuSet:
    """All CPUs of some sets."""
    return frozenset().union(*sets)


def some(random: Random, cpus: Iterable[int], *, least: int = 1) -> CpuSet:
    """A part of some CPUs: single ones, or a run of them."""
    ids = sorted(cpus)
    count = random.randint(min(least, len(ids)), len(ids))
    start = random.randint(0, len(ids) - count)
    return frozenset(
        random.sample(ids, count) if random.random() < 0.5 else ids[start : start + count]
    )


def _rarely(random: Random) -> bool:
    return random.random() < 0.15


def _cores(random: Random) -> list[CpuSet]:
    """Cores numbered in the usual ways and in unusual ones, with gaps, of unlike widths."""
    threads = random.choice((1, 2, 2, 2, 4, 8))
    count = random.choice((1, 2, 3, 4, 6, 8, 12, 16, 24, 64))
    ids = list(range(threads * count))
    if _rarely(random):
        ids = sorted(random.sample(range(random.choice((4 * len(ids), 65536))), len(ids)))
    if random.random() < 0.5:
        cores = [ids[at::count] for at in range(count)]
    else:
        cores = [ids[at * threads : (at + 1) * threads] for at in range(count)]
    if _rarely(random):  # some CPUs are offline
        cores = [core[: random.randint(1, threads)] for core in cores]
    return list(map(frozenset, cores))


def _parts(random: Random, items: Sequence[Any], most: int) -> list[list[Any]]:
    """Runs of some things, or the things dealt."""
    count = random.randint(1, min(most, len(items)))
    if random.random() < 0.3:
        return [list(items[at::count]) for at in range(count)]
    size = -(-len(items) // count)
    return [list(items[at : at + size]) for at in range(0, len(items), size)]


def _nodes(random: Random, online: CpuSet) -> tuple[NumaNode, ...]:
    sets = [frozenset(part) for part in _parts(random, sorted(online), 8)]
    if _rarely(random):
        sets = [random.choice((held, some(random, held), frozenset())) for held in sets]
    if _rarely(random):
        sets.insert(random.randrange(len(sets) + 1), frozenset())
    step = random.choice((1, 1, 2, 9))
    told = random.random() < 0.8
    return tuple(
        NumaNode(
            id=step * at,
            cpus=cpus,
            has_memory=random.choice((True, True, False, None)),
            distances=tuple(_distance(random, at, to) for to in range(len(sets))) if told else None,
        )
        for at, cpus in enumerate(sets)
    )


def _distance(random: Random, one: int, other: int) -> int:
    if one == other:
        return 10
    return 12 if one // 2 == other // 2 else random.choice((12, 12, 21, 32, 255))


def _packages(random: Random, online: CpuSet) -> tuple[Package, ...] | None:
    if _rarely(random):
        return None
    parts = _parts(random, sorted(online), 4)
    return tuple(Package(id=at, cpus=frozenset(part)) for at, part in enumerate(parts))


def _groups(random: Random, cores: Sequence[CpuSet]) -> tuple[CpuSet, ...]:
    return tuple(sorted(map(union, _parts(random, cores, 16)), key=min))


def _gpus(random: Random, places: Sequence[CpuSet], online: CpuSet) -> tuple[Gpu, ...]:
    count = random.choice((0, 1, 1, 2, 2, 3, 4, 4, 6, 8, 8, 16))
    step = random.choice((1, 1, 1, 3))
    strange = _rarely(random)
    return tuple(_gpu(random, step * at, places, online, strange=strange) for at in range(count))


def _gpu(
    random: Random, index: int, places: Sequence[CpuSet], online: CpuSet, *, strange: bool
) -> Gpu:
    near: list[CpuSet | None] = [random.choice(places) if places else online] * 2 + [None]
    if strange or random.random() < 0.1:
        near += [some(random, online), some(random, [*online, max(online) + 1]), online]
    node, local = random.choice(near), random.choice(near)
    return Gpu(
        index=index,
        uuid=f"GPU-{UUID.format(index)}" if random.random() < 0.9 else None,
        pci_bus_id=f"0000:{index + 1:02x}:00.0" if random.random() < 0.9 else None,
        node_cpus=node,
        socket_cpus=random.choice((None, online, *near)),
        local_cpus=local,
        numa_node=random.choice((None, 0, 1, 2, 8, 9)),
        source=random.choice((None, Source.NVML, Source.SYSFS, Source.GIVEN)),
    )


def _confined(random: Random, found: Topology) -> Topology:
    """The machine for a process with a mask and with visible devices of its own."""
    if random.random() < 0.5 and found.cpus:
        offline = [max(found.cpus) + 1] if _rarely(random) else []
        found = found._replace(
            allowed=some(random, [*found.cpus, *offline], least=0 if _rarely(random) else 1)
        )
    if random.random() < 0.3:
        visible = random.sample(found.visible, random.randint(0, len(found.visible)))
        if _rarely(random):
            visible += random.choices([0, 1, 99], k=2)
        found = found._replace(visible=tuple(visible))
    return found


def question(random: Random, found: Topology) -> dict[str, Any]:
    """What is asked: sensible, or not quite."""
    asked: dict[str, Any] = {
        "nproc": random.choice((1, 2, 2, 3, 4, 5, 7, 8, 8, 16, 64, max(1, len(found.visible)))),
        "mode": random.choice(MODES),
        "scope": random.choice(("node", "socket")),
        "multithreading": random.choice(("all_logical", "single_logical")),
        "balanced": random.random() < 0.6,
    }
    if _rarely(random):
        asked["nproc"] = random.choice((0, -1, 257, 512, 65536, True, "2", 2.0, None))
    for name in ("min_physical_cores", "max_physical_cores"):
        if random.random() < 0.2:
            asked[name] = random.choice((1, 1, 2, 2, 3, 4, 8, 100, 65535, 65536, 0, -1, "1"))
    if random.random() < 0.01:
        asked[random.choice(list(asked))] = random.choice(("", "node", None, [], b"all", 10**400))
    return asked


def exact(random: Random, found: Topology, nproc: int) -> dict[str, Any]:
    """What is asked beyond that: whose CPUs, which, and how many stay free."""
    asked: dict[str, Any] = {}
    usable = sorted(found.allowed) or [0]
    if random.random() < 0.2:
        asked["cpus"] = some(random, usable)
    if random.random() < 0.2:
        asked["reserve"] = random.choice((0, 1, 1, 1, 2, 3, 100))
    if random.random() < 0.3:
        asked["rank_allowed"] = _masks(random, usable, nproc)
    if random.random() < 0.3:
        asked["partition"] = random.choice(("auto", "job", "machine"))
    if random.random() < 0.03:
        name = random.choice(("cpus", "reserve", "rank_allowed", "partition"))
        asked[name] = random.choice(
            (-1, "", "0-3", "x", [], [[]], [65536], [-1], True, 10**400, b"0")
        )
    return asked


def _masks(random: Random, usable: Sequence[int], nproc: int) -> list[CpuSet]:
    """A mask for each rank: apart, overlapping, or all the same."""
    if nproc <= len(usable) and random.random() < 0.6:
        parts = _parts(random, usable, nproc)
        return [frozenset(parts[rank % len(parts)]) for rank in range(nproc)]
    masks = [some(random, [*usable, usable[-1] + 1]) for _ in range(random.randint(1, 4))]
    return [random.choice(masks) for _ in range(nproc + (random.random() < 0.02))]
