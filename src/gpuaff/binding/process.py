"""What this process remembers of its own masks, so that twice is the same as once."""

from __future__ import annotations

import threading

from gpuaff.cpuset import CpuSet
from gpuaff.records import dataclass, field
from gpuaff.system import kernel


@dataclass()
class Process:
    """The masks of one process. The only thing in gpuaff that changes.

    Attributes:
        pid: whose masks these are.
        original: the main thread's CPUs when gpuaff was first called: the border.
        share: what gpuaff has set since; None when nothing is set.
        bound: the masks of threads that somebody had bound on purpose and that gpuaff has moved
            all the same, or can't tell from its own by their mask, by id.
        lock: held while threads are moved.
    """

    pid: int
    original: CpuSet
    share: CpuSet | None = None
    bound: dict[int, CpuSet] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def ours(self, granted: CpuSet) -> set[CpuSet]:
        """The masks of threads that nobody else has bound.

        Args:
            granted: what the kernel still grants of the original mask: when a cpuset shrinks it
                cuts every thread's mask; when all CPUs of a share go offline its sleeping threads
                have none.
        """
        masks = {self.original} if self.share is None else {self.original, self.share}
        return masks | {mask & granted for mask in masks}


_processes: dict[int, Process] = {}
"""This process, by its id; empty until gpuaff is called in it."""

kernel.in_forked_child(_processes.clear)


def remembered() -> Process | None:
    """What is remembered of this process; None when gpuaff was not called in it yet."""
    return _processes.get(kernel.process_id())


def this_process() -> Process:
    """What is remembered of this process; the first call takes down its mask.

    A forked child is another process: the mask that it starts with is its border.
    """
    process = remembered()
    if process is None:
        pid = kernel.process_id()
        # Several threads may be here at once: one of them is first, and its mask counts. No lock,
        # as a fork would leave it locked to the child.
        process = _processes.setdefault(pid, Process(pid=pid, original=kernel.get_affinity(pid)))
    return process
