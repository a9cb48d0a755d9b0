"""The kernel: files below /sys and /proc, and the scheduler's calls.

The only module that opens those files or calls ``sched_*``. What is not visible (without /proc, or
by ``hidepid``) is None or empty.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from typing import NamedTuple

from gpuaff._system import env
from gpuaff._system.interrupts import is_in_block, uninterrupted
from gpuaff.cpuset import CpuSet

_PAGE = 4096  # nearly every such file has less, and a large buffer costs more than a call
_MOST = 1 << 20  # the most bytes that are read of a file; the longest known has some ten thousand

# Do not wait for the writer of a FIFO: a variable may name anything (PBS_GPUFILE).
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY

_EXITING, _NO_SETAFFINITY = 0x00000004, 0x04000000  # PF_…, include/linux/sched.h
_FIRST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO, include/linux/proc_ns.h
_HIGHEST_PID = 1 << 22  # PID_MAX_LIMIT, include/linux/threads.h
_MOST_ANCESTORS = 64  # a chain that changes meanwhile may not end


class Tree(NamedTuple):
    """A machine's files, as ``sys/devices/…``, below ``/`` or a copy of another machine's."""

    root: str = "/"

    @property
    def is_live(self) -> bool:
        """Whether this is the machine that we run on."""
        return self.root == "/"

    def read(self, path: str) -> str | None:
        """A file's text without blanks at its ends; None when it cannot be read."""
        data = b""
        try:
            # In a window of a block Ctrl-C would lose the descriptor. Without a block nothing is
            # promised, and to begin one takes longer than to read a file.
            with uninterrupted() if is_in_block() else nullcontext():
                handle = os.open(self._full(path), _FLAGS)
                try:
                    # A read of /proc may end early, with more to come.
                    while len(data) < _MOST and (part := os.read(handle, _PAGE)):
                        data += part
                finally:
                    os.close(handle)
        except (OSError, ValueError):  # also: the topology files of a CPU that has gone offline
            return None
        return data.decode("utf-8", "replace").strip(" \t\r\n\0")  # NUL: Linux 5.12 to 5.15

    def list(self, path: str) -> list[str]:
        """The sorted names in a folder; empty when it cannot be read."""
        try:
            return sorted(os.listdir(self._full(path)))
        except (OSError, ValueError):
            return []

    def exists(self, path: str) -> bool:
        """Whether there is such a file or folder."""
        return os.path.exists(self._full(path))

    def _full(self, path: str) -> str:
        return f"{self.root.rstrip('/')}/{path}"


def machine_tree() -> Tree:
    """The tree to read a machine from: below GPUAFF_FSROOT when that is set."""
    return Tree(env.fsroot() or "/")


def host_name() -> str | None:
    """This machine's name, with its domain or without."""
    return Tree().read("proc/sys/kernel/hostname") or None


def uptime() -> float:
    """Seconds since boot: the same clock for all processes of the machine."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def can_pin() -> bool:
    """Whether this system has the calls below (Linux has, macOS has not)."""
    return hasattr(os, "sched_setaffinity")


def get_affinity(tid: int = 0) -> CpuSet:
    """The CPUs that a thread may run on (0: the calling thread); OSError when it is gone."""
    return frozenset(os.sched_getaffinity(tid))


def affinity_or_none(tid: int | None) -> CpuSet | None:
    """The same, or None."""
    try:
        return None if tid is None else get_affinity(tid)
    except (OSError, AttributeError):  # AttributeError: a system without it
        return None


def set_affinity(cpus: CpuSet, tid: int = 0) -> None:
    """Set the CPUs that a thread may run on (0: the calling thread)."""
    # The kernel silently drops CPUs that the cpuset does not grant, so read the mask back. OSError:
    # EINVAL when the cpuset grants none of them, ESRCH when the thread is gone, EPERM.
    os.sched_setaffinity(tid, cpus)


# ---- processes and threads -------------------------------------------------------------------


class ThreadFacts(NamedTuple):
    """What /proc says about a thread (``proc_pid_stat(5)``)."""

    name: str  # that it has given itself (``comm``); at most 15 bytes
    ended: bool  # it only waits to be collected (a zombie)
    # Whether its CPUs can be set. Those of many threads of the kernel cannot, before Linux 6.3 also
    # where they belong to a process (``iou-wrk-…`` of io_uring).
    movable: bool
    started: int  # in clock ticks since boot: with its id, it identifies the thread
    stopped: bool = False  # by SIGSTOP, Ctrl-Z, a debugger
    exiting: bool = False  # past the point of no return (``PF_EXITING``), or ended


def thread_facts(pid: int, tid: int) -> ThreadFacts | None:
    """What is known of a thread of a process."""
    name, fields = _stat(f"{pid}/task/{tid}")
    if len(fields) < 20:
        return None
    state, flags = fields[0], int(fields[6])
    return ThreadFacts(
        name="".join(c if c.isprintable() else "?" for c in name),
        ended=state in "ZXx",
        movable=not flags & _NO_SETAFFINITY,
        started=int(fields[19]),
        stopped=state in "Tt",
        exiting=bool(flags & _EXITING),
    )


def _stat(what: str) -> tuple[str, list[str]]:
    """The name in a ``stat`` file, which may contain blanks and parentheses; and what follows."""
    before, _, after = (Tree().read(f"proc/{what}/stat") or "").rpartition(")")
    return before.partition("(")[2], after.split()


def thread_ids() -> list[int] | None:
    """The ids of this process's threads; None where /proc is not its own PID namespace's."""
    ids = _numbers("proc/self/task")
    return ids if os.getpid() in ids else None


def threads_of(pid: int) -> list[int]:
    """The ids of a process's threads, in order."""
    return _numbers(f"proc/{pid}/task")


