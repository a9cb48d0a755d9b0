"""Which of the free GPUs a claim takes: the best connected ones that leave the rest most useful.

Of all sets of the requested size the best is taken, by the first rule that distinguishes two sets
(docs/claims.md has the reasons):

1. fewer pairs of the farthest kind, then of the second farthest, and so on;
2. what is left has more pairs of the nearest kind, then of the second nearest, and so on;
3. the best four GPUs that are left, by rule 1, then the best eight;
4. rules 2 and 3 once more, for what is left when the busy GPUs have been given back;
5. the lowest indices, compared from the first.

This is exact for up to ``MOST_SETS`` sets, and so for any claim on 16 GPUs. Beyond that sets are
built step by step, by rules 1 and 2, and the best of these is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import combinations
from math import comb
from typing import TypeAlias

from gpuaff._system.kernel import Tree
from gpuaff._system.nvml import Session
from gpuaff.cpuset import CpuSet
from gpuaff.topology.model import Gpu, Topology

Place: TypeAlias = "tuple[str | None, int | CpuSet | None, CpuSet | frozenset[int] | None]"
Chosen: TypeAlias = tuple[int, ...]  # rows of the table, ascending
Price: TypeAlias = Callable[[Chosen], int]

MOST_SETS = 20_000  # 8 of 16 GPUs have 12,870
_STARTS = 8  # the most sets that are built
_LATER_CLAIMS = (4, 8)  # rule 3


def choose(
    count: int,
    free: Collection[int],
    *,
    topology: Topology,
    idle: Collection[int] | None = None,
    usable: Collection[int] | None = None,
) -> tuple[int, ...]:
    """Choose GPUs by the module's rules.

    Args:
        count: how many.
        free: the GPUs to choose from, by physical index: free ones that meet all requirements.
        topology: how they are connected. Unknown GPUs are alike.
        idle: all free GPUs, whether or not they meet this claim's requirements; None: ``free``.
        usable: all GPUs that a later claim may use, busy ones too; None: all of the topology.

    Returns:
        Their physical indices, ascending; the same for the same arguments in any order.

    Raises:
        ValueError: fewer are free than requested, or none is requested.
    """
    pool = sorted(set(free))
    if not 1 <= count <= len(pool):
        raise ValueError(f"cannot choose {count} of {len(pool)} free GPUs {pool}")
    now = {*pool, *(idle or ())}
    indices = sorted({*now, *(topology.gpu_by_index if usable is None else usable)})
    table = ranks(topology, indices) if count < len(pool) else []
    if not any(map(any, table)):  # all, or all alike: the usual case
        return tuple(pool[:count])
    row = {index: at for at, index in enumerate(indices)}
    prices = _Prices(table, [row[index] for index in sorted(now)])
    rows = [row[index] for index in pool]
    best = prices.built if comb(len(pool), count) > MOST_SETS else prices.best
    return tuple(indices[at] for at in best(count, rows))


class _Prices:
    """Numbers for pairs, so that adding them up compares sets as the rules do.

    One pair of a kind outweighs all pairs that there can be of the kinds that count after it.
    """

    def __init__(self, table: Sequence[Sequence[int]], idle: Sequence[int]) -> None:
        """Of a table of :func:`ranks`, and the rows of the GPUs that are free now."""
        self._idle, self._everyone = idle, range(len(table))
        kinds = max(map(max, table))
        digit = comb(len(table), 2).bit_length()
        costs = [0, *(1 << digit * kind for kind in range(kinds))]
        worths = [*(1 << digit * (kinds - 1 - kind) for kind in range(kinds)), 0]
        self._costs = [[costs[rank] for rank in row] for row in table]
        self._worths = [
            [0 if i == j else worths[rank] for j, rank in enumerate(row)]
            for i, row in enumerate(table)
        ]

    def best(self, count: int, pool: Sequence[int]) -> Chosen:
        """The best of all sets: of those that are alike by one rule, the next decides."""
        sets = list(combinations(pool, count))
        for price in self._rules(count):
            prices = [price(chosen) for chosen in sets]
            least = min(prices)
            sets = [chosen for chosen, one in zip(sets, prices, strict=True) if one == least]
            if len(sets) == 1:
                break
        return sets[0]

    def _rules(self, count: int) -> Iterator[Price]:
        """Rules 1 to 4 as prices of a set."""
        yield self._cost
        for members in [self._idle, self._everyone][: 1 + (len(self._idle) < len(self._everyone))]:
            yield self._loss(members)
            for size in _LATER_CLAIMS:
                if len(members) - count >= size and comb(len(members), size) <= MOST_SETS:
                    yield self._best_left(size, members)

    def _cost(self, chosen: Chosen) -> int:  # rule 1
        costs = self._costs
        return sum([costs[i][j] for i, j in combinations(chosen, 2)])

    def _loss(self, members: Sequence[int]) -> Price:
        """Rule 2: the pairs with any of these GPUs that the rest loses.

        Pairs within the set count twice, but sets that are alike by rule 1 have the same.
        """
        lost = self._lost(members)
        return lambda chosen: sum(lost[i] for i in chosen)

    def _lost(self, members: Sequence[int]) -> list[int]:
        return [sum(row[j] for j in members) for row in self._worths]

    def _best_left(self, size: int, members: Sequence[int]) -> Price:
        """Rule 3: the cost of the best group of a size among the rest."""
        groups = sorted((self._cost(group), _bits(group)) for group in combinations(members, size))

        def price(chosen: Chosen) -> int:
            taken = _bits(chosen)
            return next(cost for cost, group in groups if not group & taken)

        return price

    def built(self, count: int, pool: Sequence[int]) -> Chosen:
        """A good set of many: built up from unlike GPUs by adding what is cheapest next.

        The cheapest that could follow count as well: else broken islands would come before whole
        ones.
        """
        lost = self._lost(self._idle)
        shift = (count * max(lost)).bit_length()  # so that rule 2 decides where rule 1 does not
        costs = [[cost << shift for cost in row] for row in self._costs]

        def grown(first: int) -> tuple[int, Chosen]:
            chosen, price = [first], lost[first]
            joins = {i: lost[i] + costs[first][i] for i in pool if i != first}

            def with_followers(i: int) -> int:
                later = sorted(join + costs[i][j] for j, join in joins.items() if j != i)
                return joins[i] + sum(later[: count - len(chosen) - 1])

            while len(chosen) < count:
                last = min(joins, key=with_followers)
                price += joins.pop(last)
                chosen.append(last)
                for i in joins:
                    joins[i] += costs[last][i]
            return price, tuple(sorted(chosen))

        unlike = {(lost[i], *sorted(costs[i][j] for j in pool)): i for i in reversed(pool)}
        return min(grown(unlike[kind]) for kind in sorted(unlike)[:_STARTS])[1]


def _bits(chosen: Chosen) -> int:
    return sum(1 << i for i in chosen)


# How near GPUs are to each other, by NVLink, PCI, NUMA node and package. The words are those of
# ``nvidia-smi topo -m``, which prints their legend; ``SOC`` is the old word for SYS, PSB is a
# switch like PIX, C2C is NVIDIA's link between chips.

_PATHS = {"C2C": 0, "PIX": 1, "PSB": 1, "PXB": 2, "PHB": 3, "NODE": 4, "SYS": 5, "SOC": 5}


def ranks(topology: Topology, indices: Sequence[int]) -> list[list[int]]:
    """How far apart each two of these GPUs are, from 0 for the nearest kind of pair among them.

    The link counts first (the more NVLinks the nearer, any of them before PCI, and there
    PIX < PXB < PHB < NODE < SYS), then whether they share a NUMA node, or at least a package. Where
    the two cells of a pair differ, the farther counts. An unknown pair (``N/A``, no table) is taken
    for PHB on one PCI bus, for NODE on one NUMA node, else for SYS.
    """
    distances = {
        (topology.gpus[i].index, topology.gpus[j].index): distance
        for i, row in enumerate((topology.links or ())[: len(topology.gpus)])
        for j, word in enumerate(row[: len(topology.gpus)])
        if (distance := _distance(word)) is not None
    }
    places = [_place(topology, topology.gpu_by_index.get(index)) for index in indices]
    kinds: dict[tuple[int, int], tuple[int, int]] = {}
    for i, j in combinations(range(len(indices)), 2):
        bus, node, package = (
            one is not None and one == other
            for one, other in zip(places[i], places[j], strict=True)
        )
        unknown = _PATHS["PHB" if bus else "NODE" if node else "SYS"]
        cells = (indices[i], indices[j]), (indices[j], indices[i])
        link = max((distances[cell] for cell in cells if cell in distances), default=unknown)
        kinds[i, j] = link, 0 if node else 1 if package else 2
    rank_of = {kind: rank for rank, kind in enumerate(sorted(set(kinds.values())))}
    table = [[0] * len(indices) for _ in indices]
    for (i, j), kind in kinds.items():
        table[i][j] = table[j][i] = rank_of[kind]
    return table


def _distance(word: str) -> int | None:
    if word.startswith("NV") and word[2:].isdecimal() and len(word) < 6:
        return -int(word[2:])
    return _PATHS.get(word)


def _place(topology: Topology, gpu: Gpu | None) -> Place:
    """A GPU's PCI bus, its NUMA node and its package, each by something that identifies it."""
    if gpu is None:
        return None, None, None
    of_node = (node.cpus for node in topology.numa_nodes or () if node.id == gpu.numa_node)
    near = gpu.local_cpus or gpu.node_cpus or next(of_node, None) or None
    bus = gpu.pci_bus_id.rpartition(":")[0] if gpu.pci_bus_id else None
    node = near if gpu.numa_node is None else gpu.numa_node
    if topology.packages is None or near is None:
        return bus, node, gpu.socket_cpus
    at = frozenset(package.id for package in topology.packages if not near.isdisjoint(package.cpus))
    return bus, node, at or None


def observe_connections(session: Session) -> Topology:
    """How the GPUs of this machine are connected, by the driver; their NUMA nodes by sysfs.

    The CPUs and masks that planning needs are not read: that would take longer than the claim.
    """
    indices, links = session.links()
    addresses = {device.index: device.pci_bus_id for device in session.devices()}
    gpus = []
    for index in indices:
        address = addresses[index]
        text = Tree().read(f"sys/bus/pci/devices/{address}/numa_node") if address else None
        node = int(text) if text is not None and text.isdecimal() else None  # -1: unknown
        gpus.append(Gpu(index=index, pci_bus_id=address, numa_node=node))
    return Topology(gpus=tuple(gpus), links=links)
