"""The gpu-affinity rules once more: slow, plain, and written from their text only.

:func:`shares` knows machines on which the near sets of any two used GPUs are the same or apart,
with no more ranks than GPUs, and answers None where a rank would get no core of its own (the facts
tell of no answer there). A core is the frozenset of all its CPUs, allowed or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from gpuaff.topology.model import Topology

Core = frozenset[int]


def shares(
    machine: Topology,
    nproc: int,
    *,
    mode: str,
    scope: str,
    balanced: bool,
    most: int | None = None,
    single_logical: bool = False,
) -> list[set[int]] | None:
    used = [machine.gpu_by_index[index] for index in machine.visible[:nproc]]
    node = [near_list(machine, gpu.node_cpus or frozenset()) for gpu in used]
    socket = [near_list(machine, gpu.socket_cpus or frozenset()) for gpu in used]
    near = node if scope == "node" else socket
    if mode == "all":
        lists = [node_first(cores, node) for cores in near]
    elif mode == "single":
        lists = [cores[:1] for cores in node]
    elif mode == "single_unique":
        lists = first_not_taken(node)
    elif scope == "node":
        lists = partition(node, mode, balanced=balanced)
    else:
        lists = with_dealt(partition(node, mode, balanced=balanced), node, socket)
        if balanced:
            least = min(len(cores) for cores in lists)
            lists = [cores[:least] for cores in lists]
    if not all(lists):
        return None
    if not mode.startswith("single"):
        lists = [cores[:most] for cores in lists]
    return [logical(machine, cores, single=single_logical) for cores in lists]


def near_list(machine: Topology, cpus: frozenset[int]) -> list[Core]:
    """Rule 1: near CPUs ∩ allowed, as cores, ordered by the lowest id of the whole core."""
    near = cpus & machine.allowed
    return sorted((core for core in machine.cores or () if core & near), key=min)


def logical(machine: Topology, cores: list[Core], *, single: bool) -> set[int]:
    chosen = set()
    for core in cores:
        usable = sorted(core & machine.allowed)
        chosen.update(usable[:1] if single else usable)
    return chosen


def partition(near: list[list[Core]], mode: str, *, balanced: bool) -> list[list[Core]]:
    """Rule 2, GPU by GPU."""
    smallest = min(len(cores) // near.count(cores) for cores in near)
    parts = []
    for place, cores in enumerate(near):
        ways = near.count(cores)
        turn = near[:place].count(cores)
        if mode == "unique_contiguous":
            size = smallest if balanced else len(cores) // ways
            parts.append(cores[turn * size : turn * size + size])
        else:
            cut = cores[: ways * smallest] if balanced else cores
            parts.append([core for at, core in enumerate(cut) if at % ways == turn])
    return parts


def node_first(cores: list[Core], node: list[list[Core]]) -> list[Core]:
    """Rule 3: what is near to some GPU by node goes first."""
    near = [core for core in cores if any(core in others for others in node)]
    return near + [core for core in cores if core not in near]


def first_not_taken(near: list[list[Core]]) -> list[list[Core]]:
    """Rule 3: GPUs in order take their first core not yet taken."""
    taken: list[Core] = []
    found = []
    for cores in near:
        left = [core for core in cores if core not in taken]
        taken += left[:1]
        found.append(left[:1])
    return found


def with_dealt(
    parts: list[list[Core]], node: list[list[Core]], socket: list[list[Core]]
) -> list[list[Core]]:
    """Rule 4: each share is its node cores, all first-dealt, all second-dealt, …"""
    grown = []
    for part, cores in zip(parts, socket, strict=True):
        here = [own for own, other in zip(node, socket, strict=True) if other == cores]
        takers = [core for core in cores if any(core in own for own in here)]
        others = [core for core in cores if core not in takers]
        hands: dict[Core, list[Core]] = {taker: [] for taker in takers}
        for at, core in enumerate(others):
            hands[takers[at % len(takers)]].append(core)
        share = list(part)
        for turn in range(len(others)):
            share += [hands[core][turn] for core in part if turn < len(hands[core])]
        grown.append(share)
    return grown


def fair_sizes(wanted: Sequence[frozenset[int]]) -> list[int]:
    """The max-min fair sizes of shares, ascending: of all ways to give each wanted core to one
    of those who want it, the best when compared from the smallest share up."""
    cores = sorted(frozenset().union(*wanted))
    takers = [[who for who, want in enumerate(wanted) if core in want] for core in cores]
    return max(
        sorted(owners.count(who) for who in range(len(wanted))) for owners in product(*takers)
    )
