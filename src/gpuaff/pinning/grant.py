"""The CPUs that come with a claim: a border for whatever is called later inside.

A grant is the union of the borders of the claimed GPUs (:mod:`gpuaff.allocator.domains`), so that
the claims of strangers are as disjoint in CPUs as they are in GPUs. All threads of the process go
there, and what is remembered as the process's border is from then on the grant: a later
``set_affinity`` cuts inside it, and its ``restore()`` goes back to it and not beyond.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gpuaff._system import kernel
from gpuaff.allocator.domains import gpu_domains, mig_warnings, unusable_reason
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.notices import Notice
from gpuaff.pinning import extras, pin
from gpuaff.pinning.pin import reason
from gpuaff.pinning.report import refuse_if_broken, say, say_grant
from gpuaff.pinning.restore import current, refused, rewind
from gpuaff.pinning.state import (
    Before,
    EffectiveMasks,
    Process,
    Taken,
    observe_masks,
    remembered,
    shown,
    this_process,
)
from gpuaff.pinning.threads import move, move_all, threads_with
from gpuaff.pinning.transaction import transaction
from gpuaff.topology.live import observe
from gpuaff.topology.model import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What :func:`take_grant` has done.

    Attributes:
        cpus: the CPUs of the grant; where none was taken, the calling thread's.
        pinned: whether the process was put there.
        warnings: what was not as hoped.
    """

    cpus: CpuSet
    pinned: bool
    warnings: tuple[Notice, ...] = ()
    _taken: Taken | None = field(default=None, compare=False)

    def give_back(self) -> CpuSet:
        """Give the process the mask back that it had before the claim.

        What ``set_affinity`` has set since is undone as well. Threads that somebody has bound
        since stay. May be called again; in a forked child it does nothing, as a child can't
        release its parent's claim.

        Returns:
            The calling thread's CPUs afterwards.

        Raises:
            GPUAffinityError: a signal handler has called it while another call was at work.
        """
        process, taken = remembered(), self._taken
        if process is not None and taken is not None:
            try:
                transaction(process, lambda: _give_back(process, taken), memory=True)
            except OSError as error:
                say([refused(error)], rank=None)
        return current()


class _UntakenError(Exception):
    """The grant can't be had.

    Attributes:
        warnings: what is to be said; the last one is why.
    """

    def __init__(self, warnings: Iterable[Notice]) -> None:
        super().__init__(warnings)
        self.warnings = tuple(warnings)


def take_grant(
    indices: Sequence[int],
    *,
    strict: bool = False,
    note: Callable[[Callable[[], object]], object] | None = None,
) -> Grant:
    """Put this process, with all its threads, inside the borders of the GPUs that it has claimed.

    Best effort, as pinning is. A border counts only where this process may use the whole of it,
    and all of the claim's must count: in a part of it strangers could not tell who keeps to it.
    Otherwise the mask stays, with the warning ``grant-unpinned``. Threads that somebody had bound
    outside are cut to the grant, or moved into it.

    The driver is asked which GPU has which address, not whether CUDA was started; where NVML is in
    use already, that costs little.

    Args:
        indices: the claimed GPUs, by NVML's index; several MIG instances of a GPU count once.
        strict: raise what would leave the process elsewhere, or its threads scattered.
        note: given the way back (:meth:`Grant.give_back`) while Ctrl-C would still undo all by
            itself: it may come before the caller has what is returned.

    Raises:
        GPUAffinityError: with ``strict``, what kept it from being put there; always where a
            signal handler calls it while another call is at work. All is then as it was.
        NoDriverError: with ``strict``, where NVML cannot be used.
        InvalidOptionError: the variable GPUAFF is neither a yes nor a no.
    """
    why = reason()
    if why is not None:
        return _untaken([why], strict=strict)
    gpus = sorted(set(indices))
    try:
        process = this_process()
    except OSError as error:  # a seccomp filter
        return _untaken([refused(error)], strict=strict)

    def work() -> Grant:
        made = _take(process, gpus)
        if strict:
            refuse_if_broken(made.warnings)
        say(made.warnings, rank=None)
        say_grant(gpus, made.cpus)
        if note is not None:
            note(made.give_back)
        return made

    with process.lock:
        try:
            return transaction(process, work)
        except (_UntakenError, OSError):  # a cpuset changed meanwhile, or it can't be had at all
            pass
        try:
            return transaction(process, work)
        except _UntakenError as last:
            warnings = last.warnings
        except OSError as error:
            warnings = (refused(error),)
    return _untaken(warnings, strict=strict)


def grant_of(topology: Topology, gpus: Iterable[int]) -> tuple[CpuSet, Notice | None]:
    """The CPUs of a claim of these GPUs; none, and why, where they can't be had whole. Pure.

    Args:
        topology: the machine, with its accelerators and what this process may use.
        gpus: the claimed GPUs.
    """
    found, claimed = gpu_domains(topology), list(gpus)
    for gpu in claimed:
        why = unusable_reason(found, gpu, topology.allowed)
        if why is not None:
            return frozenset(), _unpinned(why, topology.allowed)
    return frozenset().union(*(found[gpu] for gpu in claimed)), None


