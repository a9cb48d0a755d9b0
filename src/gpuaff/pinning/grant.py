"""The CPUs that come with a claim: a border for every later call inside.

A grant is the union of the domains of the claimed GPUs (:mod:`gpuaff.allocator.domains`), so that
the claims of different jobs are as disjoint in CPUs as they are in GPUs. All threads of the process
move there, and the process's border is from then on the grant: a later ``set_affinity`` divides it,
and its ``restore()`` goes back to it and not beyond.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from gpuaff._system import kernel
from gpuaff._system.interrupts import interruptible
from gpuaff.allocator.domains import gpu_domains, mig_warnings, unusable_reason
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.notices import Notice
from gpuaff.pinning.effective import EffectiveMasks, effective_masks, masks_now
from gpuaff.pinning.pin import unsupported_reason
from gpuaff.pinning.report import refuse_if_broken, say, say_grant
from gpuaff.pinning.restore import current, move_if, put_extras_back, refusal, rewind
from gpuaff.pinning.state import GrantInForce, Process, known_process, this_process, transaction
from gpuaff.pinning.threads import alive, move, move_all, threads_with
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
    _in_force: GrantInForce | None = field(default=None, compare=False)

    def give_back(self) -> CpuSet:
        """Give the process the mask back that it had before the claim.

        What ``set_affinity`` has set since is undone as well. Threads that the program has bound
        since stay. May be called again; in a forked child it does nothing, as a child cannot
        release its parent's claim.

        Returns:
            The calling thread's CPUs afterwards.

        Raises:
            GPUAffinityError: a signal handler called it during another call.
        """
        process, grant = known_process(), self._in_force
        if process is not None and grant is not None:
            try:
                with transaction(process, memory=True, undoes=True):
                    notices = _give_back(process, grant)
            except OSError as error:
                notices = [refusal(error)]
            say(notices)
        return current()


class UnavailableError(Exception):
    """The grant cannot be taken; the last warning says why."""

    def __init__(self, warnings: Iterable[Notice]) -> None:
        super().__init__(warnings)
        self.warnings = tuple(warnings)


def take_grant(indices: Sequence[int], *, strict: bool = False) -> Grant:
    """Put this process, with all its threads, inside the domains of the GPUs that it has claimed.

    Best effort, as pinning is. A domain counts only where this process may use the whole of it,
    and all of the claim's must count: in a part of it, other jobs could not tell which processes
    keep to it. Otherwise the mask stays, with the warning ``grant-unpinned``. Threads that the
    program had bound outside are cut to the grant, or moved into it.

    The driver is asked which GPU has which address, not whether CUDA was started; where NVML is in
    use already, that costs little.

    Args:
        indices: the claimed GPUs, by NVML's index; several MIG instances of a GPU count once.
        strict: raise what would leave the process elsewhere, or its threads scattered.

    Raises:
        GPUAffinityError: with ``strict``, what kept it from being put there; always where a
            signal handler calls it during another call. All is then as it was.
        NoDriverError: with ``strict``, where NVML cannot be used.
        InvalidOptionError: the variable GPUAFF is neither a yes nor a no.
    """
    why = unsupported_reason()
    if why is not None:
        return _untaken([why], strict=strict)
    try:
        process = this_process()
    except OSError as error:  # a seccomp filter
        return _untaken([refusal(error)], strict=strict)

    def attempt() -> Grant:
        with transaction(process):
            made = _take(process, sorted(set(indices)))
            if strict:
                refuse_if_broken(made.warnings)
            say(made.warnings)
            say_grant(indices, made.cpus)
            return made

    with suppress(UnavailableError, OSError):  # a cpuset changed meanwhile, or it is unavailable
        return attempt()
    try:
        return attempt()
    except UnavailableError as last:
        warnings = last.warnings
    except OSError as error:
        warnings = (refusal(error),)
    return _untaken(warnings, strict=strict)


def grant_of(topology: Topology, gpus: Iterable[int]) -> tuple[CpuSet, Notice | None]:
    """The CPUs of a claim of these GPUs; none, and why, where one is not available whole. Pure.

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
    found = tuple(warnings)
    if strict:
        refuse_if_broken(found)
    say(found)
    return Grant(cpus=current(), pinned=False, warnings=found)


