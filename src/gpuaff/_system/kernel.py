"""The kernel: files below /sys and /proc, and the scheduler's calls.

The only module that opens those files or calls ``sched_*``. Nothing here decides anything.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass

from gpuaff._system import env
from gpuaff._system.interrupts import is_in_block, uninterrupted
from gpuaff.cpuset import CpuSet

_PAGE = 4096
"""Bytes per read: nearly every such file has less, and a large buffer costs more than a call."""

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
"""Do not wait for the writer of a FIFO: a variable may name anything (PBS_GPUFILE)."""

_EXITING = 0x00000004
"""``PF_EXITING`` of ``include/linux/sched.h``: set before memory and files are freed."""

_NO_SETAFFINITY = 0x04000000
"""``PF_NO_SETAFFINITY`` of the same."""

_HIGHEST_PID = 1 << 22
"""``PID_MAX_LIMIT`` of ``include/linux/threads.h``."""

_MOST_ANCESTORS = 64

_MOST = 1 << 20
"""The most that is read of a file, in bytes; the longest known has some ten thousand."""


@dataclass(frozen=True, slots=True)
class Tree:
    """The files of a machine below a root: ``/``, or a copy of another machine's."""

    root: str = "/"

    @property
    def is_live(self) -> bool:
        """Whether this is the machine that we run on."""
        return self.root == "/"

    def read(self, path: str) -> str | None:
        """A file's text without blanks at its ends; None when it cannot be read.

        Args:
            path: below the root, without a leading slash (``sys/devices/…``).
        """
        try:
            # In a window of a block Ctrl-C would lose the descriptor. Without a block nothing is
            # promised, and to begin one takes longer than to read a file.
            with uninterrupted() if is_in_block() else nullcontext():
                handle = os.open(self._full(path), _FLAGS)
                try:
                    data = _read_all(handle)
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


def _read_all(handle: int) -> bytes:
    data = b""
    # A read of /proc may end early, with more to come.
    while len(data) < _MOST and (part := os.read(handle, _PAGE)):
        data += part
    return data


def machine_tree() -> Tree:
    """The tree to read a machine from: below GPUAFF_FSROOT when that is set."""
    return Tree(env.fsroot() or "/")


def can_pin() -> bool:
    """Whether this system can set a process's CPUs (Linux can, macOS cannot)."""
    return hasattr(os, "sched_setaffinity")


def get_affinity(tid: int = 0) -> CpuSet:
    """The CPUs that a thread may run on (0: the calling thread).

    Raises:
        OSError: there is no such thread, or the system has no such call.
    """
    if not can_pin():
        raise OSError("this system has no sched_getaffinity")
    return frozenset(os.sched_getaffinity(tid))


def set_affinity(cpus: CpuSet, tid: int = 0) -> None:
    """Set the CPUs that a thread may run on (0: the calling thread).

    The kernel silently drops CPUs that the cpuset does not grant, so read the mask back.

    Raises:
        OSError: EINVAL when the cpuset grants none of them, ESRCH when the thread is gone, EPERM.
    """
    if not can_pin():
        raise OSError("this system has no sched_setaffinity")
    os.sched_setaffinity(tid, cpus)


# ---- processes and threads -------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadFacts:
    """What /proc says about a thread (``proc_pid_stat(5)``).

    Attributes:
        name: the name that it has given itself (``comm``); at most 15 bytes.
        ended: whether it only waits to be collected (a zombie).
        movable: whether its CPUs can be set at all. Those of many threads of the kernel cannot,
            before Linux 6.3 also where they belong to a process (``iou-wrk-…`` of io_uring).
        started: when it started, in clock ticks since boot: with its id, it identifies the thread.
        stopped: whether it is stopped (SIGSTOP, Ctrl-Z, a debugger).
        exiting: whether it is past the point of no return (``PF_EXITING``), or has ended.
    """

    name: str
    ended: bool
    movable: bool
    started: int
    stopped: bool = False
    exiting: bool = False


def thread_facts(pid: int, tid: int) -> ThreadFacts | None:
    """What is known of a thread of a process; None when there is none, or it is not visible."""
    text = Tree().read(f"proc/{pid}/task/{tid}/stat") or ""
    name, fields = text.partition("(")[2].rpartition(")")[0], _fields(text)
    if len(fields) < 20:
        return None
    return ThreadFacts(
        name="".join(c if c.isprintable() else "?" for c in name),
        ended=fields[0] in "ZXx",
        movable=not int(fields[6]) & _NO_SETAFFINITY,
        started=int(fields[19]),
        stopped=fields[0] in "Tt",
        exiting=bool(int(fields[6]) & _EXITING),
    )


def _fields(stat: str) -> list[str]:
    """What follows the name, which may contain blanks and parentheses."""
    return stat.rpartition(")")[2].split()


def thread_ids() -> list[int] | None:
    """The ids of this process's threads, in order.

    Returns:
        None when they are not visible: without /proc, or with that of another PID namespace,
        whose numbers mean other processes here.
    """
    ids = _numbers("proc/self/task")
    return ids if os.getpid() in ids else None


