"""Cores that stay out of every share, for helper processes (case B10)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from gpuaff.allocator.cores import Cores
from gpuaff.allocator.placement import Assignment, Placement
from gpuaff.allocator.split import Assignments, node_cores_of, nodes_first
from gpuaff.errors import GPUAffinityError


def reserve_from_shares(
    placements: Sequence[Placement],
    assignments: Mapping[int, Assignment],
    count: int,
    cores: Cores,
) -> Assignments:
    """Reserve the last cores of each rank's own part: those that it misses least.

    Raises:
        GPUAffinityError: a rank has no core of its own besides these.
    """
    for placed in placements:
        assigned = assignments[placed.rank]
        found = cores.count(assigned.cores) if assigned.own else 0
        if found <= count:
            near = cores.count(placed.cores)
            raise _none_left(placed, count, f"{found} of the {near} cores near its GPU")
    return {rank: _without_last(found, count, cores) for rank, found in assignments.items()}


def reserve_from_near(
    placements: Sequence[Placement],
    pick: Callable[[Sequence[Placement]], Assignments],
    count: int,
    cores: Cores,
) -> Assignments:
    """Reserve the last cores of each distinct near list, and let ranks pick from the rest.

    Raises:
        GPUAffinityError: a rank finds no core among the rest, or none of its own where each is to
            have one.
    """
    node_cores = node_cores_of(placements)
    lists = {
        placed.cores: Assignment(nodes_first(placed.cores, node_cores)) for placed in placements
    }
    cut = {near: _without_last(found, count, cores) for near, found in lists.items()}
    taken = frozenset(place for found in cut.values() for place in found.reserved)
    left = {near: tuple(place for place in near if place not in taken) for near in lists}
    found = {}
    if all(left.values()):
        found = pick([replace(placed, cores=left[placed.cores]) for placed in placements])
    for placed in placements:
        if not left[placed.cores] or (found and not found[placed.rank].own):
            part = f"none of the {cores.count(placed.cores)} cores near its GPU"
            raise _none_left(placed, count, part)
    reserved = {placed.rank: cut[placed.cores].reserved for placed in placements}
    return {rank: replace(own, reserved=reserved[rank]) for rank, own in found.items()}


def _without_last(assigned: Assignment, count: int, cores: Cores) -> Assignment:
    kept, last = cores.divide(assigned.cores, max(cores.count(assigned.cores) - count, 0))
    return replace(assigned, cores=kept, reserved=last)


def _none_left(placed: Placement, count: int, part: str) -> GPUAffinityError:
    return GPUAffinityError(
        f"requested reserve={count}, but rank {placed.name} on GPU {placed.gpu} would have "
        f"no core left ({part}); reserve fewer, start fewer processes or allow more CPUs"
    )
