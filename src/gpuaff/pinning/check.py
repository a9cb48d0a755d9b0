"""``check``: is the process still pinned? Every thread's CPUs, against what gpuaff has set."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gpuaff._system import env, kernel
from gpuaff.allocator.model import Word
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.formatting import Line, Span, Table, counted, cpulist, line, listed, plain, titled
from gpuaff.notices import Notice
from gpuaff.pinning import openmp, threads
from gpuaff.pinning.state import State as Process
from gpuaff.pinning.state import remembered
from gpuaff.topology.sysfs import cpuset_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeAlias

    Causes: TypeAlias = tuple[tuple[str, str], ...]  # what may have bound a thread, and remedies


class State(Word):
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


_FINE = frozenset({State.OK, State.BOUND, State.FIXED})


@dataclass(frozen=True, slots=True)
class ThreadCheck:
    """One thread, with the CPUs that it may use now.

    Attributes:
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
        return _in_json(self, "tid", "name", "cpus", "state", "ok", "reason", "remedy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One process.

    Attributes:
        expected: what gpuaff has set for it, or for the process that it was forked from; None when
            nothing was set, or it is another process: then its threads are compared with each
            other.
        usual: the CPUs that most of its threads have, of several the larger set; where no two
            threads have the same, all of theirs together.
        gpus: the physical indices of the GPUs that it is on; None when that was not examined.
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
        sets = ("expected", "usual", "gpus", "near", "far")
        return _in_json(self, "pid", "name", "ok", *sets, "threads", "warnings")

    def __str__(self) -> str:
        """As ``gpuaff check`` shows it."""
        return "\n".join(map(plain, render([self])))


def _in_json(record: Check | ThreadCheck, *names: str) -> dict[str, Any]:
    def plain_value(value: Any) -> Any:
        if isinstance(value, frozenset):
            return format_cpulist(value)
        if isinstance(value, tuple):
            return [one if isinstance(one, int) else one.to_dict() for one in value]
        return str(value) if isinstance(value, State) else value

    return {name: plain_value(getattr(record, name)) for name in names}


def check() -> Check:
    """Check every thread of this process: does it still have the CPUs that gpuaff has set?

    Importing numpy or torch may narrow the main thread to one core, a framework or ``taskset``
    may move threads, a container may lose CPUs. Nothing is changed: the result, to be printed or
    asked for ``ok``, names the remedy, mostly :meth:`gpuaff.Affinity.reapply`. May be called at
    any time and from any thread; in a forked child (a DataLoader worker) it compares with what the
    parent had set. ``gpuaff check --pid`` also shows whether a process is near its GPUs.
    """
    return evaluate(observe_this_process())


# Observe.


class Thread(NamedTuple):
    """A thread; ``movable``: whether its CPUs can be set at all."""

    tid: int
    name: str
    cpus: CpuSet
    movable: bool = True


class Observation(NamedTuple):
    """A process; what is unknown is None."""

    pid: int
    threads: tuple[Thread, ...]
    is_this: bool  # whether it is the process that checks
    remembered: Process | None = None  # what gpuaff has set
    cpuset: CpuSet | None = None
    causes: Causes = ()
    warnings: tuple[Notice, ...] = ()

    @property
    def expected(self) -> CpuSet | None:
        """The CPUs that gpuaff has set; None also when that is nothing."""
        return None if self.remembered is None else self.remembered.in_force


def observe_this_process() -> Observation:
    """This process, with what gpuaff remembers of it."""
    pid, ids = os.getpid(), kernel.thread_ids()
    warnings: tuple[Notice, ...] = ()
    if not kernel.can_pin():
        warnings = (Notice("not-linux", "this system does not show a thread's CPUs (Linux does)"),)
    elif ids is None:
        warnings = (threads.unseen("checked"),)
    # A program may set variables before it imports, so those of now count.
    variables = {name: value for name in openmp.VARIABLES if (value := env.get(name)) is not None}
    unnamed = (Thread(tid, "", cpus) for tid, cpus in threads.masks().items())
    return Observation(
        pid=pid,
        threads=tuple(_threads(pid, ids) if ids else unnamed),
        is_this=True,
        remembered=remembered(),
        cpuset=None if ids is None else cpuset_of(kernel.Tree()),
        causes=possible_causes(kernel.mapped_files(pid), variables) if ids else (),
        warnings=warnings,
    )


def observe_process(pid: int) -> Observation | None:
    """Another process, as far as this user may see it; None when it has ended."""
    seen = Observation(
        pid=pid,
        threads=tuple(_threads(pid, kernel.threads_of(pid))),
        is_this=False,
        cpuset=cpuset_of(kernel.Tree(), pid),
        causes=possible_causes(kernel.mapped_files(pid), kernel.variables_of(pid)),
    )
    return seen if seen.threads else None


def _threads(pid: int, ids: Iterable[int]) -> Iterator[Thread]:
    for tid in ids:
        facts = kernel.thread_facts(pid, tid)
        cpus = None if facts is None or facts.ended else kernel.affinity_or_none(tid)
        if facts is not None and cpus is not None:
            yield Thread(tid, facts.name, cpus, facts.movable)


def possible_causes(files: Collection[str], variables: Mapping[str, str]) -> Causes:
    """What may have bound a main thread, by the mapped files and variables."""
    found = []
    for runtime, (prefixes, its_variables) in openmp.OPENMP.items():
        file = openmp.loaded(prefixes, files)
        names = openmp.binding_variables(variables.get, its_variables)
        if file and names:
            values = " and ".join(f"{name}={variables[name]}" for name in names)
            also = " or set KMP_AFFINITY=disabled" if openmp.KMP in its_variables else ""
            reason = f"{runtime} ({file}) binds it because of {values}"
            found.append((reason, f"unset {', '.join(names)}{also}"))
    file = openmp.loaded(openmp.BLAS, files)
    if file and not openmp.is_main_thread_free(variables.get):
        reason = f"OpenBLAS ({file}) binds it on import in some builds"
        found.append((reason, "set OPENBLAS_MAIN_FREE=1"))
    return tuple(found)


# Evaluate. Pure.


def evaluate(seen: Observation) -> Check:
    """Evaluate every thread of a process."""
    movable = [thread.cpus for thread in seen.threads if thread.movable]
    usual = most_common(movable or [thread.cpus for thread in seen.threads])
    should = usual if seen.expected is None else seen.expected
    left, checks = _left(seen, should), []
    for thread in seen.threads:
        state = _state(seen, thread, should, left)
        why = ("", "") if state in _FINE else _explain(seen, thread, should, state)
        checks.append(ThreadCheck(thread.tid, thread.name, thread.cpus, state, *why))
    return Check(
        pid=seen.pid,
        name=next((thread.name for thread in seen.threads if thread.tid == seen.pid), ""),
        expected=seen.expected,
        usual=usual,
        threads=tuple(checks),
        warnings=seen.warnings,
    )


def most_common(masks: list[CpuSet]) -> CpuSet:
    """The CPUs that most threads have, of several such sets the larger; or all of these."""
    # Several are left where an OpenMP runtime has given each thread a CPU of its own.
    ranked = {mask: (count, len(mask)) for mask, count in Counter(masks).items()}
    first = max(ranked.values(), default=None)
    return frozenset[int]().union(*(mask for mask in ranked if ranked[mask] == first))


def _left(seen: Observation, should: CpuSet) -> dict[CpuSet, State]:
    """The masks that are what is left of what should be, and how they came to be."""
    masks = {thread.tid: thread.cpus for thread in seen.threads}
    different, main = set(masks.values()), masks.get(seen.pid, should)
    found = {}
    # A thread on a part is bound on purpose, unless it is the main one: all that it starts
    # inherits its mask, so there a fault spreads.
    # Where every thread has CPUs of its own, an OpenMP runtime has bound them on purpose.
    if main < should and (seen.expected is not None or should in different):
        found[main] = State.NARROWED
    if seen.cpuset is not None:  # where it leaves nothing, the kernel gives the process all of it
        found[should & seen.cpuset or seen.cpuset] = State.CUT
    elif len(different) == 1 < len(masks):
        found.update({same: State.CUT for same in different if same < should})
    return found


def _state(
    seen: Observation, thread: Thread, should: CpuSet, left: Mapping[CpuSet, State]
) -> State:
    cpus, process = thread.cpus, seen.remembered
    if cpus == should:
        return State.OK
    if not thread.movable:
        return State.FIXED
    if process is not None and seen.expected is not None:
        bound = process.bound.get(thread.tid)  # before gpuaff was called
        if cpus <= process.reserved or (bound is not None and bound.kept == cpus):
            return State.BOUND
    otherwise = State.WIDENED if cpus > should else State.MOVED
    return left.get(cpus, State.BOUND if cpus < should else otherwise)


def _explain(seen: Observation, thread: Thread, should: CpuSet, state: State) -> tuple[str, str]:
    """The reason and the remedy where something is wrong."""
    is_set, listed_cpus = seen.expected is not None, format_cpulist(should) or "none"
    remedy = "affinity.reapply(), on what set_affinity returned"
    if not seen.is_this:
        remedy = f"taskset -p -c {listed_cpus} TID, or reapply() in the program"
    elif not is_set:
        remedy = "set_affinity() before imports"
    if state is State.NARROWED:
        why = "the main thread has the same; a thread that it starts inherits that"
        if thread.tid == seen.pid:
            why = "; ".join(reason for reason, _ in seen.causes)
            why = why or "some import or framework has bound the main thread"
        remedy = "; ".join([remedy, *(prevention for _, prevention in seen.causes)])
    elif state is State.CUT:
        why = "its cpuset (container, scheduler) has lost CPUs since"
        again = "; set_affinity() again plans from those that are left" if is_set else ""
        remedy = f"ask for the CPUs back{again}"
    elif state is State.WIDENED and seen.remembered and thread.cpus == seen.remembered.original:
        why = "what the process had before: it was set back since, or never moved"
    elif is_set:
        why = "it was moved since (taskset, psutil, os.sched_setaffinity, a framework)"
    else:
        why = "it was bound (taskset, psutil, a framework)"
    instead = f"gpuaff had set {listed_cpus}" if is_set else f"most threads have {listed_cpus}"
    return f"CPUs {format_cpulist(thread.cpus) or 'none'}, {instead}: {why}", remedy


# Render.


_MAX_NAMES = 8  # of threads that are listed where nothing is wrong with them


def render(checks: Collection[Check]) -> list[Line | Table]:
    """A table: threads with the same CPUs in one row; then what is wrong."""
    rows = [row for check in checks for row in _rows(check)]
    remarks = [remark for check in checks for remark in _remarks(check)]
    return [titled("process GPU threads CPUs state names", rows, right=(2,)), *remarks]


def _rows(check: Check) -> Iterator[list[Line]]:
    groups: dict[tuple[State, CpuSet], list[ThreadCheck]] = {}
    for thread in check.threads:
        groups.setdefault((thread.state, thread.cpus), []).append(thread)
    process = line(f"{check.pid} {check.name}".strip())
    gpus = line(Span(",".join(map(str, check.gpus or ())), "gpu"))
    # The usual threads first, those that are elsewhere last.
    for group in sorted(groups.values(), key=lambda one: (not one[0].ok, -len(one), one[0].tid)):
        first = group[0]
        names = [f"{thread.name} {thread.tid}".strip() for thread in group]
        if first.ok:
            names = list(dict.fromkeys(thread.name for thread in group))
            rest = len(names) - _MAX_NAMES
            names[_MAX_NAMES:] = [f"{rest} more"] if rest > 0 else []
        state = line(Span(str(first.state), "" if first.ok else "bad"))
        count = line(str(len(group)))
        yield [process, gpus, count, cpulist(first.cpus), state, listed(names, ", ")]
        process = gpus = ()


def _remarks(check: Check) -> Iterator[Line]:
    wrong = [(str(t.state), t.reason, t.remedy) for t in check.threads if not t.ok]
    if check.far:
        far = (
            f"{counted(len(check.far), 'CPU')} of {format_cpulist(check.usual)} outside of the "
            f"socket of GPU {','.join(map(str, check.gpus or ()))}; near are "
            f"{format_cpulist(check.near or ())}"
        )
        wrong.append(("far", far, "gpuaff.set_affinity() at the top of the program"))
    process = Span(f"{check.pid} {check.name}".strip(), "head")
    for state, reason, remedy in dict.fromkeys(wrong):
        yield line(process, ": ", Span(state, "bad"), f": {reason}")
        yield line(f"    try: {remedy}")
