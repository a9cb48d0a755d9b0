"""What this process remembers of its own masks, so that twice is the same as once."""

from __future__ import annotations

import errno
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from gpuaff._system import kernel
from gpuaff.cpuset import CpuSet
from gpuaff.pinning.threads import move, put_again

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuaff._system.mempolicy import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A thread's memory policy.

    Attributes:
        first: the one that it had before gpuaff set one.
        ours: the one that gpuaff has set.
    """

    first: Policy
    ours: Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A variable of the environment.

    Attributes:
        first: its value before gpuaff set it; None when it was not set.
        ours: the value that gpuaff has set.
    """

    first: str | None
    ours: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What gpuaff has set besides CPUs.

    Attributes:
        memory: the memory policies, by thread.
        openmp: OMP_NUM_THREADS; None when it is not ours.
        mark: GPUAFF_PINNED; None when it is not this process's.
    """

    memory: Mapping[int, Placed] = field(default_factory=dict)
    openmp: Exported | None = None
    mark: Exported | None = None


NOTHING = Extras()


@dataclass()
class Taken:
    """A grant that is in force: the CPUs that came with a claim (:mod:`gpuaff.pinning.grant`).

    Attributes:
        before: how the process was before; what is undone meanwhile is not brought back.
        bound: as :class:`Process` has it, as the grant was taken.
        apart: likewise.
        cut: threads that were bound to a part outside of the grant: what each had, and what it
            was left with, by id.
    """

    before: Before
    bound: Mapping[int, CpuSet] = field(default_factory=dict)
    apart: Mapping[int, CpuSet] = field(default_factory=dict)
    cut: Mapping[int, tuple[CpuSet, CpuSet]] = field(default_factory=dict)


@dataclass()
class Process:
    """The masks of one process. With its :class:`Taken` the only thing in gpuaff that changes.

    Attributes:
        pid: whose masks these are.
        original: the border: the main thread's CPUs when gpuaff was first called; those of a
            grant while it is in force.
        share: what gpuaff has set since; None when nothing is set.
        bound: the masks of threads that somebody had bound on purpose and that gpuaff has moved
            all the same, or can't tell from its own by their mask, by id.
        apart: the masks of threads that somebody had bound, and that stayed where they were, by id.
        reserved: the CPUs that are kept out of the share for helpers.
        whole: what ``spread`` has cut, while its part is the share; else None.
        extras: what is set besides.
        given: in a forked child, what an undoing of its parent's call has given it: more than its
            own border, perhaps.
        moved: what each thread had that the call that is at work has moved, by id.
        taken: the grant that is in force; None when there is none.
        lock: held while one is at work.
    """

    pid: int
    original: CpuSet
    share: CpuSet | None = None
    bound: dict[int, CpuSet] = field(default_factory=dict)
    apart: Mapping[int, CpuSet] = field(default_factory=dict)
    reserved: CpuSet = frozenset()
    whole: CpuSet | None = None
    extras: Extras = NOTHING
    given: CpuSet | None = None
    moved: dict[int, CpuSet] = field(default_factory=dict)
    taken: Taken | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def set_here(self) -> tuple[CpuSet, ...]:
        """What threads have asked for that nobody else has bound, the likeliest first."""
        masks = (self.share, self.original, self.given)
        return tuple(mask for mask in masks if mask is not None)

    @property
    def in_force(self) -> CpuSet | None:
        """What gpuaff has set: a share, else the CPUs of a grant; None when that is nothing."""
        return self.original if self.share is None and self.taken is not None else self.share

    @property
    def uncut(self) -> CpuSet:
        """What ``spread`` cuts: the rank's share, also where a part of it is in force by now."""
        return self.whole or self.share or self.original


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """How a process was before a call; its attributes are those of :class:`Process`."""

    pid: int
    original: CpuSet
    share: CpuSet | None = None
    bound: Mapping[int, CpuSet] = field(default_factory=dict)
    apart: Mapping[int, CpuSet] = field(default_factory=dict)
    reserved: CpuSet = frozenset()
    whole: CpuSet | None = None
    extras: Extras = NOTHING
    taken: Taken | None = None

    @classmethod
    def of(cls, process: Process) -> Before:
        """How it is now."""
        return cls(
            pid=process.pid,
            original=process.original,
            share=process.share,
            bound=dict(process.bound),
            apart=process.apart,
            reserved=process.reserved,
            whole=process.whole,
            extras=process.extras,
            taken=process.taken,
        )

    @property
    def first(self) -> Before:
        """How it was before the first call, or the first since a grant was taken."""
        taken = self.taken
        if taken is None:
            return Before(pid=self.pid, original=self.original)
        return Before(
            pid=self.pid,
            original=self.original,
            bound=taken.bound,
            apart=taken.apart,
            taken=taken,
        )

    @property
    def in_force(self) -> CpuSet | None:
        """What gpuaff has set: a share, else the CPUs of a grant; None when that is nothing."""
        return self.original if self.share is None and self.taken is not None else self.share

    @property
    def mask(self) -> CpuSet:
        """Where the threads were that nobody had bound."""
        return self.original if self.share is None else self.share

    def recall(self, process: Process) -> None:
        """Let a process remember that of its CPUs."""
        process.share, process.bound = self.share, dict(self.bound)
        process.apart, process.reserved = self.apart, self.reserved
        process.whole = self.whole
        if process.pid == self.pid:  # a child has a border of its own
            process.original, process.taken = self.original, self.taken


