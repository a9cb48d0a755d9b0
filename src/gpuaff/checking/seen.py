"""A process as :mod:`gpuaff.checking.judge` needs it: its threads, and what speaks of causes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

from gpuaff.binding.process import expected, remembered
from gpuaff.checking.culprits import Culprit, culprits
from gpuaff.cpuset import CpuSet
from gpuaff.notices import Notice
from gpuaff.records import dataclass, field
from gpuaff.runtimes import VARIABLES
from gpuaff.system import environ, kernel
from gpuaff.topology.cpusets import cpuset_of


@dataclass(frozen=True, kw_only=True)
class Thread:
    """A thread.

    Attributes:
        tid: its id.
        name: its name.
        cpus: the CPUs that it may use.
        movable: whether they can be set at all.
    """

    tid: int
    name: str
    cpus: CpuSet
    movable: bool = True


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A process.

    Attributes:
        pid: its id, which is its main thread's too.
        threads: its threads, by id.
        ours: whether it is this process.
        expected: what gpuaff has set; None when that is nothing, or unknown.
        original: its CPUs before; None when unknown.
        reserved: the CPUs that are kept out of that for helpers.
        apart: the masks of threads that were bound elsewhere then, by id.
        cpuset: the CPUs of its cpuset; None when unknown.
        culprits: who may have bound its main thread.
        warnings: what could not be looked at.
    """

    pid: int
    threads: tuple[Thread, ...]
    ours: bool
    expected: CpuSet | None = None
    original: CpuSet | None = None
    reserved: CpuSet = frozenset()
    apart: Mapping[int, CpuSet] = field(default_factory=dict)
    cpuset: CpuSet | None = None
    culprits: tuple[Culprit, ...] = ()
    warnings: tuple[Notice, ...] = ()


_UNSEEN = Notice(
    "threads-unseen",
    "/proc does not show this process's threads: only the main thread and the one that called were "
    "looked at; mount /proc of this PID namespace",
)

_NOT_LINUX = Notice(
    "not-linux", "this system does not tell which CPUs a thread may use (Linux does)"
)


def this_process_seen() -> Seen:
    """This process, with what gpuaff remembers of it."""
    pid, ids = kernel.process_id(), kernel.thread_ids()
    process = remembered()
    return Seen(
        pid=pid,
        threads=tuple(_threads(pid, ids) if ids else _known(pid)),
        ours=True,
        expected=expected(),
        original=None if process is None else process.original,
        reserved=frozenset() if process is None else process.reserved,
        apart={} if process is None else process.apart,
        cpuset=None if ids is None else cpuset_of(kernel.Tree()),
        culprits=culprits(kernel.mapped_files(pid), _own_variables()) if ids else (),
        warnings=tuple(_warnings(unseen=ids is None)),
    )


def _own_variables() -> dict[str, str]:
    """As they are now: a program may set them before it imports."""
    values = {name: environ.get(name) for name in VARIABLES}
    return {name: value for name, value in values.items() if value is not None}


def _warnings(*, unseen: bool) -> Iterator[Notice]:
    if not kernel.can_pin():
        yield _NOT_LINUX
    elif unseen:
        yield _UNSEEN


def process_seen(pid: int) -> Seen | None:
    """Another process, as far as this user may look; None when it is gone, or ends meanwhile."""
    ids = kernel.threads_of(pid)
    first = kernel.thread_facts(pid, pid)
    threads = tuple(_threads(pid, ids))
    files, variables = kernel.mapped_files(pid), kernel.variables_of(pid)
    cpuset = cpuset_of(kernel.Tree(), pid)
    again = kernel.thread_facts(pid, pid)
    if first is None or again is None or first.started != again.started or not threads:
        return None  # it has ended; maybe another one has its id by now
    return Seen(
        pid=pid,
        threads=threads,
        ours=False,
        cpuset=cpuset,
        culprits=culprits(files, variables),
    )


def _threads(pid: int, ids: Iterable[int]) -> Iterator[Thread]:
    for tid in ids:
        facts = kernel.thread_facts(pid, tid)
        if facts is not None and not facts.ended:
            with suppress(OSError):  # it has ended, or a seccomp filter forbids the question
                cpus = kernel.get_affinity(tid)
                yield Thread(tid=tid, name=facts.name, cpus=cpus, movable=facts.movable)


def _known(pid: int) -> Iterator[Thread]:
    """The threads that are there for sure: the main one and the caller."""
    for tid in sorted({pid, kernel.thread_id()}):
        with suppress(OSError):
            yield Thread(tid=tid, name="", cpus=kernel.get_affinity(tid))
