"""What scripts begin with that have threads of their own: ``processes.THREADS`` is this text."""

import json
import linecache
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import gpuaff

Cpus = frozenset[int]


def now() -> Cpus:
    """The CPUs of this thread."""
    return frozenset(os.sched_getaffinity(0))


before = now()


def everywhere() -> set[Cpus]:
    """The masks of all threads."""
    return {
        frozenset(os.sched_getaffinity(int(task.name)))
        for task in Path("/proc/self/task").iterdir()
    }


def codes(made: Any) -> list[str]:
    """The codes of the warnings of a call."""
    return [warning.code for warning in made.warnings]


def tid_bound_to(cpus: AbstractSet[int] | None) -> int:
    """The id of a new thread that is bound; None: that has what it inherits."""
    ready = threading.Event()

    def work() -> None:
        if cpus is not None:
            os.sched_setaffinity(0, cpus)
        ready.set()
        time.sleep(60)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    ready.wait()
    assert thread.native_id is not None
    return thread.native_id


def bound_to(cpus: AbstractSet[int] | None) -> Callable[[], Cpus]:
    """The same; asked again, the CPUs that it has by now."""
    tid = tid_bound_to(cpus)
    return lambda: frozenset(os.sched_getaffinity(tid))


def in_a_thread(work: Callable[[], Any]) -> Any:
    """What a function returns in a thread of its own."""
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


class Helper(threading.Thread):
    """A thread that waits for work."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.tasks: queue.Queue[Callable[[], Any]] = queue.Queue()
        self.results: queue.Queue[Any] = queue.Queue()
        self.start()

    def run(self) -> None:
        while True:
            self.results.put(self.tasks.get()())

    def do(self, task: Callable[[], Any]) -> Any:
        """What a function returns in this thread."""
        self.tasks.put(task)
        return self.results.get(timeout=10)


def child(work: Callable[[], Any]) -> int:
    """The exit status of a forked child: 0 when a function returns something true there."""
    pid = os.fork()
    if not pid:
        status = 2
        try:
            status = 0 if work() else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def holds(*facts: object) -> None:
    """Each of the facts on the calling line must be true."""
    frame = sys._getframe(1)
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    assert all(fact is True for fact in facts), f"{line}: {facts}"


def states() -> dict[int, str]:
    """What a check says about each thread, by its id."""
    return {thread.tid: str(thread.state) for thread in gpuaff.check().threads}


def tell() -> None:
    """Print a check."""
    print(json.dumps(gpuaff.check().to_dict()))
    sys.stdout.flush()


# What follows is the script.
