"""The CPUs that come with a claim: a border for every later call inside.

A grant is the union of the domains of the claimed GPUs (:mod:`gpuaff.allocator.domains`), so that
the claims of different jobs are as disjoint in CPUs as they are in GPUs. All threads move there. A
later ``set_affinity`` divides it, and its ``restore()`` goes back to it and not beyond.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from gpuaff._system import kernel
from gpuaff._system.interrupts import interruptible
from gpuaff.allocator.domains import gpu_domains, mig_warnings, unusable_reason
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.notices import Notice
from gpuaff.pinning import threads
from gpuaff.pinning.restore import put_extras_back, rewind
from gpuaff.pinning.state import (
    Bound,
    Process,
    State,
    UnavailableError,
    known_process,
    log,
    place,
    refusal,
    refuse_if_broken,
    say,
    this_process,
    transaction,
    try_twice,
    unsupported_reason,
)
from gpuaff.topology.live import observe
from gpuaff.topology.model import Topology


class Grant(NamedTuple):
    """What :func:`take_grant` has done; while it is in force, the border of this process."""

    cpus: CpuSet  # the calling thread's where no grant was taken
    warnings: tuple[Notice, ...]
    pinned: bool  # whether the process was put there

    def give_back(self) -> CpuSet:
        """Undo it, and later calls; the calling thread's CPUs afterwards. May be called again."""
        # A forked child, which cannot release its parent's claim, does not know what was before.
        process = known_process()
        before = process.state.outside if process and process.state.grant is self else None
        if process is not None and before is not None:
            try:
                with transaction(process, memory=True, undoes=True):
                    notices = rewind(process, before) + put_extras_back(process, before)
            except OSError as error:
                notices = [refusal(error)]
            say(notices)
        return threads.current()


def take_grant(indices: Sequence[int], *, strict: bool = False) -> Grant:
    """Put this process, with all its threads, inside the domains of the GPUs that it has claimed.

    Best effort, as pinning is: where one of the domains is not allowed whole, the mask stays, as
    other jobs could not know which processes keep to a part of it. ``indices`` are NVML's; several
    MIG instances of a GPU count once.
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
    return Grant(threads.current(), found.warnings, pinned=False)


def grant_of(topology: Topology, gpus: Iterable[int]) -> tuple[CpuSet, Notice | None]:
    """The CPUs of a claim of these GPUs; none, and why, where one is not available whole. Pure."""
    found, claimed = gpu_domains(topology), list(gpus)
    for gpu in claimed:
        why = unusable_reason(found, gpu, topology.allowed)
        if why is not None:
            return frozenset(), _unpinned(why, topology.allowed)
    return frozenset().union(*(found[gpu] for gpu in claimed)), None


def _take(process: Process, gpus: Sequence[int]) -> Grant:
    before, own, caller = process.state, threading.get_native_id(), kernel.get_affinity()
    granted = threads.granted(before.original)
    with interruptible():  # the driver may hang
        topology = observe(links=False, accelerators=True, allowed=granted.cpus)
    warnings = [note for note in topology.notes if not note.code.startswith("visible-")]
    cpus, why = grant_of(topology, gpus)
    if why is not None:
        raise UnavailableError([*warnings, why])
    warnings += mig_warnings(topology, gpus)
    is_free = before.is_free(granted)
    got, notices = place(process, cpus, is_free)
    if got != cpus:
        raise UnavailableError([_unpinned("a cpuset has changed meanwhile", granted.cpus & got)])
    # A border to other jobs: bound threads keep what is inside of theirs, or get all of the grant.
    bound = dict(process.state.bound)
    outside = {tid: one.kept for tid, one in bound.items() if one.kept is not None}
    outside |= {} if is_free(own, caller) else {own: caller}
    for tid, mask in outside.items():
        inside = mask & cpus
        with suppress(OSError):  # it has ended, or is the kernel's
            if inside != mask or tid == own:
                threads.move(inside or cpus, tid, mask, process.earlier)
            bound[tid] = Bound(bound[tid].mask, kept=inside or None)
    grant = Grant(cpus, (*warnings, *notices), pinned=True)
    start = State(before.pid, cpus, bound=bound, grant=grant, outside=before)
    process.state = start._replace(start=start, memory=before.memory, variables=before.variables)
    return grant


def _unpinned(why: str, allowed: CpuSet) -> Notice:
    return Notice(
        "grant-unpinned",
        f"a claim keeps to the domains of its GPUs, but {why}: the process keeps the CPUs "
        f"{format_cpulist(allowed)}, where it may meet another job",
    )
