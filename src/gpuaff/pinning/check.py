"""``check``: is it still pinned? Every thread's CPUs now, against what gpuaff has set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from gpuaff._system import env, kernel
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.formatting import Line, Span, counted, cpulist, line, listed, table
from gpuaff.notices import Notice, printable
from gpuaff.pinning.openmp import (
    BLAS,
    KMP,
    OPENMP,
    PROC_BIND,
    VARIABLES,
    Runtime,
    loaded,
    spares_the_main_thread,
    that_bind,
)
from gpuaff.pinning.state import expected, remembered
from gpuaff.topology.cgroup import cpuset_of

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


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
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
        from gpuaff.formatting import plain

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
    return evaluate(this_process_seen())


# Who has probably bound a process's main thread: what it has loaded, and its variables. Pure.


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """A library that may have done it.

    Attributes:
        reason: what speaks against it.
        remedy: what keeps it from doing it again.
    """

    reason: str
    remedy: str


def culprits(files: Collection[str], variables: Mapping[str, str]) -> tuple[Culprit, ...]:
    """Who may have bound the main thread, the likeliest first.

    Args:
        files: the names of the files that the process has mapped.
        variables: the variables that it was started with, or has now.
    """
    return (*_runtimes(files, variables), *_blas(files, variables))


def _runtimes(files: Collection[str], variables: Mapping[str, str]) -> Iterator[Culprit]:
    for runtime in OPENMP:
        file = loaded(runtime.prefixes, files)
        told = _that_told(runtime, variables)
        if file and told:
            said = " and ".join(f"{name}={variables[name]}" for name in told)
            also = " or set KMP_AFFINITY=disabled" if KMP in runtime.heeds else ""
            yield Culprit(
                reason=f"{runtime.name} ({file}) binds it, as {said} tells it to",
                remedy=f"unset {', '.join(told)}{also}",
            )


def _that_told(runtime: Runtime, variables: Mapping[str, str]) -> list[str]:
    told = that_bind(variables.get, runtime.heeds)
    # To GNU's runtime OMP_PROC_BIND=false goes before GOMP_CPU_AFFINITY, to the others after.
    is_off = variables.get(PROC_BIND, "").strip().lower() == "false"
    return [name for name in told if not (is_off and KMP not in runtime.heeds)]


def _blas(files: Collection[str], variables: Mapping[str, str]) -> Iterator[Culprit]:
    file = loaded(BLAS, files)
    if file and not spares_the_main_thread(variables.get):
        yield Culprit(
            reason=f"OpenBLAS ({file}) binds it on import in some builds",
            remedy="set OPENBLAS_MAIN_FREE=1",
        )


# A process as :mod:`gpuaff.pinning.check` needs it: its threads, and what speaks of causes.


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
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
    values = {name: env.get(name) for name in VARIABLES}
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


# From what was seen of a process to what is off, who did it and what helps. Pure.


_NONE: CpuSet = frozenset()

_REAPPLY = "affinity.reapply(), on what set_affinity returned"


def evaluate(seen: Seen) -> Check:
    """Judge every thread of a process."""
    verdict = _Evaluation(seen)
    return Check(
        pid=seen.pid,
        name=next((thread.name for thread in seen.threads if thread.tid == seen.pid), ""),
        expected=seen.expected,
        usual=verdict.usual,
        threads=tuple(verdict.of(thread) for thread in seen.threads),
        warnings=seen.warnings,
    )


def usual(masks: list[CpuSet]) -> CpuSet:
    """The CPUs that most threads have; of several such sets the larger one.

    Where that is not one set either (an OpenMP runtime has given each thread a CPU of its own), all
    of them together.
    """
    counts = Counter(masks)
    most = [mask for mask in counts if counts[mask] == max(counts.values())]
    size = max(map(len, most), default=0)
    return _NONE.union(*(mask for mask in most if len(mask) == size))


class _Evaluation:
    def __init__(self, seen: Seen) -> None:
        self._seen = seen

    @cached_property
    def usual(self) -> CpuSet:
        """What most threads have; those that nobody can move have no say."""
        movable = [thread.cpus for thread in self._seen.threads if thread.movable]
        return usual(movable or [thread.cpus for thread in self._seen.threads])

    @cached_property
    def _should(self) -> CpuSet:
        """What every thread should have."""
        return self.usual if self._seen.expected is None else self._seen.expected

    def of(self, thread: Thread) -> ThreadCheck:
        """The verdict on one thread."""
        state = self._state(thread)
        made = ThreadCheck(tid=thread.tid, name=thread.name, cpus=thread.cpus, state=state)
        if made.ok:
            return made
        return ThreadCheck(
            tid=thread.tid,
            name=thread.name,
            cpus=thread.cpus,
            state=state,
            reason=self._reason(thread, state),
            remedy=self._remedy(state),
        )

    def _state(self, thread: Thread) -> State:
        if thread.cpus == self._should:
            return State.OK
        if not thread.movable:
            return State.FIXED
        if self._is_a_helper(thread):
            return State.BOUND
        if thread.cpus == self._left:
            return State.CUT
        if thread.cpus < self._should:
            return State.NARROWED if thread.cpus == self._narrowed else State.BOUND
        return State.WIDENED if thread.cpus > self._should else State.MOVED

    def _is_a_helper(self, thread: Thread) -> bool:
        """Whether it is on reserved CPUs, or where it was bound before gpuaff was called."""
        seen = self._seen
        if seen.expected is None:
            return False
        return thread.cpus <= seen.reserved or seen.apart.get(thread.tid) == thread.cpus

    @cached_property
    def _left(self) -> CpuSet | None:
        """What a cpuset leaves of what should be; None where it leaves everything.

        The kernel gives a process that would have nothing left all of the cpuset.
        """
        cpuset, should = self._seen.cpuset, self._should
        if cpuset is not None:
            return None if should <= cpuset else should & cpuset or cpuset
        masks = {thread.cpus for thread in self._seen.threads}
        same = masks.pop() if len(masks) == 1 and len(self._seen.threads) > 1 else None
        return same if same is not None and same < should else None

    @cached_property
    def _narrowed(self) -> CpuSet | None:
        """What is left to the main thread, if it is a part of what it should have.

        Where every thread has CPUs of its own nobody has what they have together: so an OpenMP
        runtime does it on purpose.
        """
        masks = {thread.tid: thread.cpus for thread in self._seen.threads}
        main = masks.get(self._seen.pid)
        real = self._seen.expected is not None or self._should in masks.values()
        return main if main is not None and main < self._should and real else None

    def _reason(self, thread: Thread, state: State) -> str:
        found = f"CPUs {_cpulist(thread.cpus)}, {self._instead}"
        why = {
            State.NARROWED: self._why_narrowed,
            State.CUT: lambda _: "its cpuset (container, scheduler) has lost CPUs since",
            State.MOVED: lambda _: self._why_elsewhere,
            State.WIDENED: self._why_widened,
        }
        return f"{found}: {why[state](thread)}"

    @property
    def _instead(self) -> str:
        if self._seen.expected is None:
            return f"most threads have {_cpulist(self._should)}"
        return f"gpuaff had set {_cpulist(self._should)}"

    def _why_narrowed(self, thread: Thread) -> str:
        if thread.tid != self._seen.pid:
            return "the main thread has the same; a thread that it starts inherits that"
        if self._seen.culprits:
            return "; ".join(culprit.reason for culprit in self._seen.culprits)
        return "some import or framework has bound the main thread"

    @property
    def _why_elsewhere(self) -> str:
        if self._seen.expected is None:
            return "somebody has bound it (taskset, psutil, a framework)"
        return "somebody has moved it (taskset, psutil, os.sched_setaffinity, a framework)"

    def _why_widened(self, thread: Thread) -> str:
        if thread.cpus == self._seen.original:
            return "what the process had before: somebody has set that back, or it was never moved"
        return self._why_elsewhere

    def _remedy(self, state: State) -> str:
        if state is State.CUT:
            again = "; set_affinity() again plans from those that are left"
            return f"ask for the CPUs back{again if self._seen.expected is not None else ''}"
        if not self._seen.ours:
            back = f"taskset -p -c {_cpulist(self._should)} TID, or reapply() in the program"
        elif self._seen.expected is None:
            back = "set_affinity() before imports"
        else:
            back = _REAPPLY
        if state is not State.NARROWED:
            return back
        return "; ".join([back, *(culprit.remedy for culprit in self._seen.culprits)])


def _cpulist(cpus: CpuSet) -> str:
    return format_cpulist(cpus) or "none"


# What was found of processes and their threads, as lines of text.


_MOST_NAMES = 8
"""The most names of threads that are listed where nothing is wrong with them."""

Row = tuple[Line, Line, Line, Line, Line, Line]

_HEAD: Row = tuple(
    line(Span(word, "head")) for word in ("process", "GPU", "threads", "CPUs", "state", "names")
)  # type: ignore[assignment]  # six of them


def lines(checks: Iterable[Check], *, width: int | None = None) -> list[Line]:
    """The whole text: threads with the same CPUs in one row, then what is off.

    Args:
        checks: the processes.
        width: the terminal's; None when the text must not be broken.
    """
    found = list(checks)
    rows = [row for check in found for row in _rows(check)]
    remarks = [remark for check in found for remark in _remarks(check)]
    return [*table([_HEAD, *rows], width=width, right=(2,)), *remarks]


def _rows(check: Check) -> Iterator[Row]:
    name = line(f"{check.pid} {check.name}".strip())
    gpus = line(Span(",".join(map(str, check.gpus or ())), "gpu"))
    for group in _groups(check):
        first = group[0]
        state = line(Span(str(first.state), "" if first.ok else "bad"))
        yield name, gpus, line(str(len(group))), cpulist(first.cpus), state, _names(group)
        name = gpus = ()


def _groups(check: Check) -> list[list[ThreadCheck]]:
    """Threads of the same CPUs and state: the usual ones first, those that are off last."""
    groups: dict[tuple[object, CpuSet], list[ThreadCheck]] = {}
    for thread in check.threads:
        groups.setdefault((thread.state, thread.cpus), []).append(thread)
    return sorted(groups.values(), key=lambda group: (not group[0].ok, -len(group), group[0].tid))


def _names(group: list[ThreadCheck]) -> Line:
    if not group[0].ok:
        return listed([f"{thread.name} {thread.tid}".strip() for thread in group], ", ")
    names = list(dict.fromkeys(thread.name for thread in group))
    rest = len(names) - _MOST_NAMES
    return listed([*names[:_MOST_NAMES], f"{rest} more" if rest > 0 else ""], ", ")


def _remarks(check: Check) -> Iterator[Line]:
    who = line(Span(f"{check.pid} {check.name}".strip(), "head"))
    said = dict.fromkeys((str(t.state), t.reason, t.remedy) for t in check.threads if not t.ok)
    for state, reason, remedy in said:
        yield (*who, *line(": ", Span(state, "bad"), f": {reason}"))
        yield line(f"    try: {remedy}")
    if check.far:
        yield (*who, *line(": ", Span("far", "bad"), f": {_far(check)}"))
        yield line("    try: gpuaff.set_affinity() at the top of the program")


def _far(check: Check) -> str:
    gpus = ",".join(map(str, check.gpus or ()))
    near = format_cpulist(check.near or ())
    return (
        f"{counted(len(check.far), 'CPU')} of {format_cpulist(check.usual)} outside of the socket "
        f"of GPU {gpus}; near are {near}"
    )
