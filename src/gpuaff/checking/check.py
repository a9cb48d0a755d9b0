"""``check``: is it still pinned? Every thread's CPUs now, against what gpuaff has set."""

from __future__ import annotations

from enum import Enum

from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.notices import Notice, printable
from gpuaff.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class State(str, Enum):
    """What was found of a thread."""

    OK = "ok"
    """It has the CPUs that it should have."""
    BOUND = "bound"
    """Bound to a part of them, as an OpenMP runtime does with its workers. That is fine."""
    FIXED = "fixed"
    """A helper of the kernel, whose CPUs nobody can set. That is fine."""
    NARROWED = "narrowed"
    """A part of them is left to the main thread, or to a thread that inherited that."""
    CUT = "cut"
    """A cpuset denies some of them, or all."""
    MOVED = "moved"
    """It may run elsewhere."""
    WIDENED = "widened"
    """It has all of them, and more."""

    def __str__(self) -> str:
        return str(self.value)


_FINE = frozenset({State.OK, State.BOUND, State.FIXED})


@dataclass(frozen=True, kw_only=True)
class ThreadCheck:
    """One thread.

    Attributes:
        tid: its id, as the kernel counts.
        name: as it has named itself (``cuda-EvtHandlr``, ``pt_autograd_0``).
        cpus: the CPUs that it may use now.
        state: what that means.
        reason: what was found and who probably did it; empty where nothing is off.
        remedy: how to get it back; empty where nothing is off.
    """

    tid: int
    name: str
    cpus: CpuSet
    state: State
    reason: str = ""
    remedy: str = ""

    @property
    def ok(self) -> bool:
        """Whether it is where it should be."""
        return self.state in _FINE

    def to_dict(self) -> dict[str, Any]:
        """The thread as JSON has it."""
        return {
            "tid": self.tid,
            "name": self.name,
            "cpus": format_cpulist(self.cpus),
            "state": str(self.state),
            "ok": self.ok,
            "reason": self.reason,
            "remedy": self.remedy,
        }


@dataclass(frozen=True, kw_only=True)
class Check:
    """One process.

    Attributes:
        pid: its id.
        name: its main thread's name.
        expected: what gpuaff has set for it, or for the process that it was forked from; None when
            nothing was set, or another process is looked at: then its threads are compared with
            each other.
        usual: the CPUs that most of its threads have, of several the larger set; where no two
            threads have the same, all of theirs together.
        threads: each of its threads, by id.
        gpus: the physical indices of the GPUs that it is on; None when that was not asked.
        near: the CPUs near those GPUs, by node; None when unknown.
        far: those of ``usual`` that are not even in the socket of such a GPU.
        warnings: what could not be looked at.
    """

    pid: int
    name: str
    expected: CpuSet | None
    usual: CpuSet
    threads: tuple[ThreadCheck, ...]
    gpus: tuple[int, ...] | None = None
    near: CpuSet | None = None
    far: CpuSet = frozenset()
    warnings: tuple[Notice, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every thread is where it should be, and near the GPUs."""
        return not self.far and all(thread.ok for thread in self.threads)

    def to_dict(self) -> dict[str, Any]:
        """The process as JSON has it; ``docs/check-json.md`` tells the schema."""
        return {
            "pid": self.pid,
            "name": self.name,
            "ok": self.ok,
            "expected": _listed(self.expected),
            "usual": format_cpulist(self.usual),
            "gpus": None if self.gpus is None else list(self.gpus),
            "near": _listed(self.near),
            "far": format_cpulist(self.far),
            "threads": [thread.to_dict() for thread in self.threads],
            "warnings": [warning.to_dict() for warning in self.warnings],
        }

    def __str__(self) -> str:
        """As ``gpuaff check`` shows it: there is one layout."""
        from gpuaff.checking.findings import lines
        from gpuaff.text import plain

        return "\n".join(printable(plain(line)) for line in lines([self]))


def _listed(cpus: CpuSet | None) -> str | None:
    return None if cpus is None else format_cpulist(cpus)


def check() -> Check:
    """Look at every thread of this process: does it still have the CPUs that gpuaff has set?

    Importing numpy or torch may narrow the main thread to one core, a framework or ``taskset``
    may move threads, a container may lose CPUs. Nothing is changed here: the remedy is told, mostly
    :meth:`gpuaff.Affinity.reapply`. May be called at any time and from any thread; in a forked
    child (a DataLoader worker) it compares with what the parent had set. The driver is not asked:
    ``gpuaff check --pid`` also tells whether a process is near its GPUs.

    Returns:
        What was found. Print it, or ask it whether it is ``ok``.
    """
    from gpuaff.checking.judge import judge
    from gpuaff.checking.seen import this_process_seen

    return judge(this_process_seen())
