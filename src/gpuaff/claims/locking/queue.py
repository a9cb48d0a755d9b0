"""The queue: first come, first served, among those that want the same GPUs.

A waiter may take the free GPUs that no earlier waiter could choose: which of them these choose is
not known yet. So many waiters for one GPU cannot starve one that waits for four, and one that waits
for GPU 0 keeps no other. A waiter that is stopped, or has not beaten lately, is passed over.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from gpuaff._system import kernel
from gpuaff._system.interrupts import interruptible
from gpuaff.claims.locking import registry
from gpuaff.claims.locking.registry import MOST, Entry, Slot, stopped
from gpuaff.formatting import process_in_words

# Waiters poll, the less often the further back they are: 200 of them cost 2 to 3 % of a core
# together, and a freed GPU is taken within 0.25 s. A thread asleep on a lock, or inotify (a user
# has 128 instances), would wake sooner, but cannot be interrupted, or wakes all at each beat.
# Nor a futex in a shared map of the registry: any user can truncate that file, which is SIGBUS.

NEAR = 8  # so many waiters, behind the first, poll fast: eight GPUs may be freed at once

# In seconds.
BEAT = 2.0  # the least time between two beats; a waiter beats when it is awake
TOO_LONG = 10.0  # a waiter that has not beaten for so long is stuck
_FIRST_POLLS = 0.15  # between two polls of a waiter with no other in its way
_NEAR_POLLS, _FAR_POLLS = 0.25, 5.0  # of one with up to NEAR in its way; at most, of others
_SOON = 0.01  # of a near one, for _NEAR_POLLS after a change: it is served after the one before
_NEAR_CHECKS, _FAR_CHECKS = 0.7, 10.0  # between two checks if one in the way is stopped or stuck
_READS = 60.0  # between two reads of the whole registry without a change
_LOOKS = 1.0  # between two looks of the first at what no lock shows: other programs' processes
_AGAIN = 0.03  # after a change it looks again so soon: memory may be freed a little later


def ahead(entries: Iterable[Entry], *, wants: frozenset[str], now: float) -> tuple[Entry, ...]:
    """The waiters that want some of the same GPUs and are well, in order."""
    # One that is only slow keeps its turn
    waiting = [
        entry
        for entry in entries
        if entry.waits and not (entry.gpus and wants.isdisjoint(entry.gpus)) and is_well(entry, now)
    ]
    return tuple(sorted(waiting, key=lambda entry: (entry.ticket, entry.slot)))


def kept_for(ahead: Iterable[Entry], gpu: str) -> Entry | None:
    """The first of the waiters ahead that may choose a GPU, and so keeps it from those behind."""
    return next((entry for entry in ahead if not entry.gpus or gpu in entry.gpus), None)


def in_the_way(ahead: Sequence[Entry], *, wants: frozenset[str], count: int) -> tuple[Entry, ...]:
    """Those of the waiters ahead that must leave, in order, before enough wanted GPUs are left."""
    # Disjoint requests are never in each other's way, so each is served as if it were alone.
    left = set(wants)
    for place in reversed(range(len(ahead))):
        left = left.difference(ahead[place].gpus) if ahead[place].gpus else set()
        if len(left) < count:
            return tuple(ahead[: place + 1])
    return ()


def is_well(entry: Entry, now: float) -> bool:
    """Whether a waiter has written its record, and has beaten lately."""
    return entry.is_written and _is_fresh(entry.beat, now)


def _is_fresh(beat: float, now: float) -> bool:
    """By the time since boot: no user can set that clock."""
    return abs(now - beat) < TOO_LONG  # False for NaN


def who(entry: Entry) -> str:
    """The process of an entry, in words."""
    return process_in_words(entry.name, entry.pid)


class Place:
    """This process's slot in the registry, and its place in the queue once it has joined that."""

    def __init__(self) -> None:
        self.slot, self.is_queued = Slot(), False
        self._ticket, self._record = MOST + 1, dict[str, Any]()
        self._beaten = time.monotonic()
        self._pause, self._quick_until = _LOOKS, 0.0
        self._tickets: list[int] = []

    def entries(self) -> tuple[Entry, ...]:
        """The claims and the earlier waiters; :meth:`wait_behind` compares with their tickets."""
        self._tickets = registry.tickets(self.slot.handle)
        return registry.read(self.slot.handle, before=self._ticket)

    def join(self, entries: Iterable[Entry], *, wanted: int, gpus: frozenset[str]) -> None:
        """Join the queue behind its waiters, for some of these GPUs. The guard must be held."""
        last = max((entry.ticket for entry in entries if entry.waits), default=0)
        self._ticket, self.is_queued = min(1 + last, MOST), True
        self._record = {**registry.about_me(), "wanted": wanted, "gpus": sorted(gpus)}
        self._write()

    def _write(self) -> None:
        self.slot.beat(ticket=self._ticket)
        self.slot.write(self._record)

    def beat(self) -> None:
        """Write that this process is well."""
        self._beaten = time.monotonic()
        self.renew()
        self.slot.beat()

    def renew(self) -> None:
        """Move to the new registry if the file was removed."""
        if self.slot.is_current:
            return
        self.slot.release()  # first: if it was closed, the new one may get its number
        self.slot = Slot()
        if self.is_queued:
            self._write()

    def wait_behind(self, others: Sequence[Entry], seconds: float = math.inf) -> None:
        """Sleep until one that is in the way leaves or is passed over, or a full read is due."""
        self.beat()
        is_near = len(others) <= NEAR
        poll, checks = _NEAR_POLLS, _NEAR_CHECKS
        if not is_near:  # when the one half way has left, this one is nearer, and polls more often
            poll, checks = min(_FAR_POLLS, 0.1 * len(others)), _FAR_CHECKS
            others = [others[len(others) // 2]]
        now = time.monotonic()
        end, check = now + min(seconds, _READS), now + checks
        while now < end:
            self._sleep(_SOON if now < self._quick_until else poll, end)
            now = time.monotonic()
            gone = any(not registry.still_waits(self.slot.handle, other) for other in others)
            if gone or (is_near and registry.tickets(self.slot.handle) != self._tickets):
                self._quick_until = now + _NEAR_POLLS
                return
            if now >= check:
                check, beats = now + checks, registry.beats(self.slot.handle)
                fresh = (_is_fresh(beats[other.slot], kernel.uptime()) for other in others)
                if not (self.slot.is_current and all(fresh)) or stopped(others):
                    return

    def wait_for_gpus(
        self, holding: Collection[int], pids: Collection[int], seconds: float = math.inf
    ) -> None:
        """With no waiter in the way: sleep until a claim or one of these processes has ended."""
        self.beat()
        seen = [pid for pid in pids if _exists(pid)]
        end = time.monotonic() + min(seconds, self._pause)
        self._pause = min(4 * self._pause, _LOOKS)
        while time.monotonic() < end:
            self._sleep(_FIRST_POLLS, end)
            if registry.holding(self.slot.handle) != holding or not all(map(_exists, seen)):
                self._pause = _AGAIN
                return

    def _sleep(self, seconds: float, end: float) -> None:
        with interruptible():
            time.sleep(max(0.0, min(seconds, end - time.monotonic())))
        now = time.monotonic()
        if now - self._beaten >= BEAT:
            self.slot.beat()
            self._beaten = now


def _exists(pid: int) -> bool:
    return kernel.Tree().exists(f"proc/{pid}")
