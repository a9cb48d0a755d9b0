"""Which of the free GPUs a claim takes: the best connected ones that leave the rest most useful.

Of all sets of the size that is asked for, the best one is taken. The first of these rules that
tells two sets apart decides; *apart* is what :mod:`gpuaff.claims.closeness` calls far.

1. The worst pair of a set counts first: a ring all-reduce is as fast as its slowest hop. So the
   set with fewer pairs of the farthest kind is better; then of the second farthest kind, and so on.
2. What is left for the next claim: more pairs of the nearest kind are better, then of the second
   nearest, and so on. This takes single GPUs from islands that are broken already.
3. Then the best four GPUs that are left, by rule 1, and then the best eight: claims are mostly for
   1, 2, 4 or 8. Pairs alone don't tell which of two sets breaks a group of four.
4. Rules 2 and 3 once more, for what is left when the GPUs that are busy now have been given back.
5. The lowest indices, compared from the first.

This is exact for machines of up to 16 GPUs, and for larger ones where many GPUs can't be told
apart (islands). In others a set is built step by step from each GPU, by rules 1 and 2, and the best
of these sets is taken; where it is only the rest that is so large, rule 3 is left out.

Other allocators give points to each pair and add them up (NVIDIA's go-gpuallocator, "best
effort"). Sums let a good pair outweigh a bad one, which a ring does not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from gpuaff.claims.cheapest import Search, searchable, twin_masks
from gpuaff.claims.closeness import ranks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    from gpuaff.topology.model import Topology

    Chosen: TypeAlias = tuple[int, ...]  # positions, ascending
    Price: TypeAlias = Callable[[Chosen], int]

_SIZES = (4, 8)
"""The sizes of later claims that rule 3 thinks of."""


def choose(
    count: int,
    free: Collection[int],
    *,
    topology: Topology,
    idle: Collection[int] | None = None,
    usable: Collection[int] | None = None,
) -> tuple[int, ...]:
    """Choose GPUs that are well connected and leave the rest useful; the module tells the rules.

    Args:
        count: how many.
        free: the GPUs to choose from, by physical index: those that are free and fit all demands.
        topology: how they are connected. What it does not tell makes GPUs alike.
        idle: all GPUs that are free for anybody, also those that don't fit this claim's demands;
            what is left of them is left for the next claim. Those of ``free`` count as well.
        usable: all GPUs that anybody may use later, busy ones too; None: all of the topology.
            Those of ``free`` and ``idle`` count as well.

    Returns:
        Their physical indices, ascending. It is the same for the same arguments, in whatever order
        they come.

    Raises:
        ValueError: fewer are free than are asked for, or it is not at least one.
    """
    pool = sorted(set(free))
    if not 1 <= count <= len(pool):
        raise ValueError(f"cannot choose {count} of {len(pool)} free GPUs {pool}")
    now = {*pool, *(idle or ())}
    indices = sorted({*now, *(topology.gpu_by_index if usable is None else usable)})
    table = ranks(topology, indices) if count < len(pool) else []
    if not any(map(any, table)):  # all, or all alike: the usual case
        return tuple(pool[:count])
    position = {index: at for at, index in enumerate(indices)}
    chosen = _best(
        count,
        [position[index] for index in pool],
        [position[index] for index in sorted(now)],
        table,
    )
    return tuple(indices[at] for at in chosen)


def _best(count: int, pool: list[int], idle: list[int], table: list[list[int]]) -> Chosen:
    """The best set, in positions of the table."""
    twins = twin_masks(table)
    prices = _Prices(table)
    search = Search(*prices.of_rules_1_and_2(count, idle), twins)
    if not searchable(pool, twins):
        return search.built_up(count, pool)
    sets = search.sets(count, pool)
    for price in _further_rules(count, idle, prices, twins):
        if len(sets) == 1:
            break
        told = [price(chosen) for chosen in sets]
        sets = [chosen for chosen, one in zip(sets, told, strict=True) if one == min(told)]
    return sets[0]


def _further_rules(
    count: int, idle: list[int], prices: _Prices, twins: list[int]
) -> Iterator[Price]:
    """Rules 3 and 4, as prices of a set."""
    everybody = list(range(len(twins)))
    yield from _rule_3(count, idle, prices, twins)
    if len(idle) < len(everybody):
        lost = prices.nearness(everybody)
        yield lambda chosen: sum(lost[i] for i in chosen)
        yield from _rule_3(count, everybody, prices, twins)


def _rule_3(
    count: int, members: list[int], prices: _Prices, twins: Sequence[int]
) -> Iterator[Price]:
    if not searchable(members, twins):
        return
    search = Search(prices.together, [0] * len(twins), twins)
    for size in _SIZES:
        if len(members) - count >= size:
            yield _BestLeft(search, size, members).price


class _BestLeft:
    """What the best set of a size costs among the GPUs that are left."""

    def __init__(self, search: Search, size: int, members: Sequence[int]) -> None:
        self._search, self._size, self._members = search, size, members
        # None can be better than the best one while nobody is taken.
        self._enough, first = search.one(size, members)
        self._best = [first]

    def price(self, taken: Chosen) -> int:
        if any(map(frozenset(taken).isdisjoint, self._best)):
            return self._enough
        left = [i for i in self._members if i not in taken]
        price, best = self._search.one(self._size, left, enough=self._enough)
        if price == self._enough:
            self._best.append(best)
        return price


class _Prices:
    """Numbers for pairs, so that adding them up compares sets as the rules do.

    One pair of a kind outweighs all pairs that there can be of the kinds that count after it.

    Attributes:
        together: what each pair costs, by rule 1; nothing for the nearest kind.
    """

    def __init__(self, table: list[list[int]]) -> None:
        size = len(table)
        kinds = max(map(max, table))
        digit = (size * (size - 1) // 2).bit_length()
        costs = [0, *(1 << digit * kind for kind in range(kinds))]
        worths = [*(1 << digit * (kinds - 1 - kind) for kind in range(kinds)), 0]
        self.together = [[costs[rank] for rank in row] for row in table]
        self._worths = [
            [0 if i == j else worths[rank] for j, rank in enumerate(row)]
            for i, row in enumerate(table)
        ]

    def nearness(self, members: Sequence[int]) -> list[int]:
        """What all pairs of each GPU with one of these are worth, by rule 2."""
        return [sum(row[j] for j in members) for row in self._worths]

    def of_rules_1_and_2(
        self, count: int, idle: Sequence[int]
    ) -> tuple[list[list[int]], list[int]]:
        """What each pair costs, and each GPU alone, so that rule 2 decides where rule 1 does not.

        A set takes from the rest the pairs of its members with any, less those among themselves,
        which would be counted twice. But these are the same for sets that rule 1 holds alike.
        """
        lost = self.nearness(idle)
        shift = (count * max(lost)).bit_length()
        return [[cost << shift for cost in row] for row in self.together], lost