def _untaken(warnings: Iterable[Notice], *, strict: bool) -> Grant:
    said = tuple(warnings)
    if strict:
        refuse_if_broken(said)
    say(said, rank=None)
    return Grant(cpus=current(), pinned=False, warnings=said)


def _take(process: Process, gpus: Sequence[int]) -> Grant:
    before, caller = Before.of(process), kernel.get_affinity()
    granted = observe_masks(process, caller)
    topology = observe(links=False, accelerators=True, allowed=granted.cpus)
    warnings = pin.of_observation(topology)
    cpus, why = grant_of(topology, gpus)
    if why is not None:
        raise _UntakenError([*warnings, why])
    warnings += mig_warnings(topology, gpus)
    ours = granted.shown(process.set_here)
    # Who is just where all go can't be told from the others when we are through.
    bound = {} if cpus in ours else dict.fromkeys(threads_with(cpus), cpus)
    threads = _Threads(process, cpus, caller, ours)
    threads.move_caller(granted)
    moved = move_all(cpus, ours=ours, spare={kernel.thread_id()}, moved=process.moved)
    warnings += moved.notices()
    for tid, mask in moved.left.items():
        threads.cut(tid, mask)
    taken = Taken(
        before=before,
        bound={**bound, **threads.moved, **_alive(process.bound)},
        apart={tid: now for tid, (_, now) in threads.apart.items()},
        cut=threads.apart,
    )
    process.original, process.taken, process.share = cpus, taken, None
    process.bound, process.apart = dict(taken.bound), taken.apart
    process.reserved, process.whole = frozenset(), None
    return Grant(cpus=cpus, pinned=True, warnings=tuple(warnings), _taken=taken)


def _alive(bound: Mapping[int, CpuSet]) -> dict[int, CpuSet]:
    """Without the threads that have ended: their ids are used again."""
    ids = set(kernel.thread_ids() or bound)
    return {tid: mask for tid, mask in bound.items() if tid in ids}


class _Threads:
    """Threads that somebody has bound: they may stay inside, but not outside.

    Attributes:
        apart: those that keep a part of their CPUs, or all: what each had, and has now.
        moved: those that keep none, and go where all go: what each had.
    """

    def __init__(
        self, process: Process, cpus: CpuSet, caller: CpuSet, ours: Iterable[CpuSet]
    ) -> None:
        self._process, self._cpus, self._caller = process, cpus, caller
        share, is_main = process.share, kernel.thread_id() == process.pid
        # The main thread may have been narrowed to a part of its share by a runtime (case C4).
        narrowed = is_main and share is not None and caller < share
        self._is_caller_free = narrowed or caller in ours
        self.apart: dict[int, tuple[CpuSet, CpuSet]] = {}
        self.moved: dict[int, CpuSet] = {}

    def move_caller(self, granted: EffectiveMasks) -> None:
        """Move the calling thread first, and see whether the kernel grants all of the CPUs."""
        own = kernel.thread_id()
        move(self._cpus, own, self._caller, self._process.moved)
        got = kernel.get_affinity()
        if got != self._cpus:
            raise _UntakenError([_unpinned("a cpuset has changed meanwhile", granted.cpus & got)])
        if not self._is_caller_free:
            self.cut(own, self._caller)

    def cut(self, tid: int, mask: CpuSet) -> None:
        """Leave a thread what is inside of what it is bound to; all where that is nothing."""
        inside = mask & self._cpus
        try:
            if inside != mask or tid == kernel.thread_id():
                move(inside or self._cpus, tid, mask, self._process.moved)
        except OSError:  # it has ended, or is the kernel's
            return
        if inside:
            self.apart[tid] = (mask, inside)
        else:
            self.moved[tid] = mask


def _give_back(process: Process, taken: Taken) -> None:
    if process.taken is not taken:
        return  # it was given back already
    before = taken.before
    masks = shown(process, {process.original, *process.set_here})
    for tid, (then, now) in taken.cut.items():
        _put_again(process, tid, now, then)
    moved = rewind(process, masks, before)
    say([*moved.notices(), *extras.put_back(process, before.extras)], rank=None)


def _put_again(process: Process, tid: int, now: CpuSet, then: CpuSet) -> None:
    try:
        if now != then and kernel.get_affinity(tid) == now:
            move(then, tid, now, process.moved)
    except OSError:  # it has ended, or a cpuset denies the mask by now
        return


def _unpinned(why: str, allowed: CpuSet) -> Notice:
    return Notice(
        "grant-unpinned",
        f"a claim keeps to the borders of its GPUs, but {why}: the process keeps the CPUs "
        f"{format_cpulist(allowed)}, where it may meet another job",
    )
