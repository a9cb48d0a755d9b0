"""Processes that take long to exit: for as long as a test wants.

The kernel gives back much memory in small pages while a process is exiting, before it closes
files. That takes some 30 ms; but the process has its CPU only when a busy loop leaves it some
(SCHED_IDLE), so it takes ten seconds and more, or until the loop is ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LARGE = """
import mmap
held = mmap.mmap(-1, 512 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
held.madvise(mmap.MADV_NOHUGEPAGE)
for at in range(0, len(held), mmap.PAGESIZE):
    held[at] = 1
"""
"""What a script has that is to exit slowly."""

_PF_EXITING = 0x4


class Exit:
    """A process that is exiting."""

    def __init__(self, pid: int, loop: subprocess.Popen[bytes]) -> None:
        self.pid = pid
        self._loop = loop

    def goes_on(self) -> bool:
        """Whether all its threads are exiting, and it is no zombie yet, and not gone."""
        threads = [_seen(self.pid, tid) for tid in _threads(self.pid)]
        all_exit = all(flags & _PF_EXITING for _, flags in threads)
        return all_exit and any(state != "Z" for state, _ in threads)

    def finish(self) -> None:
        """Let it come to its end, soon."""
        self._loop.kill()
        self._loop.wait()
        for tid in _threads(self.pid):
            with suppress(OSError):  # it has ended; or only root may
                os.sched_setaffinity(tid, os.sched_getaffinity(0))
                os.sched_setscheduler(tid, os.SCHED_OTHER, os.sched_param(0))


@contextmanager
def exiting(pid: int) -> Iterator[Exit]:
    """Kill a process that has :data:`LARGE` memory; until the end of the block it is exiting."""
    cpu = {max(os.sched_getaffinity(0))}
    for tid in _threads(pid):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(tid, cpu)
            os.sched_setscheduler(tid, os.SCHED_IDLE, os.sched_param(0))
    with subprocess.Popen(["sh", "-c", "while :; do :; done"]) as loop:
        os.sched_setaffinity(loop.pid, cpu)
        found = Exit(pid, loop)
        try:
            os.kill(pid, signal.SIGKILL)
            end = time.monotonic() + 60
            while not found.goes_on():
                assert time.monotonic() < end, f"process {pid} does not begin to exit"
                time.sleep(0.001)
            yield found
        finally:
            found.finish()


def _threads(pid: int) -> list[int]:
    try:
        return [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
    except FileNotFoundError:
        return []


def _seen(pid: int, tid: int) -> tuple[str, int]:
    """A thread's state and flags; one that is gone is as one that has ended."""
    try:
        stat = Path(f"/proc/{pid}/task/{tid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "Z", _PF_EXITING
    fields = stat.rpartition(")")[2].split()
    return fields[0], int(fields[6])