def _take(process: Process, gpus: Sequence[int]) -> Grant:
    before, caller = process.state, kernel.get_affinity()
    effective = effective_masks(process, caller)
    with interruptible():  # the driver may hang
        topology = observe(links=False, accelerators=True, allowed=effective.cpus)
    warnings = [note for note in topology.notes if not note.code.startswith("visible-")]
    cpus, why = grant_of(topology, gpus)
    if why is not None:
        raise UnavailableError([*warnings, why])
    warnings += mig_warnings(topology, gpus)
    ours = effective.of(before.requested)
    # Threads that have just these CPUs cannot be told from the others afterwards.
    same = {} if cpus in ours else dict.fromkeys(threads_with(cpus), cpus)
    bound = _BoundThreads(process, cpus)
    _move_caller(bound, caller, effective, ours)
    moved = move_all(cpus, ours=ours, spare={kernel.thread_id()}, moved=process.moved)
    warnings += moved.notices()
    for tid, mask in moved.left.items():
        bound.cut(tid, mask)
    grant = GrantInForce(
        before=before,
        bound={**same, **bound.moved, **alive(before.bound)},
        apart={tid: now for tid, (_, now) in bound.apart.items()},
        cut=bound.apart,
    )
    process.update(
        original=cpus,
        grant=grant,
        share=None,
        bound=grant.bound,
        apart=grant.apart,
        reserved=frozenset(),
        whole=None,
    )
    return Grant(cpus=cpus, pinned=True, warnings=tuple(warnings), _in_force=grant)


@dataclass(slots=True)
class _BoundThreads:
    """Threads that the program has bound: they may stay inside a grant, but not outside.

    Attributes:
        process: this process.
        cpus: the CPUs of the grant.
        apart: those that keep a part of their CPUs, or all: their mask before and now, by id.
        moved: those that keep none, and go where all go: their mask before, by id.
    """

    process: Process
    cpus: CpuSet
    apart: dict[int, tuple[CpuSet, CpuSet]] = field(default_factory=dict)
    moved: dict[int, CpuSet] = field(default_factory=dict)

    def cut(self, tid: int, mask: CpuSet) -> None:
        """Leave a thread those of its CPUs that are inside; where none is, give it the grant."""
        inside = mask & self.cpus
        try:
            if inside != mask or tid == kernel.thread_id():
                move(inside or self.cpus, tid, mask, self.process.moved)
        except OSError:  # it has ended, or is the kernel's
            return
        if inside:
            self.apart[tid] = (mask, inside)
        else:
            self.moved[tid] = mask


def _move_caller(
    bound: _BoundThreads, caller: CpuSet, effective: EffectiveMasks, ours: Iterable[CpuSet]
) -> None:
    """Move the calling thread first, and see whether the kernel grants all of the CPUs."""
    process, cpus, own = bound.process, bound.cpus, kernel.thread_id()
    move(cpus, own, caller, process.moved)
    got = kernel.get_affinity()
    if got != cpus:
        why = _unpinned("a cpuset has changed meanwhile", effective.cpus & got)
        raise UnavailableError([why])
    # A main thread in a part of its share was narrowed by a runtime (case C4), not by the program.
    share = process.state.share
    narrowed = own == process.state.pid and share is not None and caller < share
    if not narrowed and caller not in ours:
        bound.cut(own, caller)


def _give_back(process: Process, grant: GrantInForce) -> list[Notice]:
    if process.state.grant is not grant:
        return []  # it was given back already
    before, state = grant.before, process.state
    masks = masks_now(process, {state.original, *state.requested})
    for tid, (then, now) in grant.cut.items():
        if now != then:
            move_if(process, tid, {now}, then)
    moved = rewind(process, masks, before)
    return [*moved.notices(), *put_extras_back(process, before.extras)]


def _unpinned(why: str, allowed: CpuSet) -> Notice:
    return Notice(
        "grant-unpinned",
        f"a claim keeps to the domains of its GPUs, but {why}: the process keeps the CPUs "
        f"{format_cpulist(allowed)}, where it may meet another job",
    )
