"""What a cpuset leaves of a process's CPUs by now.

A cpuset that loses CPUs cuts every thread's mask, and the kernel shows what is left; where nothing
is left, it shows all of the cpuset instead. It keeps in mind what each thread has asked for last,
and gives that back when the cpuset grows (cases A17, G4).
"""

from __future__ import annotations

import errno
from collections.abc import Collection

from gpuaff.binding.process import Process
from gpuaff.binding.threads import move, put_again
from gpuaff.cpuset import CpuSet
from gpuaff.records import dataclass
from gpuaff.system import kernel


@dataclass(frozen=True, kw_only=True)
class Granted:
    """What the kernel grants.

    Attributes:
        cpus: what it grants of the original mask; where that is nothing, what it grants instead.
        cpuset: all that it grants, as far as can be seen.
    """

    cpus: CpuSet
    cpuset: CpuSet

    def shown(self, asked: Collection[CpuSet]) -> set[CpuSet]:
        """What threads have now that have asked for one of these masks.

        That is nothing for a thread that sleeps while all of its CPUs are offline.
        """
        cut = {mask & self.cpuset for mask in asked}
        instead = set() if all(cut) else {self.cpuset}
        return {*asked, *cut, *instead}


def ask(process: Process, own: CpuSet) -> Granted:
    """Ask for the original mask, unless the calling thread has all of it; it then has what it gets.

    Not where it has asked for a share of which nothing is left: that could not be asked for again,
    if the call fails.

    Args:
        process: what is remembered of this process.
        own: the calling thread's CPUs.
    """
    original = process.original
    if own == original:
        return Granted(cpus=original, cpuset=original)
    if _has_lost_its_share(process, own):
        return Granted(cpus=own & original or own, cpuset=own)
    got = _asked_for(process, original, own)
    return Granted(cpus=got, cpuset=own if own.issuperset(got) else got)


def shown(process: Process, asked: set[CpuSet]) -> set[CpuSet]:
    """What threads have now that have asked for one of these masks; nobody is moved."""
    own = kernel.get_affinity()
    if own in asked or own == process.original:
        return asked
    found = ask(process, own)
    put_again(kernel.thread_id(), own, process.set_here)
    return found.shown(asked)


def _has_lost_its_share(process: Process, own: CpuSet) -> bool:
    """Whether a cpuset has taken the whole share away; else somebody has moved this thread."""
    share = process.share
    if share is None or own & share or own != kernel.get_affinity(process.pid):
        return False
    try:
        move(share, kernel.thread_id(), own, process.moved)
    except OSError as error:
        return error.errno == errno.EINVAL
    return False


def _asked_for(process: Process, cpus: CpuSet, own: CpuSet) -> CpuSet:
    try:
        move(cpus, kernel.thread_id(), own, process.moved)
    except OSError as error:  # a cpuset has taken all of it away, and put other CPUs in its place
        if error.errno != errno.EINVAL:
            raise
    return kernel.get_affinity()