def process_ids() -> list[int]:
    """The ids of all processes, in order."""
    return _numbers("proc")


def _numbers(path: str) -> list[int]:
    return sorted(int(name) for name in Tree().list(path) if name.isdigit())


def process_of(tid: int) -> int | None:
    """The process that a thread belongs to."""
    lines = (Tree().read(f"proc/{tid}/status") or "").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("Tgid:")), None)


def parent_of(pid: int) -> int | None:
    """The id of a process's parent."""
    _, fields = _stat(str(pid))
    return int(fields[1]) or None if len(fields) > 1 else None


def ancestors(pid: int | None = None) -> Iterator[int]:
    """The processes above one (None: this one), the nearest first."""
    parent = os.getppid() if pid is None else parent_of(pid)
    for _ in range(_MOST_ANCESTORS):
        if not parent:  # outside of this container, or not visible
            return
        yield parent
        parent = parent_of(parent)


def name_of(pid: int | None) -> str | None:
    """The name of the program that a process runs."""
    return None if pid is None else Tree().read(f"proc/{pid}/comm")


def mapped_files(pid: int) -> frozenset[str]:
    """The names, without their folders, of the files that a process has mapped (libraries)."""
    lines = (Tree().read(f"proc/{pid}/maps") or "").splitlines()
    return frozenset(line.rpartition("/")[2] for line in lines if "/" in line)


def variables_of(pid: int) -> dict[str, str]:
    """The variables that a process was started with; empty when this user may not read them."""
    pairs = (Tree().read(f"proc/{pid}/environ") or "").split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def open_files(pid: int) -> dict[int, str]:
    """What a process has open, by descriptor, as the kernel names it; empty: it may not be read."""
    found = {}
    for handle in _numbers(f"proc/{pid}/fd"):
        with suppress(OSError):  # it is closed meanwhile
            found[handle] = os.readlink(f"/proc/{pid}/fd/{handle}")
    return found


def holds_flock(pid: int, handle: int) -> bool:
    """Whether a descriptor of a process holds a ``flock``, by itself or shared with its parent."""
    lines = (Tree().read(f"proc/{pid}/fdinfo/{handle}") or "").splitlines()
    return any(line.startswith("lock:") and " FLOCK " in line for line in lines)


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or only waits to be collected by its parent (a zombie)."""
    # One that /proc does not show (``hidepid``) is there: sending it a signal would find it. One
    # whose main thread alone has ended goes on (``pthread_exit``).
    if not 0 < pid <= _HIGHEST_PID:
        return False
    with suppress(PermissionError):  # another user's, so it is there
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
    main = thread_facts(pid, pid)
    return main is not None and main.ended and len(threads_of(pid)) <= 1


def is_exiting(pid: int) -> bool:
    """Whether the kernel is freeing a process's memory and files, and it has not ended yet."""
    # None of its threads runs its program any more; the main one may be a zombie long before the
    # last has ended. One that /proc does not show (``hidepid``) is not known to be exiting.
    main = thread_facts(pid, pid)  # enough for nearly all processes
    if main is None or not main.exiting or has_ended(pid):
        return False
    found = (thread_facts(pid, tid) for tid in threads_of(pid))
    return all(facts is None or facts.exiting for facts in found)


def in_first_pid_namespace() -> bool:
    """Whether process ids here are those that the NVIDIA driver counts with: not a container's."""
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid") == _FIRST_PID_NAMESPACE
    return False
