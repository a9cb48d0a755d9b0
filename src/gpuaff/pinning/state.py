"""What gpuaff has set in this process, and the one way to change it: all or nothing.

A thread is *free* where its mask is one that gpuaff has set, or the process's first, and the main
thread also on a part of the share: calls move it. Others the program has bound itself.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from types import MappingProxyType
from typing import NamedTuple

from gpuaff._system import env, kernel
from gpuaff._system.interrupts import deliver_pending, interruptible, uninterrupted
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.errors import GPUAffinityError, NoDriverError
from gpuaff.formatting import printable
from gpuaff.launch.inherited import PINNED_VARIABLE
from gpuaff.notices import KINDS, Notice
from gpuaff.options import flag
from gpuaff.pinning import threads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeAlias, TypeVar

    from gpuaff.allocator.model import Plan
    from gpuaff.pinning.grant import Grant
    from gpuaff.pinning.memory import Change

    _T = TypeVar("_T")

    IsFree: TypeAlias = Callable[[int, CpuSet], bool]

OMP_NUM_THREADS = "OMP_NUM_THREADS"

VARIABLES = (OMP_NUM_THREADS, PINNED_VARIABLE)
"""The environment variables that gpuaff sets when it pins."""

_NONE: Mapping[Any, Any] = MappingProxyType({})


def way_back(now: tuple[_T, _T] | None, then: tuple[_T, _T] | None) -> tuple[_T, _T] | None:
    """What must be in force to return to an earlier pair, and what to set instead.

    A pair is the value before gpuaff, and gpuaff's.
    """
    if now == then:
        return None
    if now is None:  # a call that set none had put the first value back
        return then
    return now[1], now[0] if then is None else then[1]


class Bound(NamedTuple):
    """A thread that the program has bound, and where it stays; None: it goes with the free ones."""

    mask: CpuSet
    kept: CpuSet | None


class State(NamedTuple):
    """What gpuaff has set in a process, and what it found there."""

    pid: int
    original: CpuSet  # the border: the main thread's mask at the first call; in a grant, its CPUs
    share: CpuSet | None = None  # the mask of free threads; None where that is the border
    bound: Mapping[int, Bound] = _NONE  # by thread id
    # The masks that free threads were given: CPUs that come and go leave a thread an earlier one.
    placed: frozenset[CpuSet] = frozenset()
    reserved: CpuSet = frozenset()
    whole: CpuSet | None = None  # what ``spread`` divides, while a part of it is the share
    memory: Change | None = None  # the memory policy that was set last, in one thread
    # Environment variables by name: the value before gpuaff set one, and gpuaff's.
    variables: Mapping[str, tuple[str | None, str | None]] = _NONE
    grant: Grant | None = None
    outside: State | None = None  # in a grant, what its end returns to
    start: State | None = None  # before the first call inside the border; None: this is it

    @property
    def in_force(self) -> CpuSet | None:
        """What gpuaff has set: a share, else a grant's CPUs; None when that is nothing."""
        return self.share or (self.original if self.grant is not None else None)

    @property
    def mask(self) -> CpuSet:
        """The mask of free threads."""
        return self.share or self.original

    @property
    def free_masks(self) -> set[CpuSet]:
        """The masks that free threads have requested."""
        return {self.mask, self.original, *self.placed}

    @property
    def first(self) -> State:
        """As it was before the first call, or the first since the grant was taken."""
        return self.start or self

    @property
    def is_parents(self) -> bool:
        """Whether it was inherited by a fork, and nothing has changed it since."""
        return self.start is None and self.in_force is not None

    def in_child(self) -> State:
        """The state of a child that is forked now: its border is what is in force."""
        return State(os.getpid(), self.mask, self.share, grant=self.grant)

    def is_free(self, granted: threads.Granted, among: set[CpuSet] | None = None) -> IsFree:
        """Whether a thread, by its id and mask, is free, where this is what the kernel grants.

        ``among`` are the masks that count; those of all free threads, where it is None.
        """
        masks = granted.of(self.free_masks if among is None else among)
        # The main thread also is on a part of what is in force: a runtime has narrowed it.
        return lambda tid, mask: (
            mask in masks
            or (tid == self.pid and self.in_force is not None and mask < self.in_force)
        )


