"""The cheapest sets of a size, where each two members have a price together.

An exact search with bounds: all sets are tried, except where those that begin so are known to be
dearer. Members that could be swapped without any price changing are *twins*, and of sets that
differ by twins only the first is tried: the GPUs of an NVSwitch machine are all twins, and one set
is tried; two islands of eight have nine sets of eight instead of 12870.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    Table: TypeAlias = Sequence[Sequence[int]]  # by member and member; symmetric
    Members: TypeAlias = tuple[int, ...]  # ascending
    Joins: TypeAlias = list[tuple[int, int]]  # who may still join, ascending, and at what price

MOST_SETS = 1 << 16
"""How many sets of all sizes a pool may have to be searched, without those that differ by twins: as
many as 16 members have when none are twins."""

_STARTS = 8
"""How many sets are built up with foresight."""


def twin_masks(table: Table) -> list[int]:
    """For each member its twins, and itself, as bits."""
    masks = [1 << i for i in range(len(table))]
    for i, row in enumerate(table):
        for j in range(i):
            if masks[i] >> j & 1 or not _alike(row, table[j], j, i):
                continue
            together = masks[i] | masks[j]  # a twin's twin is a twin
            masks = [together if mask & together else mask for mask in masks]
    return masks


def _alike(one: Sequence[int], other: Sequence[int], low: int, high: int) -> bool:
    """Whether two members' rows are the same but for the places of the two."""
    return (
        one[:low] == other[:low]
        and one[low + 1 : high] == other[low + 1 : high]
        and one[high + 1 :] == other[high + 1 :]
    )


def searchable(pool: Sequence[int], twins: Sequence[int]) -> bool:
    """Whether all sets of a pool can be tried in little time."""
    members = sum(1 << i for i in pool)
    sets = 1
    for group in {twins[i] & members for i in pool}:
        sets *= group.bit_count() + 1
    return sets <= MOST_SETS


class Search:
    """Looks for the cheapest sets of some members.

    The price of a set is what its members cost alone plus what each two of them cost together.
    Prices are not negative.
    """

    def __init__(self, together: Table, alone: Sequence[int], twins: Sequence[int]) -> None:
        self._together, self._twins, self._alone = together, twins, alone
        self._found: list[Members] = []
        self._best = 0
        self._enough: int | None = None

    def sets(self, size: int, pool: Sequence[int]) -> list[Members]:
        """All cheapest sets, in order, without those that others of them have twins of.

        Args:
            size: how many members, at least one and at most all.
            pool: who comes into question, ascending.
        """
        self._start(size, pool, enough=None)
        return self._found

    def one(self, size: int, pool: Sequence[int], *, enough: int = 0) -> tuple[int, Members]:
        """The price of the cheapest sets, and one of them.

        The search ends when one costs no more than ``enough``.
        """
        self._start(size, pool, enough=enough)
        return self._best, self._found[0]

    def _start(self, size: int, pool: Sequence[int], *, enough: int | None) -> None:
        self._best, first = min(self._step_by_step(first, size, pool) for first in pool)
        self._enough, self._found = enough, [] if enough is None else [first]
        self._grow((), [(i, self._alone[i]) for i in pool], size, 0)

    def built_up(self, size: int, pool: Sequence[int]) -> Members:
        """A cheap set for a pool that is too large to try all.

        One is built from each member by adding what is cheapest next. From the members for which
        that worked best it is done once more with foresight: what counts is what a member and the
        cheapest of those who could follow would cost.
        """
        firsts = self._one_of_twins(pool)
        tried = sorted((self._step_by_step(first, size, pool), first) for first in firsts)
        best = [first for _, first in tried[:_STARTS]]
        again = [self._step_by_step(first, size, pool, foresight=True) for first in best]
        return min(tried[0][0], *again)[1]

    def _step_by_step(
        self, first: int, size: int, pool: Sequence[int], *, foresight: bool = False
    ) -> tuple[int, Members]:
        price, chosen = self._alone[first], [first]
        row = self._together[first]
        joins = {i: self._alone[i] + row[i] for i in pool if i != first}
        while len(chosen) < size:
            # Of those that cost the same it is the lowest.
            if foresight:
                last = self._next(joins, size - len(chosen) - 1)
            else:
                last = min(joins, key=joins.__getitem__)
            price += joins.pop(last)
            chosen.append(last)
            row = self._together[last]
            for i in joins:
                joins[i] += row[i]
        return price, tuple(sorted(chosen))

    def _next(self, joins: Mapping[int, int], followers: int) -> int:
        """Who should join, if so many are to follow."""

        def price(i: int) -> int:
            row = self._together[i]
            follow = sorted(join + row[j] for j, join in joins.items() if j != i)
            return joins[i] + sum(follow[:followers])

        return min(self._one_of_twins(joins), key=price)

    def _one_of_twins(self, members: Iterable[int]) -> list[int]:
        """The first of all members that are twins of each other."""
        first: dict[int, int] = {}
        for i in members:
            first.setdefault(self._twins[i], i)
        return list(first.values())

    def _grow(self, chosen: Members, joins: Joins, lacking: int, price: int) -> None:
        """Try all sets that begin with these members and go on with some that may join."""
        if lacking == 1:
            self._end(chosen, joins, price)
            return
        left_out = 0
        for place, (i, join) in enumerate(joins):
            if self._best == self._enough:
                return
            # Without a member its twins need not be tried either.
            if left_out >> i & 1:
                continue
            grown, row = price + join, self._together[i]
            later = [(j, more + row[j]) for j, more in joins[place + 1 :] if not left_out >> j & 1]
            left_out |= self._twins[i]
            if len(later) < lacking - 1:
                return
            # Whoever joins costs at least what it costs with those who are in.
            least = grown + sum(sorted(more for _, more in later)[: lacking - 1])
            if least < self._best or (least == self._best and self._enough is None):
                self._grow((*chosen, i), later, lacking - 1, grown)

    def _end(self, chosen: Members, joins: Joins, price: int) -> None:
        """Try each as the last one."""
        least = price + min(more for _, more in joins)
        if least < self._best:
            self._best, self._found = least, []
        if least > self._best or (self._found and self._enough is not None):
            return
        left_out = 0
        for i, more in joins:
            if price + more == least and not left_out >> i & 1:
                left_out |= self._twins[i]
                self._found.append((*chosen, i))
