"""What gpuaff has set in this process, and the one way to change it: all or nothing.

The only module of ``pinning`` that holds state.
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
from gpuaff.cpuset import CpuSet
from gpuaff.errors import GPUAffinityError, NoDriverError
from gpuaff.formatting import printable
from gpuaff.launch.inherited import PINNED_VARIABLE
from gpuaff.notices import KINDS, Notice
from gpuaff.pinning.threads import move_all, put_again, refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeAlias, TypeVar

    from gpuaff._system.mempolicy import Policy
    from gpuaff.allocator.model import Plan
    from gpuaff.pinning.grant import Grant

    _T = TypeVar("_T")

    Policies: TypeAlias = Mapping[int, tuple[Policy, Policy]]

OMP_NUM_THREADS = "OMP_NUM_THREADS"

_NONE: Mapping[Any, Any] = MappingProxyType({})

VARIABLES = (OMP_NUM_THREADS, PINNED_VARIABLE)
"""The environment variables that gpuaff sets when it pins."""


def way_back(now: tuple[_T, _T] | None, then: tuple[_T, _T] | None) -> tuple[_T, _T] | None:
    """What must be in force to return to an earlier pair, and what is put there instead."""
    if now == then:
        return None
    if now is None:  # a call that set none had put the first value back
        return then
    return now[1], now[0] if then is None else then[1]


class State(NamedTuple):
    """What gpuaff has set in a process, and what it found there.

    Attributes:
        original: the border: the main thread's mask when gpuaff was first called; during a grant,
            the grant's CPUs.
        share: the mask that gpuaff has set; None when none is.
        bound: the masks of threads that the program had bound itself and that gpuaff moved all the
            same, or cannot distinguish from its own by their mask; by thread id.
        apart: the masks of threads that the program had bound and that stayed, by thread id.
        former: earlier shares that threads may still have which looked bound by the program: CPUs
            that come and go during a call cut a thread's mask, and it returns to what it was.
        whole: the share that ``spread`` divides, while a part of it is ``share``; else None.
        given: in a forked child, the mask that undoing a call of its parent has given it.
        memory: memory policies by thread id: the one before gpuaff set one, and gpuaff's.
        variables: environment variables by name, likewise; None: unset.
    """

    pid: int
    original: CpuSet
    share: CpuSet | None = None
    bound: Mapping[int, CpuSet] = _NONE
    apart: Mapping[int, CpuSet] = _NONE
    former: frozenset[CpuSet] = frozenset()
    reserved: CpuSet = frozenset()
    whole: CpuSet | None = None
    given: CpuSet | None = None
    memory: Policies = _NONE
    variables: Mapping[str, tuple[str | None, str | None]] = _NONE
    grant: Grant | None = None

    @property
    def requested(self) -> tuple[CpuSet, ...]:
        """The masks that a thread not bound by the program may have, the likeliest first."""
        masks = (self.share, self.original, self.given, *self.former)
        return tuple(mask for mask in masks if mask is not None)

    @property
    def in_force(self) -> CpuSet | None:
        """What gpuaff has set: a share, else a grant's CPUs; None when that is nothing."""
        return self.original if self.share is None and self.grant is not None else self.share

    @property
    def mask(self) -> CpuSet:
        """The mask of the threads that the program has not bound."""
        return self.original if self.share is None else self.share

    @property
    def undivided(self) -> CpuSet:
        """What ``spread`` divides: the rank's share, also while a part of it is in force."""
        return self.whole or self.mask

    @property
    def first(self) -> State:
        """As it was before the first call, or the first since the grant was taken."""
        start = State(pid=self.pid, original=self.original, grant=self.grant)
        grant = self.grant
        return start if grant is None else start._replace(bound=grant.bound, apart=grant.apart)


