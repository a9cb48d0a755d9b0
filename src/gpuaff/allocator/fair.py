"""Sharing cores among claimants whose near sets overlap without being equal.

gpu_affinity refuses such machines. Here the sizes of the shares are *max-min fair*: no share
can grow without making one shrink that is no larger. Cores are whole, so it is the vector of
sizes that is best when sorted ascending and compared from the front. Cores are first grouped by
who may have them; the sizes come from a small flow network between claimants and groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpuaff.allocator.filling import Fill

Group = tuple[tuple[int, ...], tuple[int, ...]]
"""The claimants that may have some cores, and the places of these cores; both ascending."""


def fair_shares(wanted: Sequence[frozenset[int]], fill: Fill) -> list[tuple[int, ...]]:
    """Share cores out.

    Args:
        wanted: the cores that each claimant may have; earlier claimants win ties.
        fill: cuts a group of cores into parts of given sizes.

    Returns:
        Each claimant's cores, ascending. Every wanted core is in exactly one share; a share
        is empty only where more claimants than cores compete.
    """
    groups = group_cores(wanted)
    flow = _Flow(groups, len(wanted))
    flow.fill()
    shares: list[list[int]] = [[] for _ in wanted]
    for number, (claimants, cores) in enumerate(groups):
        sizes = [flow.given[claimant][number] for claimant in claimants]
        for claimant, part in zip(claimants, fill(cores, sizes), strict=True):
            shares[claimant] += part
    return [tuple(sorted(share)) for share in shares]


def grow(
    shares: Sequence[frozenset[int]], more: Iterable[frozenset[int]], fill: Fill
) -> Sequence[frozenset[int]]:
    """Share out more cores; what a claimant has already counts, and it keeps that.

    Args:
        shares: what each has: no other may have any of it.
        more: the cores that each may have besides.
        fill: as in :func:`fair_shares`.
    """
    wanted = [have | claim for have, claim in zip(shares, more, strict=True)]
    return shares if wanted == shares else list(map(frozenset, fair_shares(wanted, fill)))


def group_cores(wanted: Sequence[frozenset[int]]) -> list[Group]:
    """Group cores by who may have them; groups of few claimants first, then by lowest core."""
    groups: list[tuple[tuple[int, ...], frozenset[int]]] = [((), frozenset().union(*wanted))]
    for claimant, cores in enumerate(wanted):
        halves = [
            half
            for claimants, members in groups
            for half in (((*claimants, claimant), members & cores), (claimants, members - cores))
        ]
        groups = [(claimants, members) for claimants, members in halves if members]
    found = [(claimants, tuple(sorted(members))) for claimants, members in groups]
    return sorted(found, key=lambda group: (len(group[0]), group[1][0]))


class _Flow:
    """How many cores of each group each claimant has.

    Attributes:
        given: by claimant, then by group.
    """

    def __init__(self, groups: Sequence[Group], claimants: int) -> None:
        self.given = [[0] * len(groups) for _ in range(claimants)]
        self._free = [len(cores) for _, cores in groups]
        self._claimants = [claimants for claimants, _ in groups]
        self._groups = [
            [number for number, (members, _) in enumerate(groups) if claimant in members]
            for claimant in range(claimants)
        ]

    def fill(self) -> None:
        """Give out everything: raise all claimants equally, and leave out who cannot rise.

        Who cannot rise by one core now never can: the cores within reach are all with
        claimants that have no more than it has, or one more.
        """
        rising = list(range(len(self.given)))
        while rising:
            step = sum(self._free) // len(rising)
            while step > 1 and not self._raise_all(rising, step):
                step //= 2
            if step <= 1:
                rising = [claimant for claimant in rising if self._raise(claimant, 1)]

    def _raise_all(self, claimants: Iterable[int], amount: int) -> bool:
        """Give each of them so many cores more, or change nothing."""
        before = [row.copy() for row in self.given], self._free.copy()
        if all(self._raise(claimant, amount) for claimant in claimants):
            return True
        self.given, self._free = before
        return False

    def _raise(self, claimant: int, amount: int) -> bool:
        while amount:
            path = self._path(claimant)
            if not path:
                return False
            amount -= self._push(path, amount)
        return True

    def _push(self, path: Sequence[tuple[int, int]], amount: int) -> int:
        """Pass cores along a path of (claimant, the group from which it takes)."""
        pairs = list(zip(path[1:], path, strict=False))
        amount = min(amount, self._free[path[-1][1]])
        amount = min([amount, *(self.given[giver][group] for (giver, _), (_, group) in pairs)])
        for claimant, group in path:
            self.given[claimant][group] += amount
        for (giver, _), (_, group) in pairs:
            self.given[giver][group] -= amount
        self._free[path[-1][1]] -= amount
        return amount

    def _path(self, start: int) -> list[tuple[int, int]]:
        """The shortest way to free cores: who takes from which group, the last one freely."""
        paths: dict[int, list[tuple[int, int]]] = {start: []}
        queue, visited = [start], set[int]()
        for claimant in queue:
            for group in self._groups[claimant]:
                if group in visited:
                    continue
                visited.add(group)
                path = [*paths[claimant], (claimant, group)]
                if self._free[group]:
                    return path
                for giver in self._claimants[group]:
                    if giver not in paths and self.given[giver][group]:
                        paths[giver] = path
                        queue.append(giver)
        return []
