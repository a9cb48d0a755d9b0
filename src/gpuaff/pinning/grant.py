"""The CPUs that come with a claim: a border for every later call inside.

A grant is the union of the domains of the claimed GPUs (:mod:`gpuaff.allocator.domains`), so that
the claims of different jobs are as disjoint in CPUs as they are in GPUs. All threads of the process
move there, and the process's border is from then on the grant: a later ``set_affinity`` divides it,
and its ``restore()`` goes back to it and not beyond.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from gpuaff._system import kernel
from gpuaff._system.interrupts import interruptible
from gpuaff.allocator.domains import gpu_domains, mig_warnings, unusable_reason
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.notices import Notice
from gpuaff.pinning import threads
from gpuaff.pinning.pin import unsupported_reason
from gpuaff.pinning.restore import move_if, put_extras_back, rewind
from gpuaff.pinning.state import (
    Process,
    State,
    UnavailableError,
    known_process,
    log,
    refuse_if_broken,
    say,
    this_process,
    transaction,
    try_twice,
)
from gpuaff.topology.live import observe
from gpuaff.topology.model import Topology


@dataclass(eq=False, slots=True, kw_only=True)
class Grant:
    """What :func:`take_grant` has done; while it is in force, the border of this process.

    Attributes:
        cpus: the CPUs of the grant; where none was taken, the calling thread's.
        warnings: what was not as hoped.
        before: the state to go back to; a call that is undone meanwhile is taken out of it. None
            where no grant was taken.
        bound: as in :class:`State`, when the grant was taken; likewise ``apart``.
        cut: threads that were bound partly outside the grant: their mask then and now, by id.
    """

    cpus: CpuSet
    warnings: tuple[Notice, ...] = ()
    before: State | None = None
    bound: Mapping[int, CpuSet] = field(default_factory=dict)
    cut: Mapping[int, tuple[CpuSet, CpuSet]] = field(default_factory=dict)

    @property
    def pinned(self) -> bool:
        """Whether the process was put there."""
        return self.before is not None

    @property
    def apart(self) -> dict[int, CpuSet]:
        """The threads that keep CPUs of their own."""
        return {tid: now for tid, (_, now) in self.cut.items()}

    def give_back(self) -> CpuSet:
        """Give the process the mask back that it had before the claim.

        What ``set_affinity`` has set since is undone as well. Threads that the program has bound
        since stay. May be called again; in a forked child it does nothing, as a child cannot
        release its parent's claim. Returns the calling thread's CPUs afterwards.
        """
        process = known_process()
        if process is not None and self.pinned:
            try:
                with transaction(process, memory=True, undoes=True):
                    notices = _give_back(process, self)
            except OSError as error:
                notices = [threads.refusal(error)]
            say(notices)
        return threads.current()


def take_grant(indices: Sequence[int], *, strict: bool = False) -> Grant:
    """Put this process, with all its threads, inside the domains of the GPUs that it has claimed.

    Best effort, as pinning is. A domain counts only where this process may use the whole of it,
    and all of the claim's must count: in a part of it, other jobs could not know which processes
    keep to it. Otherwise the mask stays, with the warning ``grant-unpinned``. Threads that the
    program had bound outside are cut to the grant, or moved into it.

    The driver reports which GPU has which address, not whether CUDA was started.

    ``indices`` are NVML's; several MIG instances of a GPU count once. ``strict`` raises what would
    leave the process elsewhere, or its threads scattered; all is then as it was.
    """
    gpus = frozenset(indices)

    def attempt() -> Grant:
        process = this_process()
        with transaction(process):
            grant = _take(process, sorted(gpus))
            if strict:
                refuse_if_broken(grant.warnings)
            say(grant.warnings)
            which = f"GPU{'s' if len(gpus) > 1 else ''} {format_cpulist(gpus)}"
            log("info", f"claim of {which} -> cpus {format_cpulist(grant.cpus)}")
            return grant

    why = unsupported_reason()
    found = try_twice(attempt) if why is None else UnavailableError([why])
    if isinstance(found, Grant):
        return found
    if strict:
        refuse_if_broken(found.warnings)
    say(found.warnings)
    return Grant(cpus=threads.current(), warnings=found.warnings)


def grant_of(topology: Topology, gpus: Iterable[int]) -> tuple[CpuSet, Notice | None]:
    """The CPUs of a claim of these GPUs; none, and why, where one is not available whole. Pure."""
    found, claimed = gpu_domains(topology), list(gpus)
    for gpu in claimed:
        why = unusable_reason(found, gpu, topology.allowed)
        if why is not None:
            return frozenset(), _unpinned(why, topology.allowed)
    return frozenset().union(*(found[gpu] for gpu in claimed)), None


def _take(process: Process, gpus: Sequence[int]) -> Grant:
    before, caller = process.state, kernel.get_affinity()
    effective = threads.request_original_mask(process, caller)
    with interruptible():  # the driver may hang
        topology = observe(links=False, accelerators=True, allowed=effective.cpus)
    warnings = [note for note in topology.notes if not note.code.startswith("visible-")]
    cpus, why = grant_of(topology, gpus)
    if why is not None:
        raise UnavailableError([*warnings, why])
    warnings += mig_warnings(topology, gpus)
    ours, own = effective.of(before.requested), threading.get_native_id()
    # Threads that have just these CPUs cannot be distinguished from the others afterwards.
    alike = {} if cpus in ours else threads.having(cpus)
    got, _ = threads.take(process, cpus, caller)
    if got != cpus:
        why = _unpinned("a cpuset has changed meanwhile", effective.cpus & got)
        raise UnavailableError([why])
    outside = threads.bound_caller(process, caller, ours)
    moved = threads.move_all(cpus, ours=ours.__contains__, spare={own}, moved=process.moved)
    warnings += moved.notices()
    cut, bound = _cut(process, cpus, outside | moved.left)
    bound = {**alike, **bound, **threads.alive(before.bound)}
    grant = Grant(cpus=cpus, warnings=tuple(warnings), before=before, bound=bound, cut=cut)
    process.update(
        original=cpus,
        grant=grant,
        share=None,
        bound=grant.bound,
        apart=grant.apart,
        reserved=frozenset(),
        whole=None,
    )
    return grant


def _cut(
    process: Process, cpus: CpuSet, outside: Mapping[int, CpuSet]
) -> tuple[dict[int, tuple[CpuSet, CpuSet]], dict[int, CpuSet]]:
    """Leave threads that the program has bound those of their CPUs that are inside the grant.

    Returns:
        The masks before and now of those that keep some or all, by id; and the masks before of
        those that keep none, which get all of the grant.
    """
    # Such threads move here and nowhere else, as a grant is a border to other jobs.
    cut, moved = dict[int, tuple[CpuSet, CpuSet]](), dict[int, CpuSet]()
    for tid, mask in outside.items():
        inside = mask & cpus
        with suppress(OSError):  # it has ended, or is the kernel's
            if inside != mask or tid == threading.get_native_id():
                threads.move(inside or cpus, tid, mask, process.moved)
            if inside:
                cut[tid] = (mask, inside)
            else:
                moved[tid] = mask
    return cut, moved


def _give_back(process: Process, grant: Grant) -> list[Notice]:
    before, state = grant.before, process.state
    if before is None or state.grant is not grant:
        return []  # it was given back already
    masks = threads.masks_now(process, {state.original, *state.requested})
    for tid, (then, now) in grant.cut.items():
        if now != then:
            move_if(process, tid, now.__eq__, then)
    return rewind(process, masks, before) + put_extras_back(process, before)


def _unpinned(why: str, allowed: CpuSet) -> Notice:
    return Notice(
        "grant-unpinned",
        f"a claim keeps to the domains of its GPUs, but {why}: the process keeps the CPUs "
        f"{format_cpulist(allowed)}, where it may meet another job",
    )
