"""Filling shares of given sizes from one list of cores: in blocks, or L3 domain by domain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from gpuaff.topology.model import Topology

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    from gpuaff.allocator.cores import Cores

Domains: TypeAlias = Sequence[int]
"""The number of the L3 domain of each place; empty where nobody asks for them."""


def pack(cores: Sequence[int], sizes: Sequence[int], domains: Domains) -> list[tuple[int, ...]]:
    """Fill shares; cores beyond the sum of the sizes stay free.

    Without domains the shares are consecutive blocks. With domains, first each share in turn
    takes the lowest domains that are wholly free and fit into what it lacks (*whole* means all
    cores of the list that are in the domain); then each in turn is filled up from as few domains
    as it can be: the lowest with enough free cores, or else the one with most.

    Args:
        cores: the places to share out.
        sizes: the number of places for each share; together no more than there are.
        domains: which place is in which domain.

    Returns:
        Each share's places, those of whole domains first.
    """
    if not domains:
        ends = accumulate(sizes)
        return [tuple(cores[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
    free = _by_domain(cores, domains)
    shares: list[list[int]] = [[] for _ in sizes]
    wanted = list(zip(shares, sizes, strict=True))
    for share, size in wanted:
        _take_whole(share, size, free)
    for share, size in wanted:
        _fill_up(share, size, free)
    return [tuple(share) for share in shares]


def _by_domain(cores: Iterable[int], domains: Domains) -> list[list[int]]:
    """The places of each domain, ascending; the domains by their lowest."""
    found: dict[int, list[int]] = {}
    for place in sorted(cores):
        found.setdefault(domains[place], []).append(place)
    return list(found.values())


def _take_whole(share: list[int], size: int, free: Iterable[list[int]]) -> None:
    for domain in free:
        if len(domain) <= size - len(share):
            share += domain
            domain.clear()


def _fill_up(share: list[int], size: int, free: Iterable[list[int]]) -> None:
    while lacking := size - len(share):
        enough = (domain for domain in free if len(domain) >= lacking)
        domain = next(enough, None) or max(free, key=len)
        share += domain[:lacking]
        del domain[:lacking]


def domains_of(topology: Topology, cores: Cores) -> Domains:
    """The L3 domain of each place; empty when the machine's are unknown.

    A core in no domain is one of its own.
    """
    if not topology.l3:
        return ()
    domain_of = {cpu: number for number, cpus in enumerate(topology.l3) for cpu in cpus}
    found = list(map(domain_of.get, map(min, cores.cpus)))
    alone = len(topology.l3)
    return [
        alone + cores.core(place) if domain is None else domain
        for place, domain in enumerate(found)
    ]
