"""``set_affinity``, and what it returns.

Little is imported at the top: the driver is woken first, the rest is imported meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from gpuaff._system.env import wants_driver
from gpuaff._system.interrupts import interruptible, uninterrupted
from gpuaff._system.nvml_prewarm import waking_driver

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType
    from typing import Any

    from typing_extensions import Self

    from gpuaff.allocator.model import Mode, Multithreading, Partition, Plan, Scope
    from gpuaff.cpuset import CpuSet
    from gpuaff.notices import Notice
    from gpuaff.pinning.pin import Outcome
    from gpuaff.pinning.state import Extras, State


class Affinity(frozenset[int]):
    """The CPUs of this process after a call of :func:`set_affinity`, as the kernel grants them.

    A frozenset of logical CPU ids, and a context manager that restores at its end.

    Attributes:
        rank: the local rank that it was made for; None when the launcher's variables name none, or
            the rank is unknown and several GPUs are visible.
        plan: the plan for all ranks, or for this one alone where the CPUs of the others are
            unknown; None when none was made (switched off, no Linux, no rank).
        gpu: the physical index of this rank's GPU; None when no GPU is known.
        pinned: whether the mask was set.
        reserved: the CPUs that ``reserve=`` has kept out of the share, for helpers.
        memory: the memory policy that was set for the calling thread (``bind:0-1``), else None.
        warnings: what was not as hoped.
    """

    rank: int | None
    plan: Plan | None
    gpu: int | None
    pinned: bool
    reserved: CpuSet
    memory: str | None
    warnings: tuple[Notice, ...]
    _before: State | None
    _extras: Extras

    def __new__(cls, outcome: Outcome) -> Self:
        """Only :func:`set_affinity` and :func:`spread` make them."""
        self = super().__new__(cls, outcome.cpus)
        self.rank, self.plan, self.pinned = outcome.rank, outcome.plan, outcome.pinned
        plan, rank = outcome.plan, outcome.rank
        share = plan.share_of(rank) if plan is not None and rank is not None else None
        self.gpu = None if share is None else share.gpu
        self.reserved = share.reserved if share is not None and outcome.pinned else frozenset()
        self.memory, self.warnings = outcome.memory, outcome.warnings
        self._before, self._extras = outcome.before, outcome.extras
        return self

    def restore(self) -> CpuSet:
        """Give the process the CPUs back that it had before gpuaff was first called.

        Every thread that still has what gpuaff has set goes back, also when a later call has set
        it; threads that the program has bound elsewhere since stay. The main thread also goes back
        from a part of the share: a runtime or a cpuset has cut it. May be called again, and from
        any thread. In a forked child (a DataLoader worker) it moves the child's threads, if they
        have what was set here, or what the child has set itself since, as by
        :func:`gpuaff.spread`.

        A memory policy goes back in the calling thread only, as the kernel has it: the thread that
        called :func:`set_affinity` should restore. OMP_NUM_THREADS is removed if it was set here
        and is still the same.

        While a cpuset denies all of the CPUs that the process had, nothing is given back; call it
        again when that has changed.

        Returns:
            The calling thread's CPUs afterwards; none while the interpreter shuts down.

        Raises:
            GPUAffinityError: a signal handler called it during another call.
        """
        if _is_finalizing():
            return frozenset()
        from gpuaff.pinning.restore import current, undo_call

        if self.pinned and self._before is not None:
            undo_call(frozenset(self), self._before.first, self._extras)
        return current()

    def reapply(self) -> CpuSet:
        """Put this share into force again: after an import or a framework has moved threads.

        The calling thread goes there, the main thread, every thread that is not inside, and those
        started by a narrowed main thread that have its mask. Threads that are bound to a part of
        the share, or to reserved CPUs, stay; so do those that were bound elsewhere when
        :func:`set_affinity` was called. Never wider than the share; what a cpuset denies by now is
        cut, with a warning. Only CPUs are set. May be called again, from any thread, after
        ``restore()``, and in a forked child, such as a DataLoader worker (cases C8, C10).

        Returns:
            The calling thread's CPUs afterwards; none while the interpreter shuts down.

        Raises:
            GPUAffinityError: a signal handler called it during another call.
        """
        if _is_finalizing():
            return frozenset()
        from gpuaff.pinning.restore import current, reapply_share

        if self.pinned and self._before is not None:
            reapply_share(frozenset(self), reserved=self.reserved, rank=self.rank)
        return current()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Put back what was in force before: an outer block's share, or the first mask."""
        if self._before is not None and not _is_finalizing():
            from gpuaff.pinning.restore import undo_call

            undo_call(frozenset(self) if self.pinned else None, self._before, self._extras)

    def __repr__(self) -> str:
        from gpuaff.cpuset import format_cpulist

        state = f"gpu={self.gpu}" if self.pinned else "not pinned"
        return f"<Affinity rank={self.rank} {state} cpus={format_cpulist(self) or 'unknown'}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Elsewhere it is only a set: another process cannot restore this one."""
        return frozenset, (tuple(self),)


def _is_finalizing() -> bool:
    """Whether the interpreter shuts down, when little can be imported any more."""
    try:
        from sys import is_finalizing
    except ImportError:
        return True
    return is_finalizing()