class Process:
    """This process: its state, and the transaction at work."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.moved: dict[int, CpuSet] = {}  # the mask that each thread had before, by id
        self.lock = threading.RLock()
        self.thread: int | None = None  # the one that holds the lock

    def update(self, **changes: Any) -> None:
        """Change attributes of the state."""
        self.state = self.state._replace(**changes)

    def recall(self, before: State) -> None:
        """Return to an earlier state of the CPUs; a forked child keeps its own border."""
        now = self.state
        border = before if before.pid == now.pid else now
        self.state = before._replace(
            pid=now.pid,
            original=border.original,
            grant=border.grant,
            given=now.given,
            memory=now.memory,
            variables=now.variables,
        )

    def set_variable(self, name: str, value: str) -> None:
        """Set one of ``VARIABLES``, and remember its first value."""
        self.update(variables={**self.state.variables, name: (env.get(name), value)})
        env.put(name, value)


_processes: dict[int, Process] = {}
"""This process, by its id; empty until gpuaff is called in it."""

_inherited_share: CpuSet | None = None
"""In a forked child: what its parent had set."""

_inherited_grant: Grant | None = None
"""In a forked child: the grant that its parent was in."""

_logged: set[str] = set()
"""The messages of warnings that were logged."""


def _start_anew() -> None:
    """In a forked child. One that called nothing passes on to its children what it inherited."""
    global _inherited_grant
    for process in _processes.values():
        inherit(process.state.in_force)
        _inherited_grant = process.state.grant or _inherited_grant
    _processes.clear()


os.register_at_fork(after_in_child=_start_anew)


def known_process() -> Process | None:
    """This process; None when gpuaff was not called in it yet."""
    return _processes.get(os.getpid())


def remembered() -> State | None:
    """What gpuaff has set in this process; None when it was not called in it yet."""
    process = known_process()
    return None if process is None else process.state


def this_process(border: CpuSet | None = None) -> Process:
    """This process; the first call remembers the main thread's mask, or ``border``, as its border.

    An OSError is raised where the kernel refuses to report the mask.
    """
    found = known_process()
    if found is None:
        pid = os.getpid()
        original = kernel.get_affinity(pid) if border is None else border
        # Of several threads the first one's mask counts. A lock could be left locked by a fork.
        found = _processes.setdefault(pid, Process(State(pid=pid, original=original)))
    return found


def grant_around() -> Grant | None:
    """The grant that this process is in, or was forked in; None without one."""
    state = remembered()
    return (None if state is None else state.grant) or _inherited_grant


def expected() -> CpuSet | None:
    """The CPUs that gpuaff has set for this process, or for the one that it was forked from."""
    state = remembered()
    return _inherited_share if state is None else state.in_force


def inherit(share: CpuSet | None) -> None:
    """In a forked child: of what its parent had set, this is in force by now."""
    global _inherited_share
    _inherited_share = share


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


@contextmanager
def transaction(process: Process, *, memory: bool = False, undoes: bool = False) -> Iterator[None]:
    """Change this process. Whatever the block raises, the process is then as it was before.

    Signal handlers (Ctrl-C) run in the windows that the block opens, and at its end; what they
    raise undoes the block. The block moves threads by ``threads.move(…, process.moved)``.

    Args:
        process: this process.
        memory: whether the memory policy may be changed though gpuaff has set none yet.
        undoes: whether the block undoes an earlier one. Ctrl-C then waits until that is done, as
            it may be what has caused it.

    Raises:
        GPUAffinityError: a signal handler, or the like, made the call during another one.
    """
    if process.thread == threading.get_ident():
        raise GPUAffinityError(
            "set_affinity, reapply or restore was called during another such call in the same "
            "thread, as by a signal handler: call it after that call has returned"
        )
    with uninterrupted(), _locked(process, undoes=undoes), ExitStack() as undo:
        before = process.state
        process.moved = {}
        undo.callback(setattr, process, "state", before)
        undo.callback(inherit, _inherited_share)
        if before.grant is not None:
            undo.callback(setattr, before.grant, "before", before.grant.before)
        undo.callback(_put_variables_back, {name: env.get(name) for name in VARIABLES})
        if memory or before.memory:
            _guard_policy(process, undo)
        undo.callback(_move_back, process, before)
        yield
        if not undoes:
            deliver_pending()  # Ctrl-C that came meanwhile raises here: all is undone
        undo.pop_all()


@contextmanager
def _locked(process: Process, *, undoes: bool) -> Iterator[None]:
    while not process.lock.acquire(timeout=0.1):  # another thread is at work
        if not undoes:
            deliver_pending()
    process.thread = threading.get_ident()
    try:
        yield
    finally:
        process.thread = None
        process.lock.release()


def _put_variables_back(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if env.get(name) != value:
            env.put(name, value)


def _guard_policy(process: Process, undo: ExitStack) -> None:
    """Let ``undo`` put the thread's policy back; one inherited from its maker counts as set."""
    from gpuaff._system import mempolicy  # only where a policy may change

    placed, own = process.state.memory, threading.get_native_id()
    with suppress(OSError):  # it cannot be set either
        policy = mempolicy.get_policy()
        undo.callback(mempolicy.ensure_policy, policy)
        found = next((pair for pair in placed.values() if pair[1] == policy), None)
        if found is not None and own not in placed:
            process.update(memory={**placed, own: found})


def _move_back(process: Process, before: State) -> None:
    likely = [before.mask] if before.share is None else [before.share, before.original]
    for tid, mask in process.moved.items():
        put_again(tid, mask, likely)
    set_meanwhile = {process.state.mask, process.state.original} - {*likely, before.original}
    if set_meanwhile:  # threads born with it
        spare = {*process.moved, *process.state.bound}
        move_all(before.mask, ours=set_meanwhile.__contains__, spare=spare)


# The log: one INFO line for each call, and each warning once in a process.


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


def refuse_if_broken(notices: Iterable[Notice]) -> None:
    """Raise the first warning that ``strict`` makes an error."""
    for notice in notices:
        if notice.code == "no-driver":
            raise NoDriverError(notice.message)
        if KINDS[notice.code].strict:
            raise GPUAffinityError(f"{notice.message} [{notice.code}; strict]")
