"""Give a process the CPUs back that it had."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress

from gpuaff.binding import extras as besides
from gpuaff.binding.process import NOTHING, Extras, Process, expect_nothing, remembered
from gpuaff.binding.report import say
from gpuaff.binding.threads import Moved, move_all
from gpuaff.cpuset import CpuSet
from gpuaff.records import dataclass
from gpuaff.system import kernel


@dataclass(frozen=True, kw_only=True)
class Before:
    """How a process was before a call.

    Attributes:
        pid: the process.
        original: its CPUs when gpuaff was first called.
        share: what an earlier call had set; None when nothing was set.
        bound: the threads that somebody had bound, as :class:`Process` has them.
        extras: what was set besides.
    """

    pid: int
    original: CpuSet
    share: CpuSet | None
    bound: Mapping[int, CpuSet]
    extras: Extras = NOTHING

    @classmethod
    def of(cls, process: Process) -> Before:
        """How it is now."""
        return cls(
            pid=process.pid,
            original=process.original,
            share=process.share,
            bound=dict(process.bound),
            extras=process.extras,
        )

    @property
    def first(self) -> Before:
        """How it was before the first call."""
        return Before(pid=self.pid, original=self.original, share=None, bound={})


def put_back(share: CpuSet, before: Before, extras: Extras | None) -> None:
    """Undo what a call has set, and all later calls; nothing where it is undone already.

    Args:
        share: what the call has set.
        before: how it is to be.
        extras: what the call has set besides.
    """
    process = remembered()
    if process is None or process.pid != before.pid:
        # A forked child: its threads have the mask, whatever it has done itself.
        expect_nothing()
        if process is None or process.share != share:
            _say(_move_back({share}, before.original))
        else:
            _say(rewind(process, {share}, before.first))
        say(besides.shed(extras or NOTHING, None), rank=None)
        return
    with process.lock:
        # Undone by a restore() meanwhile: what other threads have left undone goes back as well.
        then = NOTHING if process.share is None else before.extras
        if process.share is not None:
            _say(rewind(process, {share, process.share}, before))
        say(besides.put_back(process, then), rank=None)
        say(besides.shed(extras or NOTHING, process), rank=None)


def rewind(process: Process, shares: set[CpuSet], before: Before) -> Moved:
    """Move the threads that have one of the shares to where they were before."""
    bound = {tid: mask for tid, mask in process.bound.items() if tid not in before.bound}
    for tid, mask in bound.items():
        with suppress(OSError):  # it has ended, or a cpuset denies the mask by now
            if kernel.get_affinity(tid) in shares:
                kernel.set_affinity(mask, tid)
    process.share, process.bound = before.share, dict(before.bound)
    to = before.original if before.share is None else before.share
    return _move_back(shares, to, spare=bound)


def _online(shares: set[CpuSet]) -> set[CpuSet]:
    """The same, as threads have them while some of the CPUs are offline."""
    from gpuaff.topology.sysfs import online  # not needed by those who only pin

    cpus = online(kernel.Tree())
    return {share & cpus for share in shares} if cpus else set()


def current() -> CpuSet:
    """The calling thread's CPUs; empty where the system does not tell."""
    with suppress(OSError):
        return kernel.get_affinity()
    return frozenset()


def _move_back(shares: set[CpuSet], to: CpuSet, *, spare: Collection[int] = ()) -> Moved:
    shares = shares | _online(shares)
    # The main thread also goes when only a part of the share is left to it: a cpuset or an OpenMP
    # runtime has cut it since.
    main = kernel.process_id()
    with suppress(OSError):
        mask = kernel.get_affinity(main)
        if main not in spare and any(mask < share for share in shares):
            kernel.set_affinity(to, main)
    return move_all(to, ours=shares, spare=spare)


def _say(moved: Moved) -> None:
    say(moved.notices(), rank=None)