class Process:
    """This process: its state, and the transaction at work."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.earlier: dict[int, CpuSet] = {}  # the mask that each thread had before, by id
        self.lock = threading.RLock()
        self.thread: int | None = None  # the one that holds the lock

    def update(self, **changes: Any) -> None:
        """Change attributes of the state, and keep the one before the first change."""
        self.state = self.state._replace(start=self.state.first, **changes)

    def set_variable(self, name: str, value: str) -> None:
        """Set one of ``VARIABLES``, and remember its first value."""
        self.update(variables={**self.state.variables, name: (env.get(name), value)})
        env.put(name, value)


_processes: dict[int, Process] = {}
"""This process, by its id; empty until gpuaff is called in it, or in its parent before a fork."""


def _start_anew() -> None:
    """In a forked child: what its parent has set is its border."""
    states = [process.state for process in _processes.values()]
    _processes.clear()
    for state in states:
        if state.in_force is not None:
            _processes[os.getpid()] = Process(state.in_child())


os.register_at_fork(after_in_child=_start_anew)


def known_process() -> Process | None:
    """This process; None when gpuaff was not called in it yet."""
    return _processes.get(os.getpid())


def remembered() -> State | None:
    """What gpuaff has set in this process; None when it was not called in it yet."""
    process = known_process()
    return None if process is None else process.state


def this_process(border: CpuSet | None = None) -> Process:
    """This process; its first call remembers the main thread's mask, or ``border``."""
    found, pid = known_process(), os.getpid()
    if found is not None and found.state.is_parents:
        is_inside = kernel.get_affinity(pid) <= found.state.mask
        if not is_inside:  # it was bound elsewhere since
            del _processes[pid]
            found = None
    if found is None:
        original = kernel.get_affinity(pid) if border is None else border
        # Of several threads the first one's mask counts. A lock could be left locked by a fork.
        found = _processes.setdefault(pid, Process(State(pid, original)))
    return found


@contextmanager
def transaction(process: Process, *, memory: bool = False, undoes: bool = False) -> Iterator[None]:
    """Change this process. Whatever the block raises, the process is then as it was before.

    It moves threads by ``threads.move(…, process.earlier)``. Signal handlers run in its windows and
    at its end. ``memory``: it may change the memory policy, though gpuaff has set none yet.
    ``undoes``: it undoes an earlier block; Ctrl-C, which may have caused that, waits for its end.
    """
    if process.thread == threading.get_ident():
        raise GPUAffinityError(
            "set_affinity, reapply or restore was called during another such call in the same "
            "thread, as by a signal handler: call it after that call has returned"
        )
    with uninterrupted(), ExitStack() as unlock, ExitStack() as undo:
        while not process.lock.acquire(timeout=0.1):  # another thread is at work
            if not undoes:
                deliver_pending()
        unlock.callback(process.lock.release)
        unlock.callback(setattr, process, "thread", None)
        process.thread = threading.get_ident()
        before, process.earlier = process.state, {}
        undo.callback(setattr, process, "state", before)
        for name in VARIABLES:
            undo.callback(env.put, name, env.get(name))
        if memory or before.memory is not None:
            from gpuaff._system import mempolicy  # only where a policy may change

            with suppress(OSError):  # it cannot be set either
                undo.callback(mempolicy.ensure_policy, mempolicy.get_policy())
        undo.callback(_move_back, process, before)
        yield
        if not undoes:
            deliver_pending()  # Ctrl-C that came meanwhile raises here: all is undone
        undo.pop_all()


def _move_back(process: Process, before: State) -> None:
    """Put all threads back; those born meanwhile go where the free ones are."""
    for tid, mask in process.earlier.items():
        with suppress(OSError):  # it has ended, or a cpuset denies all of that
            kernel.set_affinity(mask, tid)
    masks = process.state.free_masks - before.free_masks
    spare = {*process.earlier, *process.state.bound}
    if masks:
        threads.move_all(before.mask, lambda _, mask: mask in masks, {}, spare=spare)


