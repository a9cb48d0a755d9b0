"""The queue: first come, first served, among those who want the same GPUs. Pure.

A ticket is a number on the board that grows. A claim may take any free GPU but those from which an
earlier waiter may choose: so a waiter for four of all GPUs is not starved by many who want one,
and a waiter for one GPU keeps no other one. To keep only as many as the earlier waiters need would
be wrong: which ones they choose is not known before. One who is stopped, or has not said for a
while that it is well, is passed over; the dead are not on the board at all.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress

from gpuaff._system import descriptors, kernel, locks
from gpuaff._system.interrupts import interruptible
from gpuaff.claims.locking import registry
from gpuaff.claims.locking.registry import MOST, Entry, Slot, stopped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

BEAT = 2.0
"""How often one who waits says that it is well, in seconds."""

TOO_LONG = 10.0
"""Who has not said so for that long, in seconds, is stuck."""


def ahead(
    entries: Iterable[Entry],
    *,
    wants: frozenset[str],
    now: float,
    stopped: Collection[int],
    ticket: int | None = None,
) -> tuple[Entry, ...]:
    """Those who come first, in their order.

    Args:
        entries: what stands on the board, without one's own.
        wants: the GPUs that are wanted, by UUID.
        now: seconds since the machine started.
        stopped: the slots of those who are stopped.
        ticket: one's own number; None for one who has only just come.
    """
    waiting = [
        entry
        for entry in entries
        if entry.waits
        and (ticket is None or entry.ticket < ticket)
        and (not entry.gpus or not wants.isdisjoint(entry.gpus))
        and entry.slot not in stopped
        and is_well(entry, now)
    ]
    return tuple(sorted(waiting, key=lambda entry: (entry.ticket, entry.slot)))


def kept_for(ahead: Iterable[Entry], gpu: str) -> Entry | None:
    """The first waiter that may choose a GPU, and so keeps it from those behind.

    Args:
        ahead: the waiters that come first, in their order.
        gpu: what the board calls the GPU.
    """
    return next((entry for entry in ahead if not entry.gpus or gpu in entry.gpus), None)


def in_the_way(ahead: Sequence[Entry], *, wants: frozenset[str], count: int) -> tuple[Entry, ...]:
    """The waiters that must leave, in their order, before enough GPUs are left to choose from.

    Args:
        ahead: the waiters that come first, in their order.
        wants: the GPUs that are wanted, as the board calls them.
        count: how many of them.

    Returns:
        None of them where enough GPUs are wanted by no waiter that comes first.
    """
    left = set(wants)
    for place in reversed(range(len(ahead))):
        left = left.difference(ahead[place].gpus) if ahead[place].gpus else set()
        if len(left) < count:
            return tuple(ahead[: place + 1])
    return ()


def is_well(entry: Entry, now: float) -> bool:
    """Whether somebody who waits has said lately that it is well."""
    if not entry.record:  # it is about to write its record, or somebody has spoiled it
        return False
    return entry.beat is not None and abs(now - entry.beat) < TOO_LONG


def next_ticket(entries: Sequence[Entry]) -> int:
    """The number after all that are in use."""
    last = max((entry.ticket for entry in entries if entry.waits), default=0)
    return min(1 + last, MOST)


def who(entry: Entry) -> str:
    """Whose entry it is, for one line."""
    from gpuaff.notices import printable  # anybody may have written it

    name = printable(entry.text("name")[:40]) or "an unknown program"
    return f"{name} (pid {entry.pid})" if entry.pid is not None else name


# Standing in the queue: a ticket, and sleeping until whoever is before is gone.


class Place:
    """This process's place in the queue; its slot on the board becomes its claim's."""

    def __init__(self, slot: Slot, record: Mapping[str, Any]) -> None:
        """Only :func:`join` makes them."""
        self.slot = slot
        self._record = dict(record)

    @property
    def ticket(self) -> int:
        """The number in the line; the lower is the first."""
        return int(self._record["ticket"])

    def beat(self) -> None:
        """Say that this process is well; and come back if somebody has removed the board.

        Raises:
            LockDirectoryError: the board cannot be used any more.
        """
        if not self.slot.is_current:
            self.slot.release()  # first: if it was closed, the new one may get its number
            self.slot = registry.take()
        self._record["beat"] = kernel.uptime()
        self.slot.write(self._record)

    def sleep_behind(self, entry: Entry, seconds: float) -> bool:
        """Sleep until that one waits no more, whether it is served, gives up or dies.

        The kernel wakes a thread that wants the byte that the other one has locked; there is no
        way to end such a wait, so the thread stays, asleep, where this one gives up before. It
        holds nothing, and serves whoever in this process comes to stand behind that one next.

        Args:
            entry: who is before.
            seconds: how long to sleep at most.

        Returns:
            Whether it waits no more.
        """
        gone = _sleeper(self.slot.file, entry.slot)
        with interruptible():
            return gone.wait(seconds)

    def is_behind(self, entry: Entry) -> bool:
        """Whether that one still stands in the line, and is well."""
        found = registry.entry_at(self.slot.handle, entry.slot)
        if found is None or found.ticket != entry.ticket:
            return False
        return is_well(found, kernel.uptime()) and not stopped([found])

    def leave(self) -> None:
        """Give up: nothing of this process is in the queue any more."""
        self.slot.release()


class _Sleeper(threading.Thread):
    """A thread that sleeps until the writer of a slot waits no more.

    Attributes:
        gone: set then.
    """

    def __init__(self, slot: int) -> None:
        super().__init__(name="gpuaff-queue", daemon=True)
        self.gone = threading.Event()
        self._byte = registry.WAITS + slot

    def run(self) -> None:
        with suppress(OSError):  # the board was spoiled: who waits is told when it looks, by time
            handle = registry.opened()
            _asleep.add(handle)
            try:
                locks.wait_for_range(handle, self._byte)
            finally:
                _asleep.discard(handle)
                descriptors.close(handle)
            self.gone.set()


_asleep: set[int] = set()
"""The descriptors through which this process's threads sleep."""

_sleepers: dict[tuple[tuple[int, int], int], _Sleeper] = {}
"""The threads, by the board's file and the slot: one for each at most, also for those who try again
and again."""


def _forget_in_child() -> None:
    """A forked child has no such threads."""
    descriptors.close(*_asleep)
    _asleep.clear()
    _sleepers.clear()


kernel.in_forked_child(_forget_in_child)


def _sleeper(board_file: tuple[int, int], slot: int) -> threading.Event:
    found = _sleepers.get((board_file, slot))
    if found is None or found.gone.is_set() or not found.is_alive():
        found = _sleepers[board_file, slot] = _Sleeper(slot)
        with suppress(RuntimeError):  # no more threads can be had: then time wakes
            found.start()
    return found.gone


def join(record: Mapping[str, Any], *, wanted: int, gpus: frozenset[str]) -> Place:
    """Stand in the line, behind all who are there. The guard is held meanwhile.

    Args:
        record: what the board is to say of this process.
        wanted: how many GPUs are wanted.
        gpus: of which, by UUID.

    Raises:
        LockDirectoryError: the board cannot be used, or is full.
    """
    slot = registry.take()
    try:
        number = next_ticket(registry.read(slot.handle))
        place = Place(slot, {**record, "ticket": number, "wanted": wanted, "gpus": sorted(gpus)})
        place.beat()
    except BaseException:
        slot.release()
        raise
    return place
