"""``spread``: each worker process on its own part of the rank's cores."""

from __future__ import annotations

from gpuaff._system import kernel
from gpuaff.allocator.cores import allowed_cores
from gpuaff.allocator.model import check_count, check_rank
from gpuaff.allocator.workers import workers_parts
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.launch import inherited
from gpuaff.notices import Notice
from gpuaff.pinning.affinity import Affinity
from gpuaff.pinning.pin import reason
from gpuaff.pinning.report import say, say_worker
from gpuaff.pinning.restore import current, put_threads, refused
from gpuaff.pinning.state import Before, Process, enclosing, expected, remembered, this_process
from gpuaff.pinning.threads import move, put_again
from gpuaff.pinning.transaction import transaction
from gpuaff.topology.model import Topology
from gpuaff.topology.sysfs import read_cpus


def spread(worker: int, workers: int) -> Affinity:
    """Put this worker process, with all its threads, on its part of its rank's cores.

    Call it in the worker, as it starts (case C10); under torch's DataLoader
    ``gpuaff.integrations.torch.worker_init_fn`` does. The rank's CPUs are cut core by core;
    the first core is left to the main process where there are two or more. Where there are more
    workers than cores, groups of workers share cores equally.

    What is cut is the share that ``set_affinity`` has set in the process that this one was forked
    from. A worker that was spawned, or that comes from a fork server, knows nothing of that: it
    cuts its own mask, which it has inherited, as far as the process that has made it may use that
    too. Nothing outside of this is ever used (case B19). Parts of different ranks don't meet where
    the ranks' shares don't.

    Best effort, as ``set_affinity``: where the process can't be moved it stays where it is, and a
    warning says why. May be called again; the same whole is cut then.

    Args:
        worker: this worker's number, 0 … workers − 1.
        workers: how many workers the rank has.

    Returns:
        The CPUs of the calling thread, read back from the kernel. ``restore()`` gives this
        process those of the rank back, and the end of a ``with`` block what was in force before.

    Raises:
        InvalidOptionError: the numbers can't be meant, or the variable GPUAFF is neither a yes nor
            a no.
        GPUAffinityError: a signal handler calls it while another call is at work.
    """
    return spread_within(worker, workers, share=None)


def spread_within(worker: int, workers: int, *, share: CpuSet | None) -> Affinity:
    """The same.

    Args:
        worker: as there.
        workers: as there.
        share: what gpuaff has set in the process that has made this one; None when it is not told.
    """
    count = check_count("workers", workers)
    number = check_rank(worker, count, name="worker")
    why = reason()
    if why is not None:
        return _unspread(number, count, why)
    try:
        cpus, process = _whole(share)
        before = Before.of(process)
        notices = transaction(process, lambda: _spread(process, cpus, number, count))
    except OSError as error:
        return _unspread(number, count, _refused(error))
    got = current()
    say(notices, rank=None)
    say_worker(number, count, got)
    return Affinity(got, before=before, pinned=True, warnings=tuple(notices))


def _whole(share: CpuSet | None) -> tuple[CpuSet, Process]:
    """The CPUs that are cut, and this process, whose border they are if it has none yet."""
    known, grant = remembered(), enclosing()[1]
    found = known.uncut if known is not None else expected() or share or _own()
    inside = found if grant is None else found & grant or grant
    return inside, this_process(border=inside)


def _own() -> CpuSet:
    """The main thread's CPUs, as far as the process may use them that has made this one.

    A fork server keeps the mask that it was started with, which may have been before the rank was
    pinned.
    """
    own = kernel.get_affinity(kernel.process_id())
    # The parent in /proc may be the fork server.
    maker = inherited.maker()
    theirs = None if maker is None else kernel.affinity_of(maker)
    return own if theirs is None else own & theirs or own


def _spread(process: Process, cpus: CpuSet, worker: int, workers: int) -> list[Notice]:
    granted = _granted(process, cpus)
    part = workers_parts(_cores(granted), workers)[worker]
    notices = put_threads(process, part, frozenset())
    process.whole = cpus
    return notices


def _granted(process: Process, cpus: CpuSet) -> CpuSet:
    """What the kernel grants of these CPUs; a cpuset may have changed."""
    own = kernel.get_affinity()
    if own == cpus:
        return cpus
    move(cpus, kernel.thread_id(), own, process.moved)
    got = kernel.get_affinity()
    # Who moves the threads looks first where they are: who was bound goes back there at the end.
    put_again(kernel.thread_id(), own, {own})
    return got & cpus or got


def _cores(cpus: CpuSet) -> tuple[CpuSet, ...]:
    machine = read_cpus(kernel.machine_tree())
    cores = machine.cores if machine.cpus & cpus else None  # else a container shows other files
    slow = machine.efficiency_cpus if cores is not None else frozenset[int]()
    here = Topology(cpus=machine.cpus | cpus, cores=cores, efficiency_cpus=slow)
    return allowed_cores(here, cpus).cpus


def _unspread(worker: int, workers: int, why: Notice) -> Affinity:
    found = current()
    if worker == 0:  # the same in all of them
        say([why], rank=None)
    say_worker(worker, workers, found, pinned=False)
    return Affinity(found, warnings=(why,))


def _refused(error: OSError) -> Notice:
    cpus = format_cpulist(current())
    if not cpus:
        return refused(error)
    text = (
        f"the kernel would not put a worker on its part of the rank's CPUs ({error.strerror}): it "
        f"keeps CPUs {cpus}; a cpuset or a seccomp filter may forbid it"
    )
    return Notice("pin-failed", text)