def place(
    process: Process,
    cpus: CpuSet,
    is_free: IsFree,
    is_stray: IsFree = lambda _tid, _mask: False,
) -> tuple[CpuSet, list[Notice]]:
    """Move the calling thread, all that are free, and strays, which later go back.

    Returns what is granted, and warnings.
    """
    state, own = process.state, threading.get_native_id()
    found, caller = threads.masks(), kernel.get_affinity()
    got, notices = threads.move_caller(cpus, caller, process.earlier)
    bound = {}
    for tid, mask in {**found, own: caller}.items():
        known = state.bound.get(tid)
        if known is not None and (known.kept is None or (known.kept == mask and tid != own)):
            bound[tid] = known
        elif not is_free(tid, mask):
            moves = tid == own or is_stray(tid, mask)
            bound[tid] = Bound(mask, kept=None if moves else mask)
    process.update(share=got, placed=state.placed | {got}, bound=bound, whole=None)
    staying = {tid for tid, one in bound.items() if one.kept is not None}

    def moves_with_us(tid: int, mask: CpuSet) -> bool:
        return is_free(tid, mask) or is_stray(tid, mask)

    passes = threads.move_all(got, moves_with_us, process.earlier, spare=staying)
    return got, notices + passes.notices()


# ---- what a call reports -------------------------------------------------------------------------

_logged: set[str] = set()
"""The messages of warnings that were logged."""


class UnavailableError(Exception):
    """Raised in a transaction that cannot pin; the last warning says why."""

    def __init__(self, warnings: Iterable[Notice], plan: Plan | None = None) -> None:
        super().__init__(warnings, plan)
        self.warnings, self.plan = tuple(warnings), plan


def try_twice(attempt: Callable[[], _T]) -> _T | UnavailableError:
    """Run transactions: where a cpuset has changed during one, a second plans from what is left."""
    with suppress(UnavailableError, OSError):
        return attempt()
    try:
        return attempt()
    except UnavailableError as error:
        return error
    except OSError as error:
        return UnavailableError([refusal(error)])


def unsupported_reason() -> Notice | None:
    """Why pinning is unavailable here; None where it is available."""
    text = (env.get("GPUAFF") or "").strip()
    if text and not flag("GPUAFF", text, text=True):
        return Notice("off", "GPUAFF=off: the mask stays")
    if not kernel.can_pin():
        text = "this system has no sched_setaffinity (Linux has): the CPUs stay as they are"
        return Notice("not-linux", text)
    if kernel.machine_tree().is_live:
        return None
    text = "GPUAFF_FSROOT describes another machine, which this process is not on: unset it to pin"
    return Notice("other-machine", text)


def refusal(error: OSError, cpus: CpuSet = frozenset()) -> Notice:
    """The kernel refuses to set these CPUs; where they are unknown, to report or to set any."""
    what = (
        f"CPUs {format_cpulist(cpus)}" if cpus else "to report this process's CPUs, or to set any"
    )
    text = (
        f"the kernel refused {what} ({error.strerror}): no thread was moved; a cpuset or a seccomp "
        "filter may forbid it; where CPUs have come or gone, call set_affinity() to plan anew"
    )
    return Notice("pin-failed", text)


def refuse_if_broken(notices: Iterable[Notice]) -> None:
    """Raise the first warning that ``strict`` makes an error."""
    for notice in notices:
        if notice.code == "no-driver":
            raise NoDriverError(notice.message)
        if KINDS[notice.code].strict:
            raise GPUAffinityError(f"{notice.message} [{notice.code}; strict]")


def say(notices: Iterable[Notice], *, rank: int | None = None) -> None:
    """Log each warning once per process."""
    who = "" if rank is None else f"rank {rank}: "
    for notice in notices:
        kind = KINDS[notice.code]
        if notice.message in _logged or (kind.once_per_job and rank):
            continue
        if log(kind.level, f"{who}{notice.message} [{notice.code}]"):
            _logged.add(notice.message)


def log(level: str, message: str) -> bool:
    """Log a message; whether that was done, as far as can be known."""
    # No handler shows INFO where logging was not imported, which takes a while.
    if level == "info" and "logging" not in sys.modules:
        return False
    import logging

    with interruptible():  # a handler may wait
        getattr(logging.getLogger("gpuaff"), level)(f"gpuaff: {printable(message)}")
    return True
