"""What ``gpuaff run`` has pinned a rank to, by the variable GPUAFF_PINNED.

The program that a rank becomes starts with a mask of its own, and cannot tell from the mask alone
that it is the rank's share, and no border of somebody else's. The value is

    v1:<rank>:<ranks>:<cpulist>

It silences remarks, and no more: what is planned, and where a process may go, does not hang on it.
"""

from __future__ import annotations

from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.launch.ranks import Ranks
from gpuaff.system import environ

VARIABLE = "GPUAFF_PINNED"

EXPLAINED = frozenset({"mask-narrow", "mask-shrunk", "masks-unknown"})
"""The remarks about a mask whose origin is not known. Here it is: each rank has its share."""


def tell(ranks: Ranks, cpus: CpuSet) -> None:
    """Tell what this process becomes, and what that starts, that it was pinned.

    Args:
        ranks: which rank it is.
        cpus: its share.
    """
    environ.put(VARIABLE, _value(ranks, cpus))


def is_share(ranks: Ranks, own: CpuSet) -> bool:
    """Whether a mask is the share that this very rank was pinned to."""
    return environ.get(VARIABLE) == _value(ranks, own)


def _value(ranks: Ranks, cpus: CpuSet) -> str:
    return f"v1:{ranks.local_rank}:{ranks.local_size}:{format_cpulist(cpus)}"