def threads_of(pid: int) -> list[int]:
    """The ids of a process's threads, in order; empty when it is gone or not visible."""
    return _numbers(f"proc/{pid}/task")


def process_ids() -> list[int]:
    """The ids of all processes that are visible, in order."""
    return _numbers("proc")


def _numbers(path: str) -> list[int]:
    return sorted(int(name) for name in Tree().list(path) if name.isdigit())


def process_of(tid: int) -> int | None:
    """The process that a thread belongs to; None when there is none, or it is not visible."""
    for line in (Tree().read(f"proc/{tid}/status") or "").splitlines():
        if line.startswith("Tgid:"):
            return int(line.split()[1])
    return None


def parent_of(pid: int) -> int | None:
    """The id of a process's parent; None when there is none, or it is not visible."""
    fields = _fields(Tree().read(f"proc/{pid}/stat") or "")
    return int(fields[1]) or None if len(fields) > 1 else None


def ancestors() -> Iterator[int]:
    """The processes above this one, the nearest first, as far as they are visible."""
    pid = os.getppid()
    for _ in range(_MOST_ANCESTORS):  # a chain that changes meanwhile may not end
        if not pid:
            return
        yield pid
        pid = parent_of(pid) or 0


def name_of(pid: int | None) -> str | None:
    """The name of the program that a process runs; None when it is not visible."""
    return None if pid is None else Tree().read(f"proc/{pid}/comm")


def affinity_of(pid: int | None) -> CpuSet | None:
    """The CPUs of another process; None when it is not visible."""
    try:
        return None if pid is None else get_affinity(pid)
    except OSError:
        return None


def mapped_files(pid: int) -> frozenset[str]:
    """The names, without their folders, of the files that a process has mapped (libraries)."""
    lines = (Tree().read(f"proc/{pid}/maps") or "").splitlines()
    return frozenset(line.rpartition("/")[2] for line in lines if "/" in line)


def variables_of(pid: int) -> dict[str, str]:
    """The variables that a process was started with; empty when this user may not read them."""
    pairs = (Tree().read(f"proc/{pid}/environ") or "").split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def open_files(pid: int) -> frozenset[str]:
    """What a process has open, as the kernel names it; empty when this user may not look."""
    return frozenset(handles_of(pid).values())


def handles_of(pid: int) -> dict[int, str]:
    """The descriptors of a process and what each is, as the kernel names it; likewise."""
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
    """Whether a process is gone, or only waits to be collected by its parent (a zombie).

    One that /proc does not show (``hidepid``) is there: sending it a signal would find it. One
    whose main thread alone has ended goes on (``pthread_exit``).
    """
    if not 0 < pid <= _HIGHEST_PID:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # another user's, so it is there
        pass
    state = _fields(Tree().read(f"proc/{pid}/stat") or "")[:1]
    return state in (["Z"], ["X"], ["x"]) and len(threads_of(pid)) <= 1


def is_exiting(pid: int) -> bool:
    """Whether the kernel is freeing a process's memory and files, and it has not ended yet.

    None of its threads runs its program any more; the main one may be a zombie long before the
    last has ended. Every user may see that. One that /proc does not show (``hidepid``) is not
    known to be exiting.
    """
    main = thread_facts(pid, pid)  # enough for nearly all processes
    if main is None or not main.exiting:
        return False
    tids = threads_of(pid)
    if main.ended and len(tids) <= 1:
        return False
    found = (thread_facts(pid, tid) for tid in tids)
    return all(facts is None or facts.exiting for facts in found)


# ---- this process, and this machine ----------------------------------------------------------


def process_id() -> int:
    """This process's id, which is its main thread's id too."""
    return os.getpid()


def thread_id() -> int:
    """The calling thread's id, as the kernel counts."""
    return threading.get_native_id()


def parent_id() -> int | None:
    """The id of this process's parent; None when it is outside of this container."""
    return os.getppid() or None


def user_id() -> int:
    """The id of the user that this process acts for."""
    return os.geteuid()


def in_first_pid_namespace() -> bool:
    """Whether process ids here are those that the NVIDIA driver counts with: not a container's."""
    try:
        # The number of the first one is fixed: PROC_PID_INIT_INO of include/linux/proc_ns.h.
        return os.readlink("/proc/self/ns/pid") == f"pid:[{0xEFFFFFFC}]"
    except OSError:
        return False


def in_forked_child(action: Callable[[], None]) -> None:
    """Call this first in each child that is forked from now on."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=action)


def host_name() -> str | None:
    """This machine's name, with its domain or without; None when it is not visible."""
    return Tree().read("proc/sys/kernel/hostname") or None


def wall_clock() -> float:
    """The time of day, in seconds since 1970."""
    return time.time()


def uptime() -> float:
    """Seconds since boot: the same clock for all processes of the machine."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
