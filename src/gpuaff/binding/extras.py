"""What is set besides CPUs, when it is asked for: the memory policy, and OMP_NUM_THREADS."""

from __future__ import annotations

from gpuaff.allocator.plan import Share
from gpuaff.binding import openmp
from gpuaff.binding.process import NOTHING, Extras, Process
from gpuaff.notices import Notice
from gpuaff.records import dataclass, replace
from gpuaff.settings import said, yes_or_no
from gpuaff.system import kernel
from gpuaff.topology.model import Topology

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuaff.binding.memory_option import Wanted


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What was asked for.

    Attributes:
        memory: the memory policy; None: leave it.
        openmp: whether to set OMP_NUM_THREADS.
    """

    memory: Wanted | None = None
    openmp: bool = False

    @classmethod
    def of(cls, memory: object, openmp: object) -> Asked:
        """Read the arguments, else the variables GPUAFF_MEMORY and GPUAFF_OPENMP.

        Raises:
            InvalidOptionError: one of them cannot be meant.
        """
        return cls(memory=_memory(memory), openmp=yes_or_no("openmp", openmp))


def _memory(argument: object) -> Wanted | None:
    name, value = said("memory", argument)
    if value is None:
        return None
    from gpuaff.binding.memory_option import read

    return read(name, value)


def put(process: Process, asked: Asked, share: Share, topology: Topology) -> list[Notice]:
    """Set what was asked for, before the CPUs: some ways to bind memory move threads (case C11).

    What an earlier call had set is put back first, so that twice is the same as once.

    Raises:
        GPUAffinityError: a NUMA node was named that this machine does not have.
    """
    notices = put_back(process, NOTHING)
    if asked.memory is not None:
        from gpuaff.binding.memory import place

        placed, said_of_memory = place(asked.memory, share, topology)
        notices += said_of_memory
        if placed is not None:
            memory = {**process.extras.memory, kernel.thread_id(): placed}
            process.extras = replace(process.extras, memory=memory)
    if asked.openmp:
        exported, said_of_openmp = openmp.export(share.cores)
        notices += said_of_openmp
        process.extras = replace(process.extras, openmp=exported)
    return notices + openmp.remarks()


def put_back(process: Process, to: Extras) -> list[Notice]:
    """Put back what was set then, as far as the calling thread can.

    Args:
        process: what is remembered of this process.
        to: what was set then.

    Returns:
        What is to be said: what only other threads can put back.
    """
    notices: list[Notice] = []
    now, memory = process.extras, process.extras.memory
    if now.memory or to.memory:
        from gpuaff.binding.memory import rewind

        memory, notices = rewind(now.memory, to.memory)
    openmp.swap(now.openmp, to.openmp)
    process.extras = Extras(memory=memory, openmp=to.openmp)
    return notices


def shed(inherited: Extras, process: Process | None) -> list[Notice]:
    """Put back what this thread, or this forked child, has from its maker.

    Args:
        inherited: what the call that is undone had set.
        process: what is remembered of this process, where it is the one that called.
    """
    if process is None:
        openmp.swap(inherited.openmp, None)
    elif kernel.thread_id() in process.extras.memory:
        return []
    if not inherited.memory:
        return []
    from gpuaff.binding import memory

    return memory.shed(inherited.memory.values())
