"""``check``: is the process still pinned? Every thread's CPUs, against what gpuaff has set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum

from gpuaff._system import env, kernel
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.formatting import Line, Span, Table, counted, cpulist, line, listed, plain
from gpuaff.notices import Notice
from gpuaff.pinning import openmp
from gpuaff.pinning.state import expected, remembered
from gpuaff.topology.sysfs import cpuset_of

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
    """A helper of the kernel, whose CPUs cannot be set. That is fine."""
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
        name: its name (``cuda-EvtHandlr``, ``pt_autograd_0``).
        cpus: the CPUs that it may use now.
        state: what that means.
        reason: what was found and the probable cause; empty where nothing is wrong.
        remedy: how to get it back; empty where nothing is wrong.
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
        """The thread in JSON."""
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
            nothing was set, or it is another process: then its threads are compared with each
            other.
        usual: the CPUs that most of its threads have, of several the larger set; where no two
            threads have the same, all of theirs together.
        threads: each of its threads, by id.
        gpus: the physical indices of the GPUs that it is on; None when that was not asked.
        near: the CPUs near those GPUs, by node; None when unknown.
        far: those of ``usual`` that are not even in the socket of such a GPU.
        warnings: what could not be seen.
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
        """The process in JSON; ``docs/check-json.md`` describes it."""
        return {
            "pid": self.pid,
            "name": self.name,
            "ok": self.ok,
            "expected": None if self.expected is None else format_cpulist(self.expected),
            "usual": format_cpulist(self.usual),
            "gpus": None if self.gpus is None else list(self.gpus),
            "near": None if self.near is None else format_cpulist(self.near),
            "far": format_cpulist(self.far),
            "threads": [thread.to_dict() for thread in self.threads],
            "warnings": [warning.to_dict() for warning in self.warnings],
        }

    def __str__(self) -> str:
        """As ``gpuaff check`` shows it."""
        return "\n".join(map(plain, render([self])))


def check() -> Check:
    """Check every thread of this process: does it still have the CPUs that gpuaff has set?

    Importing numpy or torch may narrow the main thread to one core, a framework or ``taskset``
    may move threads, a container may lose CPUs. Nothing is changed here: the result names the
    remedy, mostly :meth:`gpuaff.Affinity.reapply`. May be called at any time and from any thread;
    in a forked child (a DataLoader worker) it compares with what the parent had set. The driver is
    not asked: ``gpuaff check --pid`` also shows whether a process is near its GPUs.

    Returns:
        The findings. Print them, or look at ``ok``.
    """
    return evaluate(observe_this_process())


# Observe.


@dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    """A thread; ``movable``: whether its CPUs can be set at all."""

    tid: int
    name: str
    cpus: CpuSet
    movable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A library that may have bound the main thread, and what prevents it."""

    reason: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
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
        causes: what may have bound its main thread, the likeliest first.
        warnings: what could not be seen.
    """

    pid: int
    threads: tuple[Thread, ...]
    ours: bool
    expected: CpuSet | None = None
    original: CpuSet | None = None
    reserved: CpuSet = frozenset()
    apart: Mapping[int, CpuSet] = field(default_factory=dict)
    cpuset: CpuSet | None = None
    causes: tuple[Cause, ...] = ()
    warnings: tuple[Notice, ...] = ()


_UNSEEN = Notice(
    "threads-unseen",
    "/proc does not show this process's threads: only the main thread and the calling one were "
    "checked; mount /proc of this PID namespace",
)

_NOT_LINUX = Notice("not-linux", "this system does not show a thread's CPUs (Linux does)")


def observe_this_process() -> Observation:
    """This process, with what gpuaff remembers of it."""
    pid, ids, state = kernel.process_id(), kernel.thread_ids(), remembered()
    unseen = [_UNSEEN] if ids is None else []
    values = {name: env.get(name) for name in openmp.VARIABLES}
    variables = {name: value for name, value in values.items() if value is not None}
    return Observation(
        pid=pid,
        threads=tuple(_threads(pid, ids) if ids else _main_and_caller(pid)),
        ours=True,
        expected=expected(),
        cpuset=None if ids is None else cpuset_of(kernel.Tree()),
        original=None if state is None else state.original,
        reserved=frozenset() if state is None else state.reserved,
        apart={} if state is None else state.apart,
        # A program may set variables before it imports, so those of now count.
        causes=possible_causes(kernel.mapped_files(pid), variables) if ids else (),
        warnings=tuple(unseen if kernel.can_pin() else [_NOT_LINUX]),
    )


def observe_process(pid: int) -> Observation | None:
    """Another process, as far as this user may see it; None when it has ended, or ends now."""
    ids, first = kernel.threads_of(pid), kernel.thread_facts(pid, pid)
    seen = Observation(
        pid=pid,
        threads=tuple(_threads(pid, ids)),
        ours=False,
        cpuset=cpuset_of(kernel.Tree(), pid),
        causes=possible_causes(kernel.mapped_files(pid), kernel.variables_of(pid)),
    )
    again = kernel.thread_facts(pid, pid)
    if first is None or again is None or first.started != again.started or not seen.threads:
        return None  # maybe another process has its id by now
    return seen


def _threads(pid: int, ids: Iterable[int]) -> Iterator[Thread]:
    for tid in ids:
        facts = kernel.thread_facts(pid, tid)
        if facts is not None and not facts.ended:
            with suppress(OSError):  # it has ended, or a seccomp filter forbids the question
                cpus = kernel.get_affinity(tid)
                yield Thread(tid=tid, name=facts.name, cpus=cpus, movable=facts.movable)


def _main_and_caller(pid: int) -> Iterator[Thread]:
    for tid in sorted({pid, kernel.thread_id()}):
        with suppress(OSError):
            yield Thread(tid=tid, name="", cpus=kernel.get_affinity(tid))


def possible_causes(files: Collection[str], variables: Mapping[str, str]) -> tuple[Cause, ...]:
    """What may have bound a process's main thread. Pure.

    Args:
        files: the names of the files that the process has mapped.
        variables: the variables that it was started with, or has now.
    """
    found = []
    for runtime in openmp.OPENMP:
        file, names = openmp.loaded(runtime.prefixes, files), _binding(runtime, variables)
        if file and names:
            values = " and ".join(f"{name}={variables[name]}" for name in names)
            also = " or set KMP_AFFINITY=disabled" if openmp.KMP in runtime.variables else ""
            reason = f"{runtime.name} ({file}) binds it because of {values}"
            found.append(Cause(reason=reason, remedy=f"unset {', '.join(names)}{also}"))
    file = openmp.loaded(openmp.BLAS, files)
    if file and not openmp.is_main_thread_free(variables.get):
        reason = f"OpenBLAS ({file}) binds it on import in some builds"
        found.append(Cause(reason=reason, remedy="set OPENBLAS_MAIN_FREE=1"))
    return tuple(found)


def _binding(runtime: openmp.Runtime, variables: Mapping[str, str]) -> list[str]:
    names = openmp.binding_variables(variables.get, runtime.variables)
    # In GNU's runtime OMP_PROC_BIND=false overrides GOMP_CPU_AFFINITY, in the others not.
    is_off = variables.get(openmp.PROC_BIND, "").strip().lower() == "false"
    return [] if is_off and openmp.KMP not in runtime.variables else names


# Evaluate. Pure.


def evaluate(seen: Observation) -> Check:
    """Evaluate every thread of a process."""
    movable = [thread.cpus for thread in seen.threads if thread.movable]
    usual = most_common(movable or [thread.cpus for thread in seen.threads])
    evaluation = _Evaluation(seen, usual if seen.expected is None else seen.expected)
    return Check(
        pid=seen.pid,
        name=next((thread.name for thread in seen.threads if thread.tid == seen.pid), ""),
        expected=seen.expected,
        usual=usual,
        threads=tuple(map(evaluation.of, seen.threads)),
        warnings=seen.warnings,
    )


def most_common(masks: list[CpuSet]) -> CpuSet:
    """The CPUs that most threads have; of several such sets the larger one.

    Where that is not one set either (an OpenMP runtime has given each thread a CPU of its own), all
    of them together.
    """
    counts = Counter(masks)
    most = [mask for mask in counts if counts[mask] == max(counts.values())]
    size = max(map(len, most), default=0)
    return frozenset[int]().union(*(mask for mask in most if len(mask) == size))


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """A process, and the CPUs that every thread of it should have."""

    seen: Observation
    should: CpuSet

    def of(self, thread: Thread) -> ThreadCheck:
        """One thread."""
        state = self._state(thread)
        is_fine = state in _FINE
        return ThreadCheck(
            tid=thread.tid,
            name=thread.name,
            cpus=thread.cpus,
            state=state,
            reason="" if is_fine else self._reason(thread, state),
            remedy="" if is_fine else self._remedy(state),
        )

    def _state(self, thread: Thread) -> State:
        cpus, should = thread.cpus, self.should
        if cpus == should:
            return State.OK
        if not thread.movable:
            return State.FIXED
        if self._is_helper(thread):
            return State.BOUND
        if cpus == self._left_by_cpuset():
            return State.CUT
        if cpus < should:
            return State.NARROWED if cpus == self._left_to_main_thread() else State.BOUND
        return State.WIDENED if cpus > should else State.MOVED

    def _is_helper(self, thread: Thread) -> bool:
        """Whether it is on reserved CPUs, or where it was bound before gpuaff was called."""
        if self.seen.expected is None:
            return False
        return thread.cpus <= self.seen.reserved or self.seen.apart.get(thread.tid) == thread.cpus

    def _left_by_cpuset(self) -> CpuSet | None:
        """What a cpuset leaves of what should be; None where it leaves everything.

        Where it leaves nothing, the kernel gives the process all of the cpuset.
        """
        cpuset, should = self.seen.cpuset, self.should
        if cpuset is not None:
            return None if should <= cpuset else should & cpuset or cpuset
        masks = {thread.cpus for thread in self.seen.threads}
        same = masks.pop() if len(masks) == 1 and len(self.seen.threads) > 1 else None
        return same if same is not None and same < should else None

    def _left_to_main_thread(self) -> CpuSet | None:
        """The main thread's mask, if it is a part of what it should have.

        Where every thread has CPUs of its own, no thread has all of them: an OpenMP runtime does
        that on purpose.
        """
        masks = {thread.tid: thread.cpus for thread in self.seen.threads}
        main = masks.get(self.seen.pid)
        known = self.seen.expected is not None or self.should in masks.values()
        return main if main is not None and main < self.should and known else None

    def _reason(self, thread: Thread, state: State) -> str:
        should = _cpulist(self.should)
        is_set = self.seen.expected is not None
        instead = f"gpuaff had set {should}" if is_set else f"most threads have {should}"
        if state is State.NARROWED:
            why = self._why_narrowed(thread)
        elif state is State.CUT:
            why = "its cpuset (container, scheduler) has lost CPUs since"
        elif state is State.WIDENED and thread.cpus == self.seen.original:
            why = "what the process had before: it was set back since, or never moved"
        elif is_set:
            why = "it was moved since (taskset, psutil, os.sched_setaffinity, a framework)"
        else:
            why = "it was bound (taskset, psutil, a framework)"
        return f"CPUs {_cpulist(thread.cpus)}, {instead}: {why}"

    def _why_narrowed(self, thread: Thread) -> str:
        if thread.tid != self.seen.pid:
            return "the main thread has the same; a thread that it starts inherits that"
        causes = "; ".join(cause.reason for cause in self.seen.causes)
        return causes or "some import or framework has bound the main thread"

    def _remedy(self, state: State) -> str:
        if state is State.CUT:
            again = "; set_affinity() again plans from those that are left"
            return f"ask for the CPUs back{again if self.seen.expected is not None else ''}"
        if not self.seen.ours:
            back = f"taskset -p -c {_cpulist(self.should)} TID, or reapply() in the program"
        elif self.seen.expected is None:
            back = "set_affinity() before imports"
        else:
            back = "affinity.reapply(), on what set_affinity returned"
        remedies = [cause.remedy for cause in self.seen.causes]
        return "; ".join([back, *(remedies if state is State.NARROWED else [])])


def _cpulist(cpus: CpuSet) -> str:
    return format_cpulist(cpus) or "none"


# Render.


_MAX_NAMES = 8
"""The most names of threads that are listed where nothing is wrong with them."""

_HEADS = ("process", "GPU", "threads", "CPUs", "state", "names")
_HEAD = [line(Span(word, "head")) for word in _HEADS]


def render(checks: Iterable[Check]) -> list[Line | Table]:
    """A table: threads with the same CPUs in one row; then what is wrong."""
    found = list(checks)
    rows = [row for check in found for row in _rows(check)]
    remarks = [remark for check in found for remark in _remarks(check)]
    return [Table([_HEAD, *rows], right=(2,)), *remarks]


def _rows(check: Check) -> Iterator[list[Line]]:
    groups: dict[tuple[object, CpuSet], list[ThreadCheck]] = {}
    for thread in check.threads:
        groups.setdefault((thread.state, thread.cpus), []).append(thread)
    name = line(f"{check.pid} {check.name}".strip())
    gpus = line(Span(",".join(map(str, check.gpus or ())), "gpu"))
    # The usual threads first, those that are elsewhere last.
    for group in sorted(groups.values(), key=lambda one: (not one[0].ok, -len(one), one[0].tid)):
        first = group[0]
        state = line(Span(str(first.state), "" if first.ok else "bad"))
        yield [name, gpus, line(str(len(group))), cpulist(first.cpus), state, _names(group)]
        name = gpus = ()


def _names(group: list[ThreadCheck]) -> Line:
    if not group[0].ok:
        return listed([f"{thread.name} {thread.tid}".strip() for thread in group], ", ")
    names = list(dict.fromkeys(thread.name for thread in group))
    rest = len(names) - _MAX_NAMES
    return listed([*names[:_MAX_NAMES], f"{rest} more" if rest > 0 else ""], ", ")


def _remarks(check: Check) -> Iterator[Line]:
    who = line(Span(f"{check.pid} {check.name}".strip(), "head"))
    wrong = dict.fromkeys((str(t.state), t.reason, t.remedy) for t in check.threads if not t.ok)
    for state, reason, remedy in wrong:
        yield (*who, *line(": ", Span(state, "bad"), f": {reason}"))
        yield line(f"    try: {remedy}")
    if check.far:
        far = (
            f"{counted(len(check.far), 'CPU')} of {format_cpulist(check.usual)} outside of the "
            f"socket of GPU {','.join(map(str, check.gpus or ()))}; near are "
            f"{format_cpulist(check.near or ())}"
        )
        yield (*who, *line(": ", Span("far", "bad"), f": {far}"))
        yield line("    try: gpuaff.set_affinity() at the top of the program")
