"""Sharing cores among claimants whose near sets overlap without being equal.

gpu_affinity refuses such machines. Here the sizes of the shares are *max-min fair*: no share
can grow without making one shrink that is no larger. Cores are whole, so it is the vector of
sizes that is best when sorted ascending and compared from the front. Cores are first grouped by
who may have them; the sizes come from a small flow network between claimants and groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpuaff.allocator.blocks import Domains, pack

Group = tuple[tuple[int, ...], tuple[int, ...]]
"""Who may have them (claimants, ascending), and the cores (places, ascending)."""


def fair_shares(
    wanted: Sequence[frozenset[int]], *, contiguous: bool, domains: Domains = ()
) -> list[tuple[int, ...]]:
    """Share cores out.

    Args:
        wanted: the cores that each claimant may have; earlier claimants win ties.
        contiguous: within a group of cores claimants get consecutive blocks; otherwise the
            cores are dealt.
        domains: the L3 domains that claimants get instead of blocks, if any.

    Returns:
        Each claimant's cores, ascending. Every wanted core is in exactly one share; a share
        is empty only where that cannot be helped.
    """
    groups = group_cores(wanted)
    flow = _Flow(groups, len(wanted))
    flow.fill()
    shares: list[list[int]] = [[] for _ in wanted]
    for place, (claimants, cores) in enumerate(groups):
        counts = [flow.given[claimant][place] for claimant in claimants]
        parts = pack(cores, counts, domains) if contiguous else _dealt(cores, counts)
        for claimant, part in zip(claimants, parts, strict=True):
            shares[claimant] += part
    return [tuple(sorted(share)) for share in shares]


def group_cores(wanted: Sequence[frozenset[int]]) -> list[Group]:
    """Group cores by who may have them; groups of few claimants first, then by lowest core."""
    groups: list[tuple[tuple[int, ...], frozenset[int]]] = [((), frozenset().union(*wanted))]
    for claimant, cores in enumerate(wanted):
        split = []
        for claimants, members in groups:
            split.append(((*claimants, claimant), members & cores))
            split.append((claimants, members - cores))
        groups = [(claimants, members) for claimants, members in split if members]
    found = [(claimants, tuple(sorted(members))) for claimants, members in groups]
    return sorted(found, key=lambda group: (len(group[0]), group[1][0]))


def _dealt(cores: Iterable[int], counts: Sequence[int]) -> list[list[int]]:
    """Deal cores to shares in turn, to each as many as it gets."""
    turns = range(max(counts))
    takers = [share for turn in turns for share, count in enumerate(counts) if turn < count]
    shares: list[list[int]] = [[] for _ in counts]
    for share, core in zip(takers, cores, strict=True):
        shares[share].append(core)
    return shares


class _Flow:
    """How many cores of each group each claimant has.

    Attributes:
        given: by claimant, then by group.
    """

    def __init__(self, groups: Sequence[Group], claimants: int) -> None:
        self.given = [[0] * len(groups) for _ in range(claimants)]
        self._room = [len(cores) for _, cores in groups]
        self._may = [claimants for claimants, _ in groups]
        self._wants = [
            [place for place, (who, _) in enumerate(groups) if claimant in who]
            for claimant in range(claimants)
        ]

    def fill(self) -> None:
        """Give out everything: raise all claimants equally, and leave out who cannot rise.

        Who cannot rise by one core now never can: the cores within reach are all with
        claimants that have no more than it has, or one more.
        """
        rising = list(range(len(self.given)))
        while rising:
            step = sum(self._room) // len(rising)
            while step > 1 and not self._raise_all(rising, step):
                step //= 2
            if step <= 1:
                rising = [claimant for claimant in rising if self._raise(claimant, 1)]

    def _raise_all(self, claimants: Iterable[int], amount: int) -> bool:
        """Give each of them so many cores more, or change nothing."""
        before = [row.copy() for row in self.given], self._room.copy()
        if all(self._raise(claimant, amount) for claimant in claimants):
            return True
        self.given, self._room = before
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
        amount = min(amount, self._room[path[-1][1]])
        amount = min([amount, *(self.given[giver][group] for (giver, _), (_, group) in pairs)])
        for claimant, group in path:
            self.given[claimant][group] += amount
        for (giver, _), (_, group) in pairs:
            self.given[giver][group] -= amount
        self._room[path[-1][1]] -= amount
        return amount

    def _path(self, start: int) -> list[tuple[int, int]]:
        """The shortest way to free cores: who takes from which group, the last one freely."""
        paths: dict[int, list[tuple[int, int]]] = {start: []}
        queue, seen = [start], set[int]()
        for claimant in queue:
            for group in self._wants[claimant]:
                if group in seen:
                    continue
                seen.add(group)
                path = [*paths[claimant], (claimant, group)]
                if self._room[group]:
                    return path
                for giver in self._may[group]:
                    if giver not in paths and self.given[giver][group]:
                        paths[giver] = path
                        queue.append(giver)
        return []
