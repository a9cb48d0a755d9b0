"""How a waiter sleeps between two attempts: until those in its way leave, or until GPUs are free.

The first in the line has nobody in its way, nor has one that may take GPUs which no earlier waiter
wants.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from gpuaff.claims import board, queue
from gpuaff.claims.entries import Entry
from gpuaff.claims.ground import Ground
from gpuaff.claims.line import Place
from gpuaff.claims.model import Device
from gpuaff.system.watch import Watch

_LOOKS = 1.0
"""How often the first in the line looks, in seconds, at what the kernel does not tell: memory that
nobody explains, processes that are out of sight."""

_SOON, _SLOWER = 0.03, 4
"""After something has happened: seconds until the next look, and how much longer each time it takes
to the one after."""

_GLANCES = 0.05
"""How often the first in the line looks who holds GPUs, in seconds, where it cannot watch files."""

_PART_OF_LOOKING = 0.05
"""How seldom one who waits behind others sees how far it has come: not more often than once in so
many seconds for each that is before, as looking takes longer the more there are."""


class Sleep:
    """Sleeps until another attempt may come to something."""

    def __init__(self, watch: Watch, ground: Ground, devices: Sequence[Device]) -> None:
        """Nothing is watched at first.

        Args:
            watch: wakes the first in the line; whoever made it closes it.
            ground: where the devices are claimed from.
            devices: those whose release matters.
        """
        self._watch, self._ground, self._devices = watch, ground, devices
        self._watches, self._pause = False, _LOOKS

    def behind(self, place: Place, ahead: Sequence[Entry], left: float | None) -> None:
        """Sleep until whoever is just before is gone, or it is time to see how far one has come.

        Args:
            place: this process's place in the line.
            ahead: who must leave before there is anything to choose from, in their order.
            left: seconds until the wait is over; None is without limit.
        """
        now = time.monotonic()
        again = now + max(queue.BEAT, _PART_OF_LOOKING * len(ahead))
        end = again if left is None else min(again, now + left)
        before = ahead[-1]
        while (limit := min(queue.BEAT, end - time.monotonic())) > 0:
            gone = place.sleep_behind(before, limit)
            place.beat()
            if gone or not place.is_behind(before):
                return

    def first(self, place: Place, pids: Collection[int], left: float | None) -> None:
        """With nobody in the way: sleep until something may have changed.

        The first time, only begin to watch.

        Then one looks once more, as something may have happened before it was watched. After
        something has happened, it is looked again soon: the kernel tells that a file is closed
        just before it gives back its locks, and a GPU's memory may go a little later.

        Args:
            place: this process's place in the line.
            pids: the processes that have the devices.
            left: as in :meth:`behind`.
        """
        if not self._watches:
            self._watch.begin(self._ground.watched(self._devices))
            self._watches = True
            return
        watch = self._watch
        watch.follow(pids)
        limit = self._pause if left is None else min(self._pause, left)
        woken = watch.wait(limit) if watch.sees_files else _wait_unseeing(watch, limit, place)
        self._pause = _SOON if woken else min(self._pause * _SLOWER, _LOOKS)
        place.beat()


def _wait_unseeing(watch: Watch, seconds: float, place: Place) -> bool:
    """Where no file can be watched: look often at what costs little, who holds GPUs."""
    holding = board.holding(place.slot.handle)
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if watch.wait(min(left, _GLANCES)) or board.holding(place.slot.handle) != holding:
            return True
    return False
