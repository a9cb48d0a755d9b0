"""The kernel: files below /sys and /proc, and the scheduler's calls.

The only module that opens those files or calls ``sched_*``. Nothing here decides anything.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from gpuaff._system import env
from gpuaff.cpuset import CpuSet

_PAGE = 4096
"""Bytes asked for at a time: nearly every such file has less, and a large buffer costs more than
the call."""

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
"""Not to wait for the writer of a FIFO: a variable may name anything (PBS_GPUFILE)."""

_MOST = 1 << 20
"""The most read of a file, in bytes; the longest that we know of has some ten thousand."""


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
        opened: list[int] = []
        try:
            # One step, so that Ctrl-C cannot come between: see descriptors.
            opened.extend(map(os.open, (f"{self.root.rstrip('/')}/{path}",), (_FLAGS,)))
            # Linux 5.12 to 5.15 end some lists with a NUL.
            return _all_of(opened[0]).decode("utf-8", "replace").strip(" \t\r\n\0")
        except (OSError, ValueError):  # also: the topology files of a CPU that has gone offline
            return None
        finally:
            for handle in opened:
                os.close(handle)

    def list(self, path: str) -> list[str]:
        """The sorted names in a folder; empty when it cannot be read."""
        try:
            return sorted(os.listdir(f"{self.root.rstrip('/')}/{path}"))
        except (OSError, ValueError):
            return []

    def exists(self, path: str) -> bool:
        """Whether there is such a file or folder."""
        return os.path.exists(f"{self.root.rstrip('/')}/{path}")


def _all_of(handle: int) -> bytes:
    data = b""
    while len(data) < _MOST:  # a read of /proc may end early, with more to come
        part = os.read(handle, _PAGE)
        if not part:
            break
        data += part
    return data


def machine_tree() -> Tree:
    """The tree to read a machine from: below GPUAFF_FSROOT when that is set."""
    return Tree(env.fsroot() or "/")


def can_pin() -> bool:
    """Whether this system can set a process's CPUs at all (Linux can, macOS cannot)."""
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
        OSError: EINVAL when none of the CPUs can be had, ESRCH when the thread is gone, EPERM.
    """
    if not can_pin():
        raise OSError("this system has no sched_setaffinity")
    os.sched_setaffinity(tid, cpus)


def thread_ids() -> list[int] | None:
    """The ids of this process's threads, in order.

    Returns:
        None when they cannot be seen: without /proc, or with that of another PID namespace, whose
        numbers mean other processes here.
    """
    ids = sorted(int(name) for name in Tree().list("proc/self/task") if name.isdigit())
    return ids if os.getpid() in ids else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadFacts:
    """What /proc tells about a thread (``proc_pid_stat(5)``).

    Attributes:
        name: as it has named itself (``comm``); at most 15 bytes.
        ended: whether it is only waiting to be collected (a zombie).
        movable: whether its CPUs can be set at all. Those of many threads of the kernel cannot,
            before Linux 6.3 also where they belong to a process (``iou-wrk-…`` of io_uring).
        started: when it started, in clock ticks since the machine did: with its id, who it is.
        stopped: whether it is stopped (SIGSTOP, Ctrl-Z, a debugger).
        exiting: whether it is past the point of no return (``PF_EXITING``), or has ended.
    """

    name: str
    ended: bool
    movable: bool
    started: int
    stopped: bool = False
    exiting: bool = False


_EXITING = 0x00000004
"""``PF_EXITING`` of ``include/linux/sched.h``: set before memory and files are given back."""

_NO_SETAFFINITY = 0x04000000
"""``PF_NO_SETAFFINITY`` of the same."""


def thread_facts(pid: int, tid: int) -> ThreadFacts | None:
    """What is known of a thread of a process; None when there is none, or it is not shown."""
    text = Tree().read(f"proc/{pid}/task/{tid}/stat") or ""
    name, _, rest = text.partition("(")[2].rpartition(")")  # a name may hold both of them
    fields = rest.split()
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


def threads_of(pid: int) -> list[int]:
    """The ids of the threads of any process, in order; empty when it is gone or not shown."""
    return sorted(int(name) for name in Tree().list(f"proc/{pid}/task") if name.isdigit())


def process_of(tid: int) -> int | None:
    """The process that a thread belongs to; None when there is none, or it is not shown."""
    status = (Tree().read(f"proc/{tid}/status") or "").splitlines()
    told = (line.split()[1] for line in status if line.startswith("Tgid:"))
    return next(map(int, told), None)


def mapped_files(pid: int) -> frozenset[str]:
    """The names, without their folders, of the files that a process has mapped (libraries)."""
    lines = (Tree().read(f"proc/{pid}/maps") or "").splitlines()
    return frozenset(line.rpartition("/")[2] for line in lines if "/" in line)


def variables_of(pid: int) -> dict[str, str]:
    """The variables that a process was started with; empty when we may not read them."""
    pairs = (Tree().read(f"proc/{pid}/environ") or "").split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def open_files(pid: int) -> frozenset[str]:
    """What a process has open, as the kernel names it; empty when we may not look."""
    return frozenset(handles_of(pid).values())


def handles_of(pid: int) -> dict[int, str]:
    """The descriptors of a process and what each is, as the kernel names it; likewise."""
    found = {}
    for name in Tree().list(f"proc/{pid}/fd"):
        with suppress(OSError):  # it is closed meanwhile
            found[int(name)] = os.readlink(f"/proc/{pid}/fd/{name}")
    return found


def holds_flock(pid: int, handle: int) -> bool:
    """Whether a descriptor of a process holds a ``flock``, by itself or shared with its parent."""
    lines = (Tree().read(f"proc/{pid}/fdinfo/{handle}") or "").splitlines()
    return any(line.startswith("lock:") and " FLOCK " in line for line in lines)


def process_ids() -> list[int]:
    """The ids of all processes that are shown, in order."""
    return sorted(int(name) for name in Tree().list("proc") if name.isdigit())


def in_first_pid_namespace() -> bool:
    """Whether process ids here are those that the NVIDIA driver counts with: not a container's."""
    try:
        # The number of the first one is fixed: PROC_PID_INIT_INO of include/linux/proc_ns.h.
        return os.readlink("/proc/self/ns/pid") == f"pid:[{0xEFFFFFFC}]"
    except OSError:
        return False


