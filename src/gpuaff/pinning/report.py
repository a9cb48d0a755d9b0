"""The log: one INFO line for each call, and each warning once in a process."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from gpuaff._system.interrupts import interruptible
from gpuaff.allocator.model import Share
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.errors import GpuaffError, GPUAffinityError, NoDriverError
from gpuaff.formatting import printable
from gpuaff.notices import KINDS, Notice


def concerning(notices: Iterable[Notice], rank: int) -> tuple[Notice, ...]:
    """The warnings that concern a rank, each once."""
    return tuple(dict.fromkeys(n for n in notices if n.rank is None or n.rank == rank))


def refuse_if_broken(notices: Iterable[Notice]) -> None:
    """Raise the first warning that ``strict`` makes an error.

    Raises:
        NoDriverError: NVML cannot be used.
        GPUAffinityError: anything else.
    """
    for notice in notices:
        if KINDS[notice.code].strict:
            raise _error(notice)


def _error(notice: Notice) -> GpuaffError:
    if notice.code == "no-driver":
        return NoDriverError(notice.message)
    return GPUAffinityError(f"{notice.message} [{notice.code}; strict]")


_logged: set[str] = set()
"""The messages of warnings that were logged."""


def _log(level: str, message: str) -> bool:
    """Whether it was logged, as far as can be known."""
    # No handler shows INFO where logging was not imported, which takes a while.
    if level == "info" and "logging" not in sys.modules:
        return False
    import logging

    with interruptible():  # a handler may wait
        getattr(logging.getLogger("gpuaff"), level)(printable(message))
    return True


def say(notices: Iterable[Notice], *, rank: int | None = None) -> None:
    """Log each warning once per process."""
    who = "" if rank is None else f"rank {rank}: "
    for notice in notices:
        kind = KINDS[notice.code]
        if notice.message in _logged or (kind.once_per_job and rank):
            continue
        if _log(kind.level, f"gpuaff: {who}{notice.message} [{notice.code}]"):
            _logged.add(notice.message)


def say_where(
    rank: int | None, share: Share | None, cpus: CpuSet, *, memory: str | None = None
) -> None:
    """The one line for each call: ``rank 3 -> GPU 3 (NUMA 1) cpus 48-55,176-183 [8 cores]``."""
    listed = format_cpulist(cpus) or "unknown"
    if share is None:
        _log("info", f"gpuaff: {'' if rank is None else f'rank {rank} '}not pinned: cpus {listed}")
        return
    nodes = ",".join(map(str, share.numa_nodes)) or "?"
    cores = f"{share.cores} core{'s' if share.cores != 1 else ''}"
    place = f"GPU {share.gpu} (NUMA {nodes})"
    with_memory = "" if memory is None else f" memory {memory}"
    _log("info", f"gpuaff: rank {rank} -> {place} cpus {listed} [{cores}]{with_memory}")


def say_worker(worker: int, workers: int, cpus: CpuSet, *, pinned: bool = True) -> None:
    """The one line for a worker: ``worker 1 of 4 -> cpus 2-3``."""
    listed = format_cpulist(cpus) or "unknown"
    where = f"-> cpus {listed}" if pinned else f"not pinned: cpus {listed}"
    _log("info", f"gpuaff: worker {worker} of {workers} {where}")


def say_grant(gpus: Iterable[int], cpus: CpuSet) -> None:
    """The one line for a claim's CPUs: ``claim of GPUs 0-1 -> cpus 0-15,128-143``."""
    listed = frozenset(gpus)
    which = f"GPU{'s' if len(listed) > 1 else ''} {format_cpulist(listed)}"
    _log("info", f"gpuaff: claim of {which} -> cpus {format_cpulist(cpus)}")
