"""``set_affinity``, and what it returns.

Little is imported here: the driver is woken first, and the rest is imported while it wakes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from gpuaff._system import kernel
from gpuaff.allocator.model import Partition, Plan, check_count, check_rank
from gpuaff.launch import inherited
from gpuaff.launch.masks import observe_consistency
from gpuaff.launch.ranks import ALONE, Ranks, from_environment
from gpuaff.notices import Notice
from gpuaff.pinning.extras import Asked
from gpuaff.pinning.pin import Attempt, Outcome, RefusedError, UnknownRankError, reason
from gpuaff.pinning.report import refuse_if_broken, say, say_where
from gpuaff.pinning.restore import current, refused
from gpuaff.pinning.state import this_process
from gpuaff.pinning.transaction import transaction
from gpuaff.settings import is_strict, plan_options

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType
    from typing import Any

    from typing_extensions import Self

    from gpuaff.allocator.model import Mode, Multithreading, Plan, Scope
    from gpuaff.cpuset import CpuSet
    from gpuaff.notices import Notice
    from gpuaff.pinning.state import Before, Extras


class Affinity(frozenset[int]):
    """The CPUs of this process after a call of :func:`set_affinity`, as the kernel grants them.

    A frozenset of logical CPU ids, and a context manager that restores at its end.

    Attributes:
        rank: the local rank that it was made for; None when the launcher's variables name none, or
            the rank is unknown and several GPUs are visible.
        plan: the plan for all ranks, or for this one alone where what the others may use is not
            known; None when none was made (switched off, no Linux, no rank).
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
    _before: Before | None
    _extras: Extras | None

    def __new__(
        cls,
        cpus: Iterable[int] = (),
        *,
        rank: int | None = None,
        before: Before | None = None,
        extras: Extras | None = None,
        plan: Plan | None = None,
        pinned: bool = False,
        memory: str | None = None,
        warnings: tuple[Notice, ...] = (),
    ) -> Self:
        """Only :func:`set_affinity` makes them."""
        self = super().__new__(cls, cpus)
        self.rank, self.plan, self.pinned, self.warnings = rank, plan, pinned, warnings
        share = plan.share_of(rank) if plan is not None and rank is not None else None
        self.gpu = None if share is None else share.gpu
        self.reserved = share.reserved if share is not None and pinned else frozenset()
        self.memory, self._before, self._extras = memory, before, extras
        return self

    def restore(self) -> CpuSet:
        """Give the process the CPUs back that it had before gpuaff was first called.

        Every thread that still has what gpuaff has set goes back, also when that was done by a
        later call; those that somebody has bound elsewhere since stay. The main thread also goes
        back from a part of the share: a runtime or a cpuset has cut it. May be called again, and
        from any thread. In a forked child (a DataLoader worker) it moves the child's threads, if
        they have what was set here, or what the child has set itself since, as by
        :func:`gpuaff.spread`.

        A memory policy goes back in the calling thread only, as the kernel has it: the thread that
        has called :func:`set_affinity` should restore. OMP_NUM_THREADS is removed if it was set
        here and is still the same.

        While a cpuset denies all of the CPUs that the process had, nothing is given back; call it
        again when that has changed.

        Returns:
            The calling thread's CPUs afterwards; none while the interpreter is taken down.

        Raises:
            GPUAffinityError: a signal handler has called it while another call was at work.
        """
        if self._is_over():
            return frozenset()
        from gpuaff.pinning.restore import current, put_back

        if self.pinned and self._before is not None:
            put_back(frozenset(self), self._before.first, self._extras)
        return current()

    def reapply(self) -> CpuSet:
        """Put this share into force again: after an import or a framework has moved threads.

        The calling thread goes there, the main thread, every thread that is not inside, and those
        that have what was left to a narrowed main thread. Threads that are bound to a part of the
        share, or to reserved CPUs, stay; so do those that were bound elsewhere when
        :func:`set_affinity` was called. Never wider than the share; what a cpuset denies by now is
        cut, with a warning. Only CPUs are set. May be called again, from any thread, after
        ``restore()``, and in a forked child, such as a DataLoader worker (cases C8, C10).

        Returns:
            The calling thread's CPUs afterwards; none while the interpreter is taken down.

        Raises:
            GPUAffinityError: a signal handler has called it while another call was at work.
        """
        if self._is_over():
            return frozenset()
        from gpuaff.pinning.restore import current

        if self.pinned and self._before is not None:
            from gpuaff.pinning.restore import put_into_force

            put_into_force(frozenset(self), reserved=self.reserved, rank=self.rank)
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
        if self._before is not None and not self._is_over():
            from gpuaff.pinning.restore import put_back

            put_back(frozenset(self) if self.pinned else None, self._before, self._extras)

    @staticmethod
    def _is_over() -> bool:
        """Whether the interpreter is being taken down, when little can be imported any more."""
        try:
            from sys import is_finalizing
        except ImportError:
            return True
        return is_finalizing()

    def __repr__(self) -> str:
        from gpuaff.cpuset import format_cpulist

        state = f"gpu={self.gpu}" if self.pinned else "not pinned"
        return f"<Affinity rank={self.rank} {state} cpus={format_cpulist(self) or 'unknown'}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Elsewhere it is only a set: another process cannot restore this one."""
        return frozenset, (tuple(self),)


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
            numbers, those that the launcher tells (:func:`gpuaff.ranks`); where none does and
            several GPUs are visible, the mask stays, as the process may start the ranks itself.
        nproc_per_node: how many processes share this node's GPUs.
        mode: how near cores are cut; ``unique_contiguous`` by default.
        scope: what is near: the GPU's NUMA ``node`` (default) or its ``socket``.
        multithreading: ``all_logical`` CPUs of a core (default), or a ``single_logical`` one.
        balanced: whether every rank gets equally many cores (default), for the unique modes.
        min_physical_cores: a demand: fewer cores for any rank are an error.
        max_physical_cores: the most cores that a rank gets.
        partition: ``job``: the CPUs are cut among the ranks of this job. ``machine``: each rank
            stays inside the border of its GPU, which is the same for every job. ``auto``
            (default): ``machine`` inside a claim, else ``job``.
        cpus: the only CPUs that are shared out; they must be allowed.
        reserve: how many cores of each rank's part stay out of its share, for helpers.
        rank_allowed: the CPUs that each rank may use, by rank, where ranks have masks of their
            own and the launcher does not tell.
        memory: where memory comes from: ``preferred``, ``bind`` or ``interleave`` on the NUMA
            nodes of the share's CPUs, or on those that are named: ``bind:8``, ``preferred:0-1``,
            ``interleave:gpu`` (``gpu`` is the memory of the rank's GPU, where that is a NUMA
            node). None leaves the policy. It holds for the calling thread and for the threads and
            processes that it starts later. It does not reach threads that are there already,
            memory that has been touched already, what other threads touch first, shared memory of
            other processes, and files that are in the page cache. Nothing is set where nothing is
            pinned.
        openmp: set OMP_NUM_THREADS to the number of cores in the share, unless it is set. It
            counts for OpenMP runtimes that are loaded later.
        strict: raise what would leave the process elsewhere than planned, or likely to share
            its CPUs; the documentation of the warnings marks those that count.

    Returns:
        The CPUs of the calling thread, read back from the kernel.

    Raises:
        TypeError: only one of ``local_rank`` and ``nproc_per_node`` is given.
        InvalidOptionError: an argument or a ``GPUAFF_`` variable cannot be meant.
        GPUAffinityError: a demand cannot be met (``min_physical_cores``, ``reserve``; ``cpus`` or
            ``rank_allowed`` name CPUs that cannot be had; ``memory`` names a NUMA node that this
            machine does not have), also when a variable made it; with ``strict`` also what kept
            the process from being pinned as planned; and always where a signal handler calls it
            while another call is at work. Every thread, the memory policy and OMP_NUM_THREADS are
            then as they were.
        NoDriverError: with ``strict``, where NVML cannot be used.
    """
    from gpuaff._system.env import wants_driver
    from gpuaff._system.nvml_prewarm import waking_driver

    made = None
    try:
        with waking_driver(wanted=wants_driver()) as let_rest:
            made = bind(
                local_rank,
                nproc_per_node,
                strict=strict,
                memory=memory,
                openmp=openmp,
                let_rest=let_rest,
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
    except BaseException:  # Ctrl-C while the driver is shut down: nobody would have what was made
        if made is not None:
            made.__exit__(None, None, None)
        raise
    else:
        return made


# A call of ``set_affinity``, from its arguments to its result.


def bind(
    local_rank: int | None,
    nproc_per_node: int | None,
    *,
    strict: bool | None,
    memory: str | None,
    openmp: bool | None,
    let_rest: Callable[[], None],
    arguments: Mapping[str, object],
) -> Affinity:
    """See :func:`gpuaff.set_affinity`.

    Args:
        local_rank: as there.
        nproc_per_node: as there.
        strict: as there.
        memory: as there.
        openmp: as there.
        let_rest: called when the driver has been asked everything.
        arguments: the options of a plan by name.
    """
    strict = is_strict(strict)
    ranks, remarks = _ranks(local_rank, nproc_per_node)
    options = plan_options((ranks or ALONE).local_size, arguments)
    asked = Asked.of(memory, openmp)
    why = reason()
    if why is not None and (ranks is not None or why.code == "off"):
        return _unpinned(ranks, (why,), strict=strict)
    if ranks is None:
        return _unpinned(ranks, remarks, strict=strict)
    try:
        process = this_process()
    except OSError as error:  # a seccomp filter
        return _unpinned(ranks, (refused(error),), strict=strict)
    claim, said_of_claim = inherited.observe_parent_claim()
    if claim is not None and options.partition is Partition.AUTO:
        # Strangers' claims don't meet, nor do their CPUs.
        options = replace(options, partition=Partition.MACHINE)
    attempt = Attempt(
        process=process,
        ranks=ranks,
        options=options,
        asked=asked,
        strict=strict,
        let_rest=let_rest,
        in_claim=claim is not None,
        no_rank=next((notice for notice in remarks if notice.code == "no-rank"), None),
    )
    if claim is not None and claim.pid == kernel.process_id():
        # Alone on its GPUs: whoever else is on this node has others.
        remarks = tuple(notice for notice in remarks if notice.code != "no-rank")
    said = () if said_of_claim is None else (said_of_claim,)
    if not any(notice.code in _ABOUT_RANKS for notice in remarks):
        said = (*observe_consistency(ranks), *said)
    try:
        return _twice(attempt, (*remarks, *said))
    except UnknownRankError as error:
        others = tuple(notice for notice in remarks if notice.code != "no-rank")
        return _unpinned(None, (*others, *said, *error.warnings), strict=strict)


_ABOUT_RANKS = frozenset({"no-rank", "ranks-contradict", "ranks-stale"})
"""They say already that others may be on this node."""


def _twice(attempt: Attempt, remarks: tuple[Notice, ...]) -> Affinity:
    def work() -> Affinity:
        return _pinned(attempt.rank, attempt.pin(), remarks)

    process, memory = attempt.process, attempt.asked.memory is not None
    with process.lock:
        try:
            return transaction(process, work, memory=memory)
        except (RefusedError, OSError):  # a cpuset changed meanwhile: plan from what is left
            pass
        try:
            return transaction(process, work, memory=memory)
        except RefusedError as last:
            plan, warnings = last.plan, last.warnings
        except OSError as error:
            plan, warnings = None, (refused(error),)
    return _unpinned(attempt.ranks, warnings + remarks, strict=attempt.strict, plan=plan)


def _ranks(
    local_rank: int | None, nproc_per_node: int | None
) -> tuple[Ranks | None, tuple[Notice, ...]]:
    if local_rank is None and nproc_per_node is None:
        return from_environment()
    if local_rank is None or nproc_per_node is None:
        missing = "local_rank" if local_rank is None else "nproc_per_node"
        raise TypeError(
            f"set_affinity() needs {missing} too: give both numbers, or neither to take "
            "the launcher's (gpuaff.ranks())"
        )
    size = check_count("nproc_per_node", nproc_per_node)
    return Ranks(local_rank=check_rank(local_rank, size), local_size=size), ()


def _unpinned(
    ranks: Ranks | None, warnings: tuple[Notice, ...], *, strict: bool, plan: Plan | None = None
) -> Affinity:
    if strict:
        refuse_if_broken(warnings)
    rank = None if ranks is None else ranks.local_rank
    cpus = current()
    say(warnings, rank=rank)
    say_where(rank, None, cpus)
    return Affinity(cpus, rank=rank, plan=plan, warnings=warnings)


def _pinned(rank: int, outcome: Outcome, remarks: tuple[Notice, ...]) -> Affinity:
    warnings = remarks + outcome.warnings
    share = outcome.plan.share_of(rank) if outcome.pinned else None
    placed = outcome.extras.memory.get(kernel.thread_id())
    memory = None if placed is None else str(placed.ours)
    say(warnings, rank=rank)
    say_where(rank, share, outcome.cpus, memory=memory)
    return Affinity(
        outcome.cpus,
        rank=rank,
        before=outcome.before,
        extras=outcome.extras,
        plan=outcome.plan,
        pinned=outcome.pinned,
        memory=memory,
        warnings=warnings,
    )
