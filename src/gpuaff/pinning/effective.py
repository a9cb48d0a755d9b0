"""What the kernel grants of a process's CPUs by now: its cpuset may have changed (cases A17, G4).

A cpuset that loses CPUs cuts every thread's mask; where nothing is left of a mask, the kernel
shows all of the cpuset instead. It remembers what each thread has requested last, and gives that
back when the cpuset grows.
"""

from __future__ import annotations

import errno
from collections.abc import Collection
from dataclasses import dataclass

from gpuaff._system import kernel
from gpuaff.cpuset import CpuSet
from gpuaff.pinning.state import Process
from gpuaff.pinning.threads import move, put_again


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveMasks:
    """What the kernel grants.

    Attributes:
        cpus: what it grants of the original mask; where that is nothing, what it grants instead.
        cpuset: all that it grants, as far as can be seen.
    """

    cpus: CpuSet
    cpuset: CpuSet

    def of(self, requested: Collection[CpuSet]) -> set[CpuSet]:
        """The masks that threads have by now that have requested one of these.

        That is nothing for a thread that sleeps while all of its CPUs are offline.
        """
        cut = {mask & self.cpuset for mask in requested}
        instead = set() if all(cut) else {self.cpuset}
        return {*requested, *cut, *instead}


def effective_masks(process: Process, caller: CpuSet) -> EffectiveMasks:
    """Request the original mask for the calling thread, and see what it gets; it keeps that.

    Not where it has requested a share of which nothing is left: that could not be requested again,
    if the call fails.

    Args:
        process: this process, in a transaction.
        caller: the calling thread's CPUs.
    """
    original = process.state.original
    if caller == original:
        return EffectiveMasks(cpus=original, cpuset=original)
    if _has_lost_its_share(process, caller):
        return EffectiveMasks(cpus=caller & original or caller, cpuset=caller)
    got = request(process, original, caller)
    return EffectiveMasks(cpus=got, cpuset=caller if caller.issuperset(got) else got)


def masks_now(process: Process, requested: set[CpuSet]) -> set[CpuSet]:
    """The masks that threads have by now that have requested one of these; no thread moves."""
    caller = kernel.get_affinity()
    if caller in requested or caller == process.state.original:
        return requested
    found = effective_masks(process, caller)
    put_again(kernel.thread_id(), caller, process.state.requested)
    return found.of(requested)


def request(process: Process, cpus: CpuSet, caller: CpuSet) -> CpuSet:
    """Request CPUs for the calling thread; what it then has, which may be other ones."""
    try:
        move(cpus, kernel.thread_id(), caller, process.moved)
    except OSError as error:  # EINVAL: a cpuset denies all of them
        if error.errno != errno.EINVAL:
            raise
    return kernel.get_affinity()


def _has_lost_its_share(process: Process, caller: CpuSet) -> bool:
    """Whether a cpuset has taken the whole share away; else the program has moved this thread."""
    share = process.state.share
    if share is None or caller & share or caller != kernel.get_affinity(process.state.pid):
        return False
    try:
        move(share, kernel.thread_id(), caller, process.moved)
    except OSError as error:
        return error.errno == errno.EINVAL
    return False
