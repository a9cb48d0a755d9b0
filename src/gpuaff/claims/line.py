"""Standing in the queue: a ticket, and sleeping until whoever is before is gone."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress

from gpuaff.claims import board, queue
from gpuaff.claims.board import Slot
from gpuaff.claims.entries import Entry, stopped
from gpuaff.system import descriptors, kernel, locks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


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
            self.slot = board.take()
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
        return _sleeper(self.slot.file, entry.slot).wait(seconds)

    def is_behind(self, entry: Entry) -> bool:
        """Whether that one still stands in the line, and is well."""
        found = board.entry_at(self.slot.handle, entry.slot)
        if found is None or found.ticket != entry.ticket:
            return False
        return queue.is_well(found, kernel.uptime()) and not stopped([found])

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
        self._byte = board.WAITS + slot

    def run(self) -> None:
        with suppress(OSError):  # the board was spoiled: who waits is told when it looks, by time
            handle = board.opened()
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
    slot = board.take()
    try:
        number = queue.next_ticket(board.read(slot.handle))
        place = Place(slot, {**record, "ticket": number, "wanted": wanted, "gpus": sorted(gpus)})
        place.beat()
    except BaseException:
        slot.release()
        raise
    return place
