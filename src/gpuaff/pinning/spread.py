"""``spread``: each worker process on its own part of the rank's cores."""

from __future__ import annotations

import os

from gpuaff import options
from gpuaff._system import kernel
from gpuaff.allocator.cores import allowed_cores, workers_parts
from gpuaff.allocator.model import check_rank
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.launch import inherited
from gpuaff.pinning import threads
from gpuaff.pinning.restore import Affinity, put_threads
from gpuaff.pinning.state import (
    log,
    refusal,
    remembered,
    say,
    this_process,
    transaction,
    unsupported_reason,
)
from gpuaff.topology.sysfs import read_cpus


def spread(worker: int, workers: int) -> Affinity:
    """Put this worker process, with all its threads, on its part of its rank's cores.

    Call it in the worker, as it starts (case C10); under torch's DataLoader
    ``gpuaff.integrations.torch.worker_init_fn`` does. The rank's CPUs are divided core by core;
    the first core is left to the main process where there are two or more. Where there are more
    workers than cores, groups of workers share cores equally.

    What is divided is the share that ``set_affinity`` has set in the process that this one was
    forked from. A worker that was spawned, or that comes from a fork server, does not know that:
    it divides its own mask, which it has inherited, as far as its parent may use that too. CPUs
    outside of this are never used (case B19). Parts of different ranks are disjoint where the
    ranks' shares are.

    Best effort, as ``set_affinity``: where the process cannot be moved it stays where it is, and a
    warning says why. May be called again; the same share is divided then. ``worker`` is a number
    from 0 to ``workers`` − 1.

    Returns:
        The CPUs of the calling thread, read back from the kernel. ``restore()`` gives this
        process those of the rank back, and the end of a ``with`` block what was in force before.

    Raises:
        InvalidOptionError: the numbers are invalid, or the variable GPUAFF is neither a yes nor a
            no.
        GPUAffinityError: a signal handler calls it during another call.
    """
    return spread_within(worker, workers, share=None)


def spread_within(worker: int, workers: int, *, share: CpuSet | None) -> Affinity:
    """:func:`spread`, with the share set in the parent process; None when that is unknown."""
    count = options.count("workers", workers)
    number = check_rank(worker, count, name="worker")
    who, why = f"worker {number} of {count}", unsupported_reason()
    if why is None:
        try:
            cpus = _cpus_to_divide(share)
            process = this_process(border=cpus)
            with transaction(process):
                before = process.state
                # Only workers move. To narrow the main process would narrow whatever it starts.
                cores = allowed_cores(read_cpus(kernel.machine_tree()), threads.granted(cpus).cpus)
                notices = put_threads(process, workers_parts(cores.cpus, count)[number])
                process.update(whole=cpus)
                states, got = (before, process.state), threads.current()
                say(notices)
                log("info", f"{who} -> cpus {format_cpulist(got)}")
                return Affinity(got, states=states, pinned=True, warnings=notices)
        except OSError as error:
            why = refusal(error)
    got = threads.current()
    if number == 0:  # it is the same in all of them
        say([why])
    log("info", f"{who} not pinned: cpus {format_cpulist(got) or 'unknown'}")
    return Affinity(got, warnings=[why])


def _cpus_to_divide(share: CpuSet | None) -> CpuSet:
    state = remembered()
    if state is not None:
        return state.whole or state.mask
    # A fork server keeps the mask that it was started with, which may have been before the rank
    # was pinned; the parent in /proc may be that server.
    own = kernel.get_affinity(os.getpid())
    return share or own & (kernel.affinity_or_none(inherited.maker()) or own) or own
