"""Worker processes of a rank, started by ``multiprocessing`` as a DataLoader starts its own."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any


def idle(count: int) -> None:
    """Start threads that only wait."""
    for _ in range(count):
        threading.Thread(target=time.sleep, args=(900,), daemon=True).start()


class Workers:
    """The workers of one rank."""

    def __init__(self) -> None:
        self._lines: list[Connection] = []
        self._processes: list[Any] = []

    @staticmethod
    def start_fork_server() -> None:
        """Start it now: it keeps the mask of this moment."""
        forkserver.ensure_running()

    def start(self, method: str, workers: int, threads: int, share: Any) -> list[Any]:
        """Let each start so many more threads and go to its part; what they say of it.

        ``share`` is what ``set_affinity`` has returned; only a fork takes it along whole.
        """
        context: Any = multiprocessing.get_context(method)
        for worker in range(workers):
            ours, theirs = context.Pipe()
            arguments = (theirs, worker, workers, threads, share)
            process = context.Process(target=_work, args=arguments)
            process.start()
            theirs.close()
            self._lines.append(ours)
            self._processes.append(process)
        return self._answers()

    def tell(self, what: str) -> list[Any]:
        """Let each do something; the CPUs that they have afterwards.

        ``swap``: go to the part that counts from the other end; ``restore``: undo that; ``restore
        rank``: undo the rank's.
        """
        for line in self._lines:
            line.send(what)
        return self._answers()

    def end(self) -> None:
        """Let them end."""
        for line in self._lines:
            line.send("end")
        for process in self._processes:
            process.join()
        self._lines, self._processes = [], []

    def _answers(self) -> list[Any]:
        return [line.recv() for line in self._lines]


def _work(line: Connection, worker: int, workers: int, threads: int, share: Any) -> None:
    import gpuaff
    from gpuaff.cpuset import format_cpulist

    idle(threads)
    part = gpuaff.spread(worker, workers)
    codes = sorted({warning.code for warning in part.warnings})
    line.send({"pid": os.getpid(), "cpus": format_cpulist(part), "codes": codes})
    while (what := line.recv()) != "end":
        if what == "swap":
            found: Any = gpuaff.spread(workers - 1 - worker, workers)
        else:
            found = (share if what == "restore rank" else part).restore()
        line.send(format_cpulist(found))
