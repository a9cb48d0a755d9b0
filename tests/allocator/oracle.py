"""The gpu-affinity rules once more: slow, plain, and written from their text only.

Where gpu_affinity leaves cores out, as they do not come out even, nothing is left out here.

:func:`shares` knows machines on which the near sets of any two used GPUs are the same or apart,
with no more ranks than GPUs, and answers None where a rank would get no core of its own (the facts
tell of no answer there). A core is the frozenset of all its CPUs, allowed or not.
"""

from __future__ import annotations

from collections.abc import Sequence

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
        lists = partition(node, mode, [smallest(node)] * nproc if balanced else [None] * nproc)
    else:
        lists = by_socket(node, socket, mode, balanced=balanced)
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


def smallest(near: list[list[Core]]) -> int:
    return min(len(cores) // near.count(cores) for cores in near)


def partition(near: list[list[Core]], mode: str, sizes: list[int | None]) -> list[list[Core]]:
    """Rule 2, GPU by GPU; None: every core is in a part, the first parts have the odd ones."""
    parts = []
    for place, (cores, size) in enumerate(zip(near, sizes, strict=True)):
        ways = near.count(cores)
        turn = near[:place].count(cores)
        if mode == "unique_interleaved":
            cut = cores if size is None else cores[: ways * size]
            parts.append([core for at, core in enumerate(cut) if at % ways == turn])
        elif size is None:
            ends = [sum(len(cores[way::ways]) for way in range(end)) for end in (turn, turn + 1)]
            parts.append(cores[ends[0] : ends[1]])
        else:
            parts.append(cores[turn * size : turn * size + size])
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


def by_socket(
    node: list[list[Core]], socket: list[list[Core]], mode: str, *, balanced: bool
) -> list[list[Core]]:
    """Rule 4. What makes no full round is spare, and goes to the smallest shares."""
    if not smallest(node):
        return [[]]
    largest = with_dealt(partition(node, mode, [None] * len(node)), node, socket)
    for first, cores in enumerate(socket):
        if cores in socket[:first]:
            continue
        there = [place for place, other in enumerate(socket) if other == cores]
        give_spare([largest[place] for place in there], spare_of(first, node, socket), mode)
    if not balanced:
        return largest
    can_have = []
    for place, cores in enumerate(node):
        each = 1 + len(rounds_of(place, node, socket))
        even = each * (len(cores) // node.count(cores))
        can_have.append(even if not spare_of(place, node, socket) else len(largest[place]))
    least = min(can_have)
    sizes: list[int | None] = [
        max(smallest(node), -(-least // (1 + len(rounds_of(place, node, socket)))))
        for place in range(len(node))
    ]
    cut = with_dealt(partition(node, mode, sizes), node, socket)
    return [
        (largest if spare_of(place, node, socket) else cut)[place][:least]
        for place in range(len(node))
    ]


def takers_and_others(
    place: int, node: list[list[Core]], socket: list[list[Core]]
) -> tuple[list[Core], list[Core]]:
    here = [own for own, other in zip(node, socket, strict=True) if other == socket[place]]
    takers = [core for core in socket[place] if any(core in own for own in here)]
    return takers, [core for core in socket[place] if core not in takers]


def rounds_of(place: int, node: list[list[Core]], socket: list[list[Core]]) -> list[list[Core]]:
    takers, others = takers_and_others(place, node, socket)
    starts = range(0, len(others) - len(takers) + 1, len(takers))
    return [others[at : at + len(takers)] for at in starts]


def spare_of(place: int, node: list[list[Core]], socket: list[list[Core]]) -> list[Core]:
    takers, others = takers_and_others(place, node, socket)
    return others[len(others) // len(takers) * len(takers) :]


def with_dealt(
    parts: list[list[Core]], node: list[list[Core]], socket: list[list[Core]]
) -> list[list[Core]]:
    """Rule 4: each share is its node cores, all first-dealt, all second-dealt, …"""
    grown = []
    for place, part in enumerate(parts):
        takers, _ = takers_and_others(place, node, socket)
        share = list(part)
        for dealt in rounds_of(place, node, socket):
            share += [dealt[takers.index(core)] for core in part]
        grown.append(share)
    return grown


def give_spare(shares: list[list[Core]], spare: list[Core], mode: str) -> None:
    """One core after another to who has least, the lower rank first: so many each."""
    counts = [0] * len(shares)
    for _ in spare:
        sizes = [len(share) + count for share, count in zip(shares, counts, strict=True)]
        counts[sizes.index(min(sizes))] += 1
    order = [place for place, count in enumerate(counts) for _ in range(count)]
    if mode == "unique_interleaved":
        turns = [turn for count in counts for turn in range(count)]
        order = [place for _, place in sorted(zip(turns, order, strict=True))]
    for place, core in zip(order, spare, strict=True):
        shares[place].append(core)


def fair_sizes(wanted: Sequence[frozenset[int]]) -> list[int]:
    """The max-min fair sizes of shares, ascending: of all ways to give each wanted core to one
    of those who want it, the best when compared from the smallest share up."""
    reached = {(0,) * len(wanted)}
    for core in frozenset().union(*wanted):
        reached = {
            (*sizes[:who], sizes[who] + 1, *sizes[who + 1 :])
            for sizes in reached
            for who, want in enumerate(wanted)
            if core in want
        }
    return max(sorted(sizes) for sizes in reached)
