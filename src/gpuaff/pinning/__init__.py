"""``set_affinity``.

Little is imported at the top: the driver is woken first, the rest is imported meanwhile.
"""

from __future__ import annotations

from contextlib import ExitStack

from gpuaff._system.env import wants_driver
from gpuaff._system.interrupts import uninterrupted
from gpuaff._system.nvml_prewarm import prewarmed_driver

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpuaff.allocator.model import Mode, Multithreading, Partition, Scope
    from gpuaff.pinning.restore import Affinity


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
        rank_allowed: the CPUs that each rank may use, where the launcher does not name them.
        memory: where memory comes from: ``preferred``, ``bind`` or ``interleave`` on the NUMA
            nodes of the share's CPUs, or on those that are named: ``bind:8``, ``preferred:0-1``,
            ``interleave:gpu`` (``gpu`` is the memory of the rank's GPU, where that is a NUMA
            node). None leaves the policy. It holds for what the calling thread, and threads and
            processes that it starts later, touch first. Nothing is set where nothing is pinned.
        openmp: set OMP_NUM_THREADS to the number of cores in the share, unless it is set. It
            counts for OpenMP runtimes that are loaded later.
        strict: raise what would leave the process elsewhere than planned, or likely to share
            its CPUs; the documentation of the warnings marks those that count.

    Returns:
        An :class:`Affinity`: the CPUs of the calling thread, as the kernel reports them, with
        ``pinned``, ``warnings``, ``restore()`` and more.

    Raises:
        TypeError: only one of ``local_rank`` and ``nproc_per_node`` is given.
        InvalidOptionError: an argument or a ``GPUAFF_`` variable is invalid.
        GPUAffinityError: a demand cannot be met (``min_physical_cores``, ``reserve``; ``cpus`` or
            ``rank_allowed`` name CPUs that are not available; ``memory`` names a NUMA node that
            this machine does not have); with ``strict`` also what kept the process from being
            pinned as planned; and where a signal handler calls it during another call. Every
            thread, the memory policy and OMP_NUM_THREADS are then as they were.
        NoDriverError: with ``strict``, where NVML cannot be used.
    """
    with uninterrupted(), ExitStack() as undo:
        with prewarmed_driver(wanted=wants_driver()) as end_prewarm:
            from gpuaff.pinning.pin import pin  # while the driver wakes

            made = pin(
                local_rank,
                nproc_per_node,
                end_prewarm,
                strict=strict,
                memory=memory,
                openmp=openmp,
                mode=mode,
                scope=scope,
                multithreading=multithreading,
                balanced=balanced,
                min_physical_cores=min_physical_cores,
                max_physical_cores=max_physical_cores,
                partition=partition,
                cpus=cpus,
                reserve=reserve,
                rank_allowed=rank_allowed,
            )
            affinity = undo.enter_context(made)  # Ctrl-C while the driver is shut down undoes it
        undo.pop_all()
    return affinity