_processes: dict[int, Process] = {}
"""This process, by its id; empty until gpuaff is called in it."""

_inherited: list[CpuSet] = []
"""In a forked child, the share that its parent had set: what the child starts with."""

_enclosing: list[tuple[Taken, CpuSet]] = []
"""In a forked child, the grant that was in force in its parent, and the CPUs of that."""


def _be_another() -> None:
    """Start anew in a forked child; a child that has called nothing passes on what it was given."""
    for process in _processes.values():
        _inherited[:] = [] if process.in_force is None else [process.in_force]
        if process.taken is not None:
            _enclosing[:] = [(process.taken, process.original)]
    _processes.clear()


kernel.in_forked_child(_be_another)


def enclosing() -> tuple[Taken | None, CpuSet | None]:
    """The grant that this process is in or was forked in, and its CPUs; None where that is none."""
    process = remembered()
    if process is not None and process.taken is not None:
        return process.taken, process.original
    return _enclosing[0] if _enclosing else (None, None)


def expected() -> CpuSet | None:
    """The CPUs that gpuaff has set for this process, or for the one that it was forked from."""
    process = remembered()
    if process is not None:
        return process.in_force
    return _inherited[0] if _inherited else None


def expect(share: CpuSet | None) -> None:
    """In a forked child: this is in force of what its parent had set; None when it is undone."""
    _inherited[:] = [] if share is None else [share]


def remembered() -> Process | None:
    """What is remembered of this process; None when gpuaff was not called in it yet."""
    return _processes.get(kernel.process_id())


def this_process(border: CpuSet | None = None) -> Process:
    """What is remembered of this process; the first call takes down its mask.

    A forked child is another process: the mask that it starts with is its border.

    Args:
        border: that mask, where it is known better than by the main thread's of the moment.
    """
    process = remembered()
    if process is None:
        pid = kernel.process_id()
        original = kernel.get_affinity(pid) if border is None else border
        # Several threads may be here at once: one of them is first, and its mask counts. No lock,
        # as a fork would leave it locked to the child.
        process = _processes.setdefault(pid, Process(pid=pid, original=original))
    return process


# What a cpuset leaves of a process's CPUs by now.
#
# A cpuset that loses CPUs cuts every thread's mask, and the kernel shows what is left; where
# nothing
# is left, it shows all of the cpuset instead. It keeps in mind what each thread has asked for last,
# and gives that back when the cpuset grows (cases A17, G4).


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveMasks:
    """What the kernel grants.

    Attributes:
        cpus: what it grants of the original mask; where that is nothing, what it grants instead.
        cpuset: all that it grants, as far as can be seen.
    """

    cpus: CpuSet
    cpuset: CpuSet

    def shown(self, asked: Collection[CpuSet]) -> set[CpuSet]:
        """What threads have now that have asked for one of these masks.

        That is nothing for a thread that sleeps while all of its CPUs are offline.
        """
        cut = {mask & self.cpuset for mask in asked}
        instead = set() if all(cut) else {self.cpuset}
        return {*asked, *cut, *instead}


def observe_masks(process: Process, own: CpuSet) -> EffectiveMasks:
    """Ask for the original mask, unless the calling thread has all of it; it then has what it gets.

    Not where it has asked for a share of which nothing is left: that could not be asked for again,
    if the call fails.

    Args:
        process: what is remembered of this process.
        own: the calling thread's CPUs.
    """
    original = process.original
    if own == original:
        return EffectiveMasks(cpus=original, cpuset=original)
    if _has_lost_its_share(process, own):
        return EffectiveMasks(cpus=own & original or own, cpuset=own)
    got = _asked_for(process, original, own)
    return EffectiveMasks(cpus=got, cpuset=own if own.issuperset(got) else got)


def shown(process: Process, asked: set[CpuSet]) -> set[CpuSet]:
    """What threads have now that have asked for one of these masks; nobody is moved."""
    own = kernel.get_affinity()
    if own in asked or own == process.original:
        return asked
    found = observe_masks(process, own)
    put_again(kernel.thread_id(), own, process.set_here)
    return found.shown(asked)


def _has_lost_its_share(process: Process, own: CpuSet) -> bool:
    """Whether a cpuset has taken the whole share away; else somebody has moved this thread."""
    share = process.share
    if share is None or own & share or own != kernel.get_affinity(process.pid):
        return False
    try:
        move(share, kernel.thread_id(), own, process.moved)
    except OSError as error:
        return error.errno == errno.EINVAL
    return False


def _asked_for(process: Process, cpus: CpuSet, own: CpuSet) -> CpuSet:
    try:
        move(cpus, kernel.thread_id(), own, process.moved)
    except OSError as error:  # a cpuset has taken all of it away, and put other CPUs in its place
        if error.errno != errno.EINVAL:
            raise
    return kernel.get_affinity()
