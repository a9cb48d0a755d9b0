"""Which of the free GPUs a claim takes: the best connected ones that leave the rest most useful.

The first rule that distinguishes two sets decides (docs/claims.md has the reasons). It is exact
for up to ``MOST_SETS`` sets, and so for any claim on 16 GPUs; beyond that sets are built step by
step, by rules 1 and 2.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import combinations
from math import comb
from typing import TypeAlias

from gpuaff._system.kernel import Tree
from gpuaff._system.nvml import Session
from gpuaff.options import natural
from gpuaff.topology.model import Gpu, Package, Topology
from gpuaff.topology.sysfs import cpu_list

Chosen: TypeAlias = tuple[int, ...]  # rows of the table, ascending
Price: TypeAlias = Callable[[Chosen], int]

MOST_SETS = 20_000  # 8 of 16 GPUs have 12,870
_LATER_CLAIMS = (4, 8)  # rule 3

# The links of ``nvidia-smi topo -m``, which prints their legend, the nearest first. ``SOC`` is the
# old word for SYS, PSB is a switch like PIX, C2C is NVIDIA's link between chips.
_PATHS = {"C2C": 0, "PIX": 1, "PSB": 1, "PXB": 2, "PHB": 3, "NODE": 4, "SYS": 5, "SOC": 5}


def choose(
    count: int, free: Collection[int], *, topology: Topology, idle: Collection[int] = ()
) -> tuple[int, ...]:
    """Choose some of the free GPUs; ``idle`` are other free ones, which this claim cannot use."""
    pool = sorted(set(free))
    now = {*pool, *idle}
    indices = sorted(now | topology.gpu_by_index.keys())
    table = closeness(topology, indices) if count < len(pool) else []
    if not any(map(any, table)):  # all, or all alike: the usual case
        return tuple(pool[:count])
    prices = _Prices(table, [indices.index(index) for index in sorted(now)])
    best = prices.built if comb(len(pool), count) > MOST_SETS else prices.best
    return tuple(indices[at] for at in best(count, [indices.index(index) for index in pool]))


class _Prices:
    """Numbers for pairs, so that adding them up compares sets as the rules do."""

    # One pair of a kind outweighs all pairs that there can be of the kinds that count after it.

    def __init__(self, table: Sequence[Sequence[int]], idle: Sequence[int]) -> None:
        """Of a table of :func:`closeness`, and the rows of the GPUs that are free now."""
        self._idle, self._everyone = idle, range(len(table))
        kinds = max(map(max, table))
        digit = comb(len(table), 2).bit_length()
        costs = [0, *(1 << digit * kind for kind in range(kinds))]
        worths = [*(1 << digit * (kinds - 1 - kind) for kind in range(kinds)), 0]
        self._costs = [[costs[kind] for kind in row] for row in table]
        self._worths = [[worths[kind] for kind in row] for row in table]
        for i in self._everyone:
            self._worths[i][i] = 0

    def best(self, count: int, pool: Sequence[int]) -> Chosen:
        """The best of all sets; the last rule is the order of ``combinations``: lowest indices."""
        sets = list(combinations(pool, count))
        for price in self._rules(count):
            prices = [price(chosen) for chosen in sets]
            least = min(prices)
            sets = [chosen for chosen, one in zip(sets, prices, strict=True) if one == least]
            if len(sets) == 1:
                break
        return sets[0]

    def _rules(self, count: int) -> Iterator[Price]:
        """Rules 1 to 4 as prices of a set; rule 4 is the others with the busy GPUs given back."""
        yield self._cost
        for members in [self._idle, self._everyone][: 1 + (len(self._idle) < len(self._everyone))]:
            lost = self._lost(members)
            # Pairs within the set count twice, but sets that are alike by rule 1 have the same.
            yield lambda chosen, lost=lost: sum(lost[i] for i in chosen)  # type: ignore[misc]  # mypy: lambda with defaults
            for size in _LATER_CLAIMS:
                if len(members) - count >= size and comb(len(members), size) <= MOST_SETS:
                    yield self._best_left(size, members)

    def _cost(self, chosen: Chosen) -> int:  # rule 1
        costs = self._costs
        return sum([costs[i][j] for i, j in combinations(chosen, 2)])

    def _lost(self, members: Sequence[int]) -> list[int]:
        """Rule 2: the pairs with any of these GPUs that the rest loses, by row."""
        return [sum(row[j] for j in members) for row in self._worths]

    def _best_left(self, size: int, members: Sequence[int]) -> Price:
        """Rule 3: the cost of the best group of a size among the rest."""
        groups = sorted((self._cost(group), group) for group in combinations(members, size))

        def price(chosen: Chosen) -> int:
            taken = set(chosen)
            return next(cost for cost, group in groups if taken.isdisjoint(group))

        return price

    def built(self, count: int, pool: Sequence[int]) -> Chosen:
        """A good set of many: from each GPU, what is cheapest next is added; the best of these."""
        lost, costs = self._lost(self._idle), self._costs

        def grown(first: int) -> tuple[int, int, Chosen]:
            chosen = [first]
            while len(chosen) < count:
                rest = (i for i in pool if i not in chosen)
                chosen.append(min(rest, key=lambda i: (sum(costs[i][j] for j in chosen), lost[i])))
            rows = tuple(sorted(chosen))
            return self._cost(rows), sum(lost[i] for i in rows), rows

        return min(map(grown, pool))[-1]


# The link counts first (the more NVLinks the nearer, any of them before PCI), then whether they
# share a NUMA node, or at least a package. Where the two cells of a pair differ, the farther
# counts. An unknown pair (``N/A``, no table) is taken for PHB on one PCI bus, for NODE on one NUMA
# node, else for SYS.
def closeness(topology: Topology, indices: Sequence[int]) -> list[list[int]]:
    """How far apart each two of these GPUs are, from 0 for the nearest kind of pair among them."""
    numbers = [gpu.index for gpu in topology.gpus]
    links = {
        (row, column): distance
        for row, words in zip(numbers, topology.links or (), strict=False)
        for column, word in zip(numbers, words, strict=False)
        if (distance := _distance(word)) is not None
    }
    places = {gpu.index: _place(gpu, topology.packages or ()) for gpu in topology.gpus}

    def kind_of(a: int, b: int) -> tuple[int, bool, bool]:
        both = zip(places.get(a, _NOWHERE), places.get(b, _NOWHERE), strict=True)
        one_bus, one_node, one_package = (x == y and x is not None for x, y in both)
        unknown = _PATHS["PHB" if one_bus else "NODE" if one_node else "SYS"]
        cells = [links[cell] for cell in ((a, b), (b, a)) if cell in links]
        return max(cells, default=unknown), not one_node, not (one_node or one_package)

    kinds = {pair: kind_of(*pair) for pair in combinations(indices, 2)}
    rank_of = {kind: rank for rank, kind in enumerate(sorted(set(kinds.values())))}
    table = [[0] * len(indices) for _ in indices]
    for (i, a), (j, b) in combinations(enumerate(indices), 2):
        table[i][j] = table[j][i] = rank_of[kinds[a, b]]
    return table


_NOWHERE = None, None, None


def _place(gpu: Gpu, packages: Sequence[Package]) -> tuple[str | None, int | None, int | None]:
    """The PCI bus, the NUMA node and the package of a GPU."""
    bus = gpu.pci_bus_id.rpartition(":")[0] if gpu.pci_bus_id else None
    near = gpu.local_cpus or gpu.node_cpus or frozenset()
    return bus, gpu.numa_node, next((one.id for one in packages if near & one.cpus), None)


def _distance(word: str) -> int | None:
    if word.startswith("NV") and word[2:].isdecimal() and len(word) < 6:
        return -int(word[2:])
    return _PATHS.get(word)


# One CPU near each is enough to know its package. All, as planning needs them, would take longer to
# read than the claim.
def observe_connections(session: Session) -> Topology:
    """How the GPUs of this machine are connected, by the driver; where they are, by sysfs."""
    indices, links = session.links()
    addresses = {device.index: device.pci_bus_id for device in session.devices()}
    tree, gpus, packages = Tree(), list[Gpu](), dict[int, set[int]]()
    for index in indices:
        folder = f"sys/bus/pci/devices/{addresses[index]}"
        node = natural(tree.read(f"{folder}/numa_node"))  # -1: unknown
        near = frozenset(sorted(cpu_list(tree, f"{folder}/local_cpulist"))[:1])
        for cpu in near if node is not None else ():  # without a node all CPUs are listed
            file = f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id"
            package = natural(tree.read(file))
            if package is not None:
                packages.setdefault(package, set()).add(cpu)
        gpus.append(
            Gpu(index=index, pci_bus_id=addresses[index], numa_node=node, local_cpus=near or None)
        )
    known = (Package(id=number, cpus=frozenset(cpus)) for number, cpus in packages.items())
    return Topology(gpus=tuple(gpus), links=links, packages=tuple(known))
