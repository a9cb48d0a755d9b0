"""Whether a process was pinned before it claimed, and now sits far from what it got."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gpuaff.claims.model import ClaimedGpu
from gpuaff.notices import Notice


def remarks(gpus: Sequence[ClaimedGpu]) -> tuple[Notice, ...]:
    """What to say of the CPUs that this process was put on, and of the GPUs that it has claimed.

    A process that was not pinned pays nothing: the machine is read only for one that was. Nothing
    is said of a GPU whose near CPUs it may not use at all: then there is nothing that would help.
    """
    pinning = sys.modules.get("gpuaff.binding.process")
    process = None if pinning is None else pinning.remembered()
    if process is None or process.share is None:
        return ()
    from gpuaff.allocator.modes import Scope
    from gpuaff.allocator.near import Neighbourhood
    from gpuaff.binding.report import say
    from gpuaff.cpuset import format_cpulist
    from gpuaff.topology.live import observe

    topology = observe(links=False, accelerators=False)
    search = Neighbourhood(topology, topology.cpus)
    known = topology.gpu_by_index
    far = []
    for index in sorted({gpu.index for gpu in gpus} & known.keys()):
        near = search.near(known[index], Scope.NODE)
        within_reach = near.is_local and not near.cpus.isdisjoint(process.original)
        if within_reach and near.cpus.isdisjoint(process.share):
            far.append(f"GPU {index} ({format_cpulist(near.cpus)})")
    if not far:
        return ()
    notice = Notice(
        "pinned-far",
        f"set_affinity() was called before the claim, and has put this process on the CPUs "
        f"{format_cpulist(process.share)}; none of them is near {' or '.join(far)}, which it has "
        "claimed: claim first, or with pin=True, or call set_affinity() again now",
    )
    say([notice], rank=None)
    return (notice,)
