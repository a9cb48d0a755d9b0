"""Which of the free GPUs a claim takes: the best connected ones that leave the rest most useful.

Of all sets of the size that is asked for, the best one is taken. The first of these rules that
tells two sets apart decides; *apart* is what :mod:`gpuaff.claims.devices.selection` calls far.

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

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from gpuaff._system.kernel import Tree
from gpuaff.topology.model import Gpu, Topology
from gpuaff.topology.pci import DEVICES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    Table: TypeAlias = Sequence[Sequence[int]]  # by member and member; symmetric
    Members: TypeAlias = tuple[int, ...]  # ascending
    Joins: TypeAlias = list[tuple[int, int]]  # who may still join, ascending, and at what price
    from gpuaff.cpuset import CpuSet

    Place: TypeAlias = tuple[str | None, int | CpuSet | None, CpuSet | frozenset[int] | None]
    Chosen: TypeAlias = tuple[int, ...]  # positions, ascending
    Price: TypeAlias = Callable[[Chosen], int]
    from gpuaff._system.nvml import Session

# The cheapest sets of a size, where each two members have a price together.
#
# An exact search with bounds: all sets are tried, except where those that begin so are known to be
# dearer. Members that could be swapped without any price changing are *twins*, and of sets that
# differ by twins only the first is tried: the GPUs of an NVSwitch machine are all twins, and one
# set
# is tried; two islands of eight have nine sets of eight instead of 12870.


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


# How near GPUs are to each other: by NVLink, by PCI, and by NUMA node and package.
#
# The words are nvidia-smi's (``nvidia-smi topo -m`` prints their legend): ``NV#`` is a bonded set
# of
# NVLinks; ``PIX`` one PCIe switch, ``PXB`` several, ``PHB`` the host bridge, ``NODE`` the NUMA node
# and ``SYS`` the link between nodes are what a path over PCIe goes through. ``SOC`` is the old word
# for SYS. PSB is a switch like PIX; C2C is NVIDIA's link between chips.


_PATHS = {"C2C": 0, "PIX": 1, "PSB": 1, "PXB": 2, "PHB": 3, "NODE": 4, "SYS": 5, "SOC": 5}
_NOWHERE: Place = (None, None, None)


def ranks(topology: Topology, indices: Sequence[int]) -> list[list[int]]:
    """How far apart each two of these GPUs are.

    The link counts first (the more NVLinks the nearer, any of them before PCI, and there
    PIX < PXB < PHB < NODE < SYS), then whether they share a NUMA node, or at least a package. Where
    two cells of the table tell different things of one pair, the farther counts. A pair that the
    table does not tell (``N/A``, no table) is taken for PHB on one PCI bus, for NODE on one NUMA
    node, else for SYS.

    Args:
        topology: the machine; a GPU that it does not have is far from all.
        indices: physical indices.

    Returns:
        A number for positions ``i`` and ``j`` of ``indices``: 0 for the nearest kind of pair that
        there is among them, 1 for the next, and so on without gaps; 0 where ``i`` is ``j``.
    """
    words = _Words(topology)
    places = [_place(topology, topology.gpu_by_index.get(index)) for index in indices]
    kinds = {
        (i, j): _kind(words.between(indices[i], indices[j]), places[i], places[j])
        for i in range(len(indices))
        for j in range(i)
    }
    rank_of = {kind: rank for rank, kind in enumerate(sorted(set(kinds.values())))}
    table = [[0] * len(indices) for _ in indices]
    for (i, j), kind in kinds.items():
        table[i][j] = table[j][i] = rank_of[kind]
    return table


class _Words:
    """What a topology's table tells of two GPUs."""

    def __init__(self, topology: Topology) -> None:
        self._rows = topology.links or ()
        self._row_of = {gpu.index: row for row, gpu in enumerate(topology.gpus)}

    def between(self, one: int, other: int) -> int | None:
        """How far apart by their link; None when neither cell tells."""
        i, j = self._row_of.get(one), self._row_of.get(other)
        if i is None or j is None:
            return None
        told = [far for far in (self._cell(i, j), self._cell(j, i)) if far is not None]
        return max(told, default=None)

    def _cell(self, row: int, column: int) -> int | None:
        if row >= len(self._rows) or column >= len(self._rows[row]):
            return None
        word = self._rows[row][column]
        if word.startswith("NV") and word[2:].isdecimal() and len(word) < 6:
            return -int(word[2:])
        return _PATHS.get(word)


def _kind(link: int | None, one: Place, other: Place) -> tuple[int, int]:
    """What pairs are ordered by: their link, then 0 on one NUMA node, 1 in one package, else 2."""
    bus, node, package = ((a is not None and a == b) for a, b in zip(one, other, strict=True))
    if link is None:
        link = _PATHS["PHB" if bus else "NODE" if node else "SYS"]
    return link, 0 if node else 1 if package else 2


def _place(topology: Topology, gpu: Gpu | None) -> Place:
    """A GPU's PCI bus, its NUMA node and its package, each by whatever tells them apart."""
    if gpu is None:
        return _NOWHERE
    near = gpu.local_cpus or gpu.node_cpus or _node_cpus(topology, gpu.numa_node)
    bus = gpu.pci_bus_id.rpartition(":")[0] if gpu.pci_bus_id else None
    node = near if gpu.numa_node is None else gpu.numa_node
    if topology.packages is None or near is None:
        return bus, node, gpu.socket_cpus
    at = frozenset(package.id for package in topology.packages if not near.isdisjoint(package.cpus))
    return bus, node, at or None


def _node_cpus(topology: Topology, number: int | None) -> CpuSet | None:
    found = (node.cpus for node in topology.numa_nodes or () if node.id == number)
    return next(found, None) or None


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


# How the GPUs of this machine are connected: as much of a topology as a choice needs.
#
# The CPUs and masks that planning needs are not read: that would take longer than the claim.


def observe_connections(session: Session) -> Topology:
    """The GPUs, their NUMA nodes by sysfs, and the links between them by the driver."""
    indices, links = session.links()
    addresses = {device.index: device.pci_bus_id for device in session.devices()}
    tree = Tree()
    return Topology(
        gpus=tuple(
            Gpu(
                index=index,
                pci_bus_id=addresses[index],
                numa_node=_numa_node(tree, addresses[index]),
            )
            for index in indices
        ),
        links=links,
    )


def _numa_node(tree: Tree, address: str | None) -> int | None:
    text = tree.read(f"{DEVICES}/{address}/numa_node") if address else None
    return int(text) if text is not None and text.isdecimal() else None  # -1: not told
