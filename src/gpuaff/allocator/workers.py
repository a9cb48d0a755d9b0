"""A rank's cores, cut among its helper processes (the workers of a DataLoader). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from gpuaff.cpuset import CpuSet


def workers_parts(cores: Sequence[CpuSet], workers: int) -> tuple[CpuSet, ...]:
    """Cut cores among workers, and leave the first one to the process that they work for.

    The first core stays out where there are at least two: it is a fast one on hybrid processors
    (case G5), and the main process, which feeds the GPU, is what all workers wait for.

    Workers get blocks of neighbouring cores, which mostly share caches; their sizes differ by one
    core at most. Where there are more workers than cores, cores and workers are cut into as many
    groups as both can be divided by, and the workers of a group share its cores: a DataLoader
    takes its batches in turn, so it is as slow as its slowest worker, and of three workers on two
    cores, each on one, two would be slow.

    Args:
        cores: the CPUs of each core, in their order, none of them empty; at least one.
        workers: how many workers there are, at least one.

    Returns:
        Each worker's CPUs; none is empty.
    """
    rest = cores[1:] or cores
    groups = workers if workers <= len(rest) else gcd(workers, len(rest))
    return tuple(_block(rest, worker * groups // workers, groups) for worker in range(workers))


def _block(cores: Sequence[CpuSet], place: int, count: int) -> CpuSet:
    """One of ``count`` blocks."""
    start, end = (len(cores) * edge // count for edge in (place, place + 1))
    return frozenset().union(*cores[start:end])
