"""What is set besides CPUs, when it is asked for: the memory policy, and OMP_NUM_THREADS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from gpuaff._system import env, kernel
from gpuaff.allocator.model import Share
from gpuaff.cpuset import CpuSet
from gpuaff.launch.inherited import PINNED_VARIABLE, Pinned, classify_pinned
from gpuaff.notices import Notice
from gpuaff.pinning import openmp
from gpuaff.pinning.state import NOTHING, Exported, Extras, Process
from gpuaff.settings import said, yes_or_no
from gpuaff.topology.model import Topology

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuaff.pinning.memory import Wanted


@dataclass(frozen=True, slots=True, kw_only=True)
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
    from gpuaff.pinning.memory import read

    return read(name, value)


def put(
    process: Process, asked: Asked, share: Share, topology: Topology, *, ranks: int
) -> list[Notice]:
    """Set what was asked for, before the CPUs: some ways to bind memory move threads (case C11).

    What an earlier call had set is put back first, so that twice is the same as once.

    Args:
        process: what is remembered of this process.
        asked: what was asked for.
        share: this rank's.
        topology: the machine.
        ranks: how many ranks of the job are on this node.

    Raises:
        GPUAffinityError: a NUMA node was named that this machine does not have.
    """
    notices = put_back(process, NOTHING)
    if asked.memory is not None:
        from gpuaff.pinning.memory import place

        placed, said_of_memory = place(asked.memory, share, topology)
        notices += said_of_memory
        if placed is not None:
            memory = {**process.extras.memory, kernel.thread_id(): placed}
            process.extras = replace(process.extras, memory=memory)
    if asked.openmp:
        exported, said_of_openmp = openmp.export(share.cores, ranks)
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
        from gpuaff.pinning.memory import rewind

        memory, notices = rewind(now.memory, to.memory)
    _swap_variables(now, to)
    process.extras = Extras(memory=memory, openmp=to.openmp, mark=to.mark)
    return notices


def put_mark(process: Process, share: Pinned) -> None:
    """Leave word of the share to the processes that are started from now on.

    Called after :func:`put`, which has taken back what an earlier call had left.
    """
    mark = Exported(first=env.get(PINNED_VARIABLE), ours=str(share))
    process.extras = replace(process.extras, mark=mark)
    env.put(PINNED_VARIABLE, mark.ours)


def started_with(process: Process, own: CpuSet) -> Pinned | None:
    """The share of the process that started this one, where this one has no CPUs beside it."""
    mark = process.extras.mark
    return classify_pinned(env.get if mark is None else {PINNED_VARIABLE: mark.first}.get, own)


def adopt(process: Process) -> None:
    """Count a policy that this thread has from the one that started it as set for this one too."""
    placed, own = process.extras.memory, kernel.thread_id()
    if not placed or own in placed:
        return
    from gpuaff.pinning.memory import inherited

    found = inherited(placed)
    if found is not None:
        process.extras = replace(process.extras, memory={**placed, own: found})


def shed(process: Process, now: Extras) -> list[Notice]:
    """Put back what this thread has from its maker, where that one has put it back already.

    Args:
        process: what is remembered of this process.
        now: what the call that is undone had set.
    """
    if not now.memory or kernel.thread_id() in process.extras.memory:
        return []
    from gpuaff.pinning.memory import shed

    return shed(now.memory, {})


def put_back_in_a_child(now: Extras, to: Extras, *, parent: int) -> list[Notice]:
    """Put back what was set then, in a forked child of the process that had set it.

    Args:
        now: what the call that is undone had set.
        to: what was set before it.
        parent: the id of the parent's main thread: the one that has forked, most probably.
    """
    _swap_variables(now, to)
    if not now.memory and not to.memory:
        return []
    from gpuaff.pinning.memory import back, shed

    if parent in now.memory or parent not in to.memory:
        return shed(now.memory, to.memory)
    return back(None, to.memory[parent])


_VARIABLES = (openmp.NUMBER, PINNED_VARIABLE)


def _swap_variables(now: Extras, then: Extras) -> None:
    _swap(openmp.NUMBER, now.openmp, then.openmp)
    _swap(PINNED_VARIABLE, now.mark, then.mark)


def _swap(name: str, now: Exported | None, then: Exported | None) -> None:
    """Put a variable back to what it was then; not where somebody else has set it since."""
    if now is not None and now != then:
        _put_over(name, now.ours, now.first if then is None else then.ours)
    elif then is not None and now is None:  # a call that set none had taken it away
        _put_over(name, then.first, then.ours)


def _put_over(name: str, expected: str | None, wanted: str | None) -> None:
    if env.get(name) == expected:
        env.put(name, wanted)


def taken_down(process: Process, *, memory: bool) -> Callable[[], None]:
    """Take down what is set besides CPUs, whoever has set it.

    Args:
        process: what is remembered of this process.
        memory: whether the memory policy may be changed, though none is set here.

    Returns:
        What puts back exactly that.
    """
    then, values = process.extras, {name: env.get(name) for name in _VARIABLES}
    put_policy_back = _policy() if memory or then.memory else None

    def put_back() -> None:
        process.extras = then
        for name, value in values.items():
            if env.get(name) != value:
                env.put(name, value)
        if put_policy_back is not None:
            put_policy_back()

    return put_back


def _policy() -> Callable[[], None]:
    from gpuaff.pinning.memory import taken_down

    return taken_down()