def set_affinity(
    local_rank: int | None = None,
    nproc_per_node: int | None = None,
    *,
    mode: Mode | str | None = None,
    scope: Scope | str | None = None,
    multithreading: Multithreading | str | None = None,
    balanced: bool | None = None,
    min_physical_cores: int | None = None,
    max_physical_cores: int | None = None,
    partition: Partition | str | None = None,
    cpus: str | Iterable[int] | None = None,
    reserve: int | None = None,
    rank_allowed: Iterable[str | Iterable[int]] | None = None,
    memory: str | None = None,
    openmp: bool | None = None,
    strict: bool | None = None,
) -> Affinity:
    """Put this process, with all its threads, on its own share of the CPUs next to its GPU.

    Call it at the top of the script, before CUDA, OpenMP and the first large allocation: memory
    goes to the NUMA node of the thread that first touches it (case A11).

    Best effort: where the near CPUs, the GPU or the system are not known, the process keeps what
    it has, or gets its share of all its CPUs, and one warning says why. It never leaves the CPUs
    that the process was allowed before. A second call plans anew from the CPUs that the process
    had at the first; a child that was started with its rank's share keeps it.

    An option that is None is taken from ``GPUAFF_<OPTION>`` (``GPUAFF_MODE=all``; but for
    ``rank_allowed``), else its default. ``GPUAFF=off`` turns pinning off.

    Args:
        local_rank: this process's number on this node, 0 … nproc_per_node − 1. Without both
            numbers, the launcher's (:func:`gpuaff.ranks`); where there is none and several GPUs
            are visible, the mask stays, as the process may start the ranks itself.
        nproc_per_node: how many processes share this node's GPUs.
        mode: how near cores are divided; ``unique_contiguous`` by default.
        scope: what is near: the GPU's NUMA ``node`` (default) or its ``socket``.
        multithreading: ``all_logical`` CPUs of a core (default), or a ``single_logical`` one.
        balanced: whether every rank gets equally many cores (default), for the unique modes.
        min_physical_cores: fewer cores for any rank are an error.
        max_physical_cores: the most cores that a rank gets.
        partition: ``job``: the CPUs are divided among the ranks of this job. ``machine``: each
            rank stays inside the domain of its GPU, which is the same for every job. ``auto``
            (default): ``machine`` inside a claim, else ``job``.
        cpus: the only CPUs that are shared out; they must be allowed.
        reserve: how many cores of each rank's part stay out of its share, for helpers.
        rank_allowed: the CPUs that each rank may use, by rank, where ranks have masks of their
            own that the launcher does not name.
        memory: where memory comes from: ``preferred``, ``bind`` or ``interleave`` on the NUMA
            nodes of the share's CPUs, or on those that are named: ``bind:8``, ``preferred:0-1``,
            ``interleave:gpu`` (``gpu`` is the memory of the rank's GPU, where that is a NUMA
            node). None leaves the policy. It holds for the calling thread and for the threads and
            processes that it starts later. It does not affect other threads, memory that has been
            touched already, what other threads touch first, shared memory of other processes, and
            files in the page cache. Nothing is set where nothing is pinned.
        openmp: set OMP_NUM_THREADS to the number of cores in the share, unless it is set. It
            counts for OpenMP runtimes that are loaded later.
        strict: raise what would leave the process elsewhere than planned, or likely to share
            its CPUs; the documentation of the warnings marks those that count.

    Returns:
        The CPUs of the calling thread, read back from the kernel.

    Raises:
        TypeError: only one of ``local_rank`` and ``nproc_per_node`` is given.
        InvalidOptionError: an argument or a ``GPUAFF_`` variable is invalid.
        GPUAffinityError: a demand cannot be met (``min_physical_cores``, ``reserve``; ``cpus`` or
            ``rank_allowed`` name CPUs that are not available; ``memory`` names a NUMA node that
            this machine does not have), also when a variable made it; with ``strict`` also what
            kept the process from being pinned as planned; and always where a signal handler calls
            it during another call. Every thread, the memory policy and OMP_NUM_THREADS are then as
            they were.
        NoDriverError: with ``strict``, where NVML cannot be used.
    """
    with uninterrupted(), ExitStack() as undo:
        with _driver_awake() as driver_may_rest:
            from gpuaff.pinning.pin import pin  # while the driver wakes

            outcome = pin(
                local_rank,
                nproc_per_node,
                strict=strict,
                memory=memory,
                openmp=openmp,
                driver_may_rest=driver_may_rest,
                arguments={
                    "mode": mode,
                    "scope": scope,
                    "multithreading": multithreading,
                    "balanced": balanced,
                    "min_physical_cores": min_physical_cores,
                    "max_physical_cores": max_physical_cores,
                    "partition": partition,
                    "cpus": cpus,
                    "reserve": reserve,
                    "rank_allowed": rank_allowed,
                },
            )
            affinity = undo.enter_context(Affinity(outcome))
        undo.pop_all()
    return affinity


@contextmanager
def _driver_awake() -> Iterator[Callable[[], None]]:
    """``waking_driver``, where Ctrl-C interrupts it at both ends: the driver may hang."""
    with ExitStack() as driver:
        with interruptible():
            may_rest = driver.enter_context(waking_driver(wanted=wants_driver()))
        try:
            yield may_rest
        finally:
            with interruptible():
                driver.close()