def host_name() -> str | None:
    """This machine's name, with its domain or without; None when it cannot be seen."""
    return Tree().read("proc/sys/kernel/hostname") or None


def process_id() -> int:
    """This process's id, which is its main thread's id too."""
    return os.getpid()


def thread_id() -> int:
    """The calling thread's id, as the kernel counts."""
    return threading.get_native_id()


def user_id() -> int:
    """The id of the user that this process acts for."""
    return os.geteuid()


def wall_clock() -> float:
    """The time of day, in seconds since 1970."""
    return time.time()


def uptime() -> float:
    """Seconds since the machine started: the same clock for all its processes."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def in_forked_child(action: Callable[[], None]) -> None:
    """Let each child that is forked from now on do this first; where there is no fork, nothing."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=action)


def parent_id() -> int | None:
    """The id of this process's parent; None when that is out of sight, as outside a container."""
    return os.getppid() or None


def parent_of(pid: int) -> int | None:
    """The id of a process's parent; None when there is none, or it cannot be seen."""
    fields = (Tree().read(f"proc/{pid}/stat") or "").rpartition(")")[2].split()
    return int(fields[1]) or None if len(fields) > 1 else None


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or only waits to be collected by its parent (a zombie).

    One that /proc does not show (``hidepid``) is there: a signal that is not sent would find it.
    One whose main thread alone has ended goes on (``pthread_exit``).
    """
    if not 0 < pid <= _HIGHEST_PID:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # somebody else's, so it is there
        pass
    state = (Tree().read(f"proc/{pid}/stat") or "").rpartition(")")[2].split()[:1]
    return state in (["Z"], ["X"], ["x"]) and len(threads_of(pid)) <= 1


def is_exiting(pid: int) -> bool:
    """Whether the kernel is giving back a process's memory and files, and it has not ended yet.

    None of its threads runs its program any more; the main one may be a zombie long before the
    last has ended. Every user may see that. One that /proc does not show (``hidepid``) is not
    known to be exiting.
    """
    main = thread_facts(pid, pid)  # answers for nearly all processes
    if main is None or not main.exiting:
        return False
    tids = threads_of(pid)
    if main.ended and len(tids) <= 1:
        return False
    found = (thread_facts(pid, tid) for tid in tids)
    return all(facts is None or facts.exiting for facts in found)


_HIGHEST_PID = 1 << 22
"""``PID_MAX_LIMIT`` of ``include/linux/threads.h``."""


def affinity_of(pid: int | None) -> CpuSet | None:
    """The CPUs of another process; None when it cannot be seen."""
    try:
        return None if pid is None else get_affinity(pid)
    except OSError:
        return None


def name_of(pid: int | None) -> str | None:
    """The name of the program that a process runs; None when it cannot be seen."""
    return None if pid is None else Tree().read(f"proc/{pid}/comm")
