"""What each rank may use, before anything is cut: one set of CPUs for each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpuaff.allocator.options import Options
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.errors import GPUAffinityError
from gpuaff.topology.model import Topology


def granted(topology: Topology, options: Options) -> tuple[CpuSet, ...]:
    """The online CPUs that each rank may use: all the same ones, or those of its own mask.

    Masks also name CPUs that are not online (case A18).

    Raises:
        GPUAffinityError: none of a rank's CPUs is online.
    """
    if options.rank_allowed is not None:
        return tuple(_online(topology, rank, own) for rank, own in enumerate(options.rank_allowed))
    usable = topology.allowed & topology.cpus if topology.cpus else topology.allowed
    if topology.cpus and not usable:
        raise GPUAffinityError(
            f"no CPU is allowed: the allowed set ({format_cpulist(topology.allowed) or 'empty'}) "
            f"holds none of the online CPUs {format_cpulist(topology.cpus)}; "
            "check the CPU mask or cpuset that the job was started with"
        )
    return (usable,) * options.nproc


def _online(topology: Topology, rank: int, own: CpuSet) -> CpuSet:
    usable = own & topology.cpus if topology.cpus else own
    if not usable:
        raise GPUAffinityError(
            f"rank_allowed gives rank {rank} the CPUs {format_cpulist(own)}, none of which is "
            f"online here: those are {format_cpulist(topology.cpus)}; give each rank's CPUs by "
            "their ids on this machine"
        )
    return usable


def chosen(allowed: Sequence[CpuSet], cpus: CpuSet, topology: Topology) -> tuple[CpuSet, ...]:
    """What each rank may use of the only CPUs that are to be shared out.

    Raises:
        GPUAffinityError: some of these are not allowed to any rank, or none is to some rank.
    """
    everyone = union(allowed)
    if beyond := cpus - everyone:
        raise _not_had(cpus, beyond, everyone, topology)
    own = {usable: usable & cpus for usable in allowed}
    for rank, usable in enumerate(allowed):
        if not own[usable]:
            raise GPUAffinityError(
                f"cpus={format_cpulist(cpus)} was asked for, but rank {rank} may use only "
                f"{format_cpulist(usable)}, which has none of them; name some of these as well"
            )
    return tuple(own[usable] for usable in allowed)


def _not_had(
    cpus: CpuSet, beyond: CpuSet, everyone: CpuSet, topology: Topology
) -> GPUAffinityError:
    offline = beyond - topology.cpus if topology.cpus else frozenset[int]()
    reasons = [
        f"{why}: {format_cpulist(some)}"
        for why, some in (("not online", offline), ("not allowed", beyond - offline))
        if some
    ]
    return GPUAffinityError(
        f"cpus={format_cpulist(cpus)} was asked for, but not all can be had "
        f"({'; '.join(reasons)}); allowed are {format_cpulist(everyone) or 'none that are known'}: "
        "name only such, or start the job with a wider CPU mask"
    )


def union(sets: Iterable[CpuSet]) -> CpuSet:
    """The union; equal sets, as most ranks and GPUs have them, are read once."""
    each = set(sets)
    return each.pop() if len(each) == 1 else frozenset().union(*each)
