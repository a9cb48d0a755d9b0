"""What a process of ours has pinned a rank to, by the variable GPUAFF_PINNED.

A rank that starts Python again (a spawned child that imports the script again, a wrapper's script,
the command of ``gpuaff run``) hands it its mask. The mask alone does not show that it is this
rank's share already, and no border to be shared out. The value is

    v1:<rank>:<ranks>:<cpulist>:<cpulist of the reserved CPUs>

It counts only where the process may use no other CPUs than these.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpuaff.cpuset import CpuSet, format_cpulist, parse_cpulist
from gpuaff.launch.ranks import Ranks
from gpuaff.launch.variables import Get, number
from gpuaff.notices import Notice

PINNED_VARIABLE = "GPUAFF_PINNED"

EXPLAINED = frozenset({"mask-narrow", "mask-shrunk", "masks-unknown"})
"""The remarks about a mask whose origin is not known. Here it is: each rank has its share."""

_MOST = 65_536
"""The longest value that is read, in characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """A share that was set; ``str()`` gives the variable's value.

    Attributes:
        local_rank: the rank that it was set for.
        local_size: how many ranks it was cut for.
        cpus: the share.
        reserved: the CPUs that were kept out of it for helpers.
    """

    local_rank: int
    local_size: int
    cpus: CpuSet
    reserved: CpuSet = frozenset()

    def __str__(self) -> str:
        sets = f"{format_cpulist(self.cpus)}:{format_cpulist(self.reserved)}"
        return f"v1:{self.local_rank}:{self.local_size}:{sets}"

    def is_of(self, ranks: Ranks) -> bool:
        """Whether it was set for this very rank."""
        return (self.local_rank, self.local_size) == (ranks.local_rank, ranks.local_size)


def read(get: Get, own: CpuSet) -> Pinned | None:
    """The share that this process was started with; None where its mask is not that, or unknown.

    Args:
        get: the environment.
        own: the CPUs that this process may use.
    """
    text = get(PINNED_VARIABLE) or ""
    fields = text.split(":")
    if len(text) > _MOST or len(fields) != 5 or fields[0] != "v1":
        return None
    rank, size = number(fields[1]), number(fields[2])
    try:
        cpus, reserved = map(parse_cpulist, fields[3:])
    except ValueError:
        return None
    if rank is None or size is None or not own <= cpus:
        return None
    return Pinned(local_rank=rank, local_size=size, cpus=cpus, reserved=reserved)


def of_another(share: Pinned, ranks: Ranks) -> Notice:
    """What to say where a rank was started with the share of another one."""
    return Notice(
        "share-inherited",
        f"this is rank {ranks.local_rank} of {ranks.local_size}, and the process that started it "
        f"was pinned as rank {share.local_rank} of {share.local_size}: this rank is confined to "
        f"that share, CPUs {format_cpulist(share.cpus)}; start the ranks before set_affinity() is "
        "called there, or after restore()",
        rank=ranks.local_rank,
    )
