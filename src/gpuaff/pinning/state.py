"""What gpuaff has set in this process, and the one way to change it: all or nothing.

The only module of ``pinning`` that remembers anything. A thread is *free* where its mask is one
that gpuaff has set, or the process's first: calls move it. Others the program has bound itself.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from types import MappingProxyType
from typing import NamedTuple

from gpuaff._system import env, kernel
from gpuaff._system.interrupts import deliver_pending, uninterrupted
from gpuaff.cpuset import CpuSet
from gpuaff.errors import GPUAffinityError
from gpuaff.launch.inherited import PINNED_VARIABLE
from gpuaff.pinning.threads import move_all, put_again

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeAlias, TypeVar

    from gpuaff._system.mempolicy import Policy
    from gpuaff.pinning.grant import Grant

    _T = TypeVar("_T")

    Policies: TypeAlias = Mapping[int, tuple[Policy, Policy]]

OMP_NUM_THREADS = "OMP_NUM_THREADS"

VARIABLES = (OMP_NUM_THREADS, PINNED_VARIABLE)
"""The environment variables that gpuaff sets when it pins."""

_NONE: Mapping[Any, Any] = MappingProxyType({})


def way_back(now: tuple[_T, _T] | None, then: tuple[_T, _T] | None) -> tuple[_T, _T] | None:
    """What must be in force to return to an earlier pair, and what is put there instead."""
    if now == then:
        return None
    if now is None:  # a call that set none had put the first value back
        return then
    return now[1], now[0] if then is None else then[1]


class Bound(NamedTuple):
    """A thread that the program has bound.

    Attributes:
        mask: where it was bound.
        kept: what it keeps of that; None where it goes where the free threads go, or cannot be
            distinguished from them by its mask.
    """

    mask: CpuSet
    kept: CpuSet | None = None


class State(NamedTuple):
    """What gpuaff has set in a process, and what it found there.

    Attributes:
        original: the border: the main thread's mask when gpuaff was first called; in a grant, its
            CPUs.
        share: the mask of free threads; None where that is the border.
        placed: the masks that free threads may have been given since: the share, earlier shares (a
            thread that looked bound while CPUs were offline gets its mask back), and in a forked
            child what undoing its parent's call has given it.
        bound: the threads that the program has bound, by id.
        first_bound: those when the border was taken.
        whole: the share that ``spread`` divides, while a part of it is ``share``; else None.
        memory: memory policies by thread id: the one before gpuaff set one, and gpuaff's.
        variables: environment variables by name, likewise; None: unset.
        outside: in a grant, the state that its end returns to.
    """

    pid: int
    original: CpuSet
    share: CpuSet | None = None
    placed: frozenset[CpuSet] = frozenset()
    bound: Mapping[int, Bound] = _NONE
    first_bound: Mapping[int, Bound] = _NONE
    reserved: CpuSet = frozenset()
    whole: CpuSet | None = None
    memory: Policies = _NONE
    variables: Mapping[str, tuple[str | None, str | None]] = _NONE
    grant: Grant | None = None
    outside: State | None = None

    @property
    def in_force(self) -> CpuSet | None:
        """What gpuaff has set: a share, else a grant's CPUs; None when that is nothing."""
        return self.original if self.share is None and self.grant is not None else self.share

    @property
    def mask(self) -> CpuSet:
        """The mask of free threads."""
        return self.original if self.share is None else self.share

    @property
    def free_masks(self) -> tuple[CpuSet, ...]:
        """The masks that free threads have requested, the likeliest first."""
        return (*dict.fromkeys([self.mask, self.original, *self.placed]),)

    @property
    def first(self) -> State:
        """As it was before the first call, or the first since the grant was taken."""
        nothing = State(pid=self.pid, original=self.original, bound=self.first_bound)
        return nothing._replace(
            first_bound=self.first_bound, grant=self.grant, outside=self.outside
        )

    def is_free(self, masks: Collection[CpuSet]) -> Callable[[int, CpuSet], bool]:
        """Whether a thread is free, by its id and mask: where these are the masks of such threads.

        The main thread is free on a part of what is in force, too: a runtime has narrowed it.
        """
        return lambda tid, mask: (
            mask in masks
            or (tid == self.pid and self.in_force is not None and mask < self.in_force)
        )

    def alive(self) -> dict[int, Bound]:
        """``bound`` without the threads that have ended: the kernel uses their ids again."""
        ids = set(kernel.thread_ids() or self.bound)
        return {tid: bound for tid, bound in self.bound.items() if tid in ids}


class Process:
    """This process: its state, and the transaction at work."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.earlier: dict[int, CpuSet] = {}  # the mask that each thread had before, by id
        self.lock = threading.RLock()
        self.thread: int | None = None  # the one that holds the lock

    def update(self, **changes: Any) -> None:
        """Change attributes of the state."""
        self.state = self.state._replace(**changes)

    def set_variable(self, name: str, value: str) -> None:
        """Set one of ``VARIABLES``, and remember its first value."""
        self.update(variables={**self.state.variables, name: (env.get(name), value)})
        env.put(name, value)


_processes: dict[int, Process] = {}
"""This process, by its id; empty until gpuaff is called in it."""

_inherited: State | None = None
"""In a forked child: what its parent had set."""


def _start_anew() -> None:
    """In a forked child. One that called nothing passes on to its children what it inherited."""
    for process in _processes.values():
        inherit(process.state)
    _processes.clear()


os.register_at_fork(after_in_child=_start_anew)


def inherit(state: State | None) -> None:
    """In a forked child: of what its parent had set, this is in force by now."""
    global _inherited
    _inherited = state


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
        state = State(pid=pid, original=original, grant=grant_around())
        # Of several threads the first one's mask counts. A lock could be left locked by a fork.
        found = _processes.setdefault(pid, Process(state))
    return found


def grant_around() -> Grant | None:
    """The grant that this process is in, or was forked in; None without one."""
    state = remembered() or _inherited
    return None if state is None else state.grant


def expected() -> CpuSet | None:
    """The CPUs that gpuaff has set for this process, or for the one that it was forked from."""
    state = remembered() or _inherited
    return None if state is None else state.in_force


@contextmanager
def transaction(process: Process, *, memory: bool = False, undoes: bool = False) -> Iterator[None]:
    """Change this process. Whatever the block raises, the process is then as it was before.

    Signal handlers (Ctrl-C) run in the windows that the block opens, and at its end; what they
    raise undoes the block. The block moves threads by ``threads.move(…, process.earlier)``.

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
        before, process.earlier = process.state, {}
        undo.callback(setattr, process, "state", before)
        undo.callback(inherit, _inherited)
        undo.callback(_put_variables, {name: env.get(name) for name in VARIABLES})
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


def _put_variables(values: Mapping[str, str | None]) -> None:
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
    """Put all threads back; those born meanwhile go where the free ones are."""
    for tid, mask in process.earlier.items():
        put_again(tid, mask, before.free_masks)
    masks = {process.state.mask, process.state.original} - {before.mask, before.original}
    spare = {*process.earlier, *process.state.bound}
    if masks:
        move_all(before.mask, lambda _, mask: mask in masks, {}, spare=spare)
