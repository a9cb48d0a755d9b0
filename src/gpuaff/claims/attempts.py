"""From a pool of devices to leased ones: look, choose and lease, and wait in the queue."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace

from gpuaff._system import kernel
from gpuaff._system.watch import Watch
from gpuaff.claims.candidates import Pool
from gpuaff.claims.devices.probe import describe_waiter, describe_writer
from gpuaff.claims.locking import queue, registry
from gpuaff.claims.locking.guard import guarded, let_go
from gpuaff.claims.locking.queue import Place, join
from gpuaff.claims.locking.registry import Entry, Slot, about_me, stopped
from gpuaff.claims.model import Device, Usage, Waiting
from gpuaff.claims.sources import AnyLease, Ground
from gpuaff.errors import ClaimTimeoutError, GpusBusyError, NotEnoughGpusError

# How a waiter sleeps between two attempts: until those in its way leave, or until GPUs are free.
#
# The first in the line has nobody in its way, nor has one that may take GPUs which no earlier
# waiter
# wants.


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
    holding = registry.holding(place.slot.handle)
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if watch.wait(min(left, _GLANCES)) or registry.holding(place.slot.handle) != holding:
            return True
    return False


# For how long what is about to go from a GPU is looked at again. Pure.
#
# The kernel ends a process in steps: it gives back memory, then files and with them locks and
# contexts, and only then is it a zombie. The driver lists it for all that time, and a little
# longer.


SETTLES = 1.0
"""How long GPUs are looked at again whose processes have just ended, in seconds: the driver lists
them for another 0.10 to 0.15 s, and their memory."""

EXITS = 10.0
"""How long, in seconds, while a process is still exiting. It takes 0.1 to 0.5 s on four H200, and
for each 16 GiB of the host's memory that it has in small pages about a second more. One that takes
longer hangs, in the driver or on a file system, and may do so for ever."""

STEP = 0.03
"""Seconds between two looks."""


class Settling:
    """Knows since when something is about to go, and whether to look again."""

    def __init__(self, settles: float = SETTLES) -> None:
        """Nothing is about to go yet.

        Args:
            settles: how long to look again when no process is exiting any more, in seconds.
        """
        self._settles = settles
        self._since: float | None = None
        self._exited = 0.0
        self._has_exiting = False

    def goes_on(self, now: float, *, leaving: bool, exiting: bool) -> bool:
        """Whether to look again.

        Once more, too, when what was exiting is there and not about to go: it may have ended while
        we looked, between what it held and itself.

        Args:
            now: seconds, by a clock that only goes forward.
            leaving: whether what was seen now is about to go.
            exiting: whether a process is exiting still.
        """
        had_exiting, self._has_exiting = self._has_exiting, leaving and exiting
        if not leaving:
            self._since = None
            return had_exiting
        if self._since is None:
            self._since = self._exited = now
        if exiting:
            self._exited = now
            return now < self._since + EXITS
        return now < self._exited + self._settles

    def is_short(self, now: float) -> bool:
        """Whether it has not lasted for longer yet than what has ended needs."""
        return self._since is not None and now < self._since + self._settles


_FRESH = 0.3
"""How old a look may be, in seconds, when the guard is had: else the driver is asked again."""

_REMEDY = "wait=600 waits for them in order, for so many seconds, and wait=None as long as it takes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Obtained:
    """Devices that this process has leased.

    Attributes:
        devices: which, in CUDA's order.
        lease: the locks.
        slot: this process's slot on the board.
        usages: how they were used when they were leased.
    """

    devices: tuple[Device, ...]
    lease: AnyLease
    slot: Slot
    usages: tuple[Usage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refused:
    """Why an attempt has got nothing.

    Attributes:
        usages: how the devices of the pool are used; empty where earlier waiters want so many that
            it was not looked.
        ahead: who comes first.
        in_the_way: who of those must leave before there are enough devices to choose from.
        kept: the devices of the pool that those may choose, with the first of them for each.
        entries: what stands on the board.
        hidden: devices whose lease somebody has who cannot be seen.
        ending: those of them whose lease goes with processes that are exiting.
    """

    usages: tuple[Usage, ...]
    ahead: tuple[Entry, ...]
    in_the_way: tuple[Entry, ...]
    kept: Mapping[Device, Entry]
    entries: tuple[Entry, ...]
    hidden: frozenset[Device] = frozenset()
    ending: frozenset[Device] = frozenset()

    @property
    def gist(self) -> object:
        """What counts of it: when that changes, people are told."""
        holders = {(one.slot, one.pid, one.gpus) for one in self.entries if not one.waits}
        if self.in_the_way:
            return len(self.ahead), holders
        uses = [(one.device.uuid, one.busy, one.pids) for one in self.usages]
        return len(self.ahead), holders, uses, self.hidden

    @property
    def free(self) -> tuple[Device, ...]:
        """The devices that may be had."""
        free = [usage.device for usage in self.usages if usage.busy is None]
        return tuple(one for one in free if one not in self.hidden and one not in self.kept)

    @property
    def settling(self) -> int:
        """How many will probably be free in a moment."""
        leaving = {usage.device for usage in self.usages if usage.leaving} | self.ending
        return len(self.free) + sum(device not in self.kept for device in leaving)

    @property
    def exiting(self) -> bool:
        """Whether some of these wait for a process that is exiting."""
        return bool(self.ending) or any(usage.exiting for usage in self.usages)


class Attempts:
    """Tries to obtain devices, until it has them or its time is up."""

    def __init__(
        self,
        ground: Ground,
        pool: Pool,
        *,
        choose: Callable[[Sequence[Device]], tuple[Device, ...]],
        quiet: Callable[[], AbstractContextManager[object]],
        kept: ExitStack,
    ) -> None:
        """Get ready.

        Args:
            ground: where they are claimed from.
            pool: which come into question, and how many are wanted.
            choose: which of the free ones to take.
            quiet: keeps other libraries' users from choosing at the same time.
            kept: where that goes when devices were obtained: until they are occupied.
        """
        self._ground, self._pool, self._choose = ground, pool, choose
        self._quiet, self._kept = quiet, kept
        self._wants = self._fit = frozenset(map(ground.key, pool.devices))
        self._record = about_me()
        self._place: Place | None = None
        self._slot: Slot | None = None
        self._held: AnyLease | None = None
        self._started = time.monotonic()

    def obtain(
        self, *, wait: float | None, on_wait: Callable[[Waiting], object] | None = None
    ) -> Obtained:
        """Get the devices.

        Args:
            wait: for how long, in seconds; None is without limit.
            on_wait: told how it stands, whenever that changes.

        Raises:
            NotEnoughGpusError: the driver lets nobody, or not this process, have that many.
            GpusBusyError: they are not free, and ``wait`` is 0.
            ClaimTimeoutError: they did not become free in time.
            LockDirectoryError: the lock directory cannot be used.
        """
        with Watch() as watch:
            sleep = Sleep(watch, self._ground, self._pool.devices)
            return self._until_obtained(wait, _Teller(on_wait), sleep)

    def preview(self) -> tuple[Device, ...]:
        """What :meth:`obtain` would get now, without waiting. Nothing is taken.

        Raises:
            NotEnoughGpusError: as there.
            GpusBusyError: as there.
            LockDirectoryError: as there.
        """
        self._ground.look()
        entries = registry.entries()
        seen = self._refused(entries, self._ground.usages(entries))
        self._never(seen)
        free = seen.free
        if len(free) < self._pool.count:
            leaving = {one.device for one in seen.usages if one.leaving}
            usable = {*free, *(device for device in leaving if device not in seen.kept)}
            free = tuple(device for device in self._pool.devices if device in usable)
        if len(free) < self._pool.count:
            raise self._too_late(seen, 0)
        return self._choose(free)

    def undo(self) -> None:
        """Give back whatever there is: a place in the queue, leases; however far it has come.

        May be called again.
        """
        try:
            if self._place is not None:
                self._place.slot.withdraw()
            if self._slot is not None:
                self._slot.withdraw()
            if self._held is not None:
                self._held.release()
        finally:
            if self._place is not None:
                self._place.leave()
            if self._slot is not None:
                self._slot.release()
            registry.leave()
            let_go()

    def _until_obtained(self, wait: float | None, teller: _Teller, sleep: Sleep) -> Obtained:
        settling = Settling()
        while True:
            got = self._attempt(may_join=wait is None or wait > 0)
            if isinstance(got, Obtained):
                return got
            self._never(got)
            now = time.monotonic()
            leaving = got.settling >= self._pool.count
            settles = settling.goes_on(now, leaving=leaving, exiting=got.exiting)
            if settles and (self._place is None or settling.is_short(now)):
                time.sleep(STEP)
                continue
            # A short wait is no less patient than none.
            limit = wait if wait is None else max(wait, EXITS if settles else 0)
            left = None if limit is None else self._started + limit - now
            if self._place is None or (left is not None and left <= 0):
                raise self._too_late(got, wait)
            if teller.is_news(got.gist):
                teller.tell(self._standing(got))
            if got.in_the_way:
                sleep.behind(self._place, got.in_the_way, left)
            else:
                sleep.first(self._place, {pid for u in got.usages for pid in u.pids}, left)

    def _attempt(self, *, may_join: bool) -> Obtained | _Refused:
        if self._place is not None:
            seen = self._refused(registry.entries(), ())
            if seen.in_the_way:
                return seen
        with ExitStack() as stack:
            stack.enter_context(self._quiet())
            while True:
                self._ground.look()
                looked = time.monotonic()
                with guarded():
                    if time.monotonic() - looked > _FRESH:
                        continue
                    got = self._choose_and_lease()
                    if isinstance(got, Obtained):
                        self._kept.push(stack.pop_all())
                    elif may_join and self._place is None:
                        self._place = self._join(got.usages)
                    return got

    def _choose_and_lease(self) -> Obtained | _Refused:
        entries = registry.entries()
        seen = self._refused(entries, self._ground.usages(entries))
        while len(seen.free) >= self._pool.count:
            got = self._lease(self._choose(seen.free), seen.usages)
            if isinstance(got, Obtained):
                return got
            seen = replace(seen, hidden=seen.hidden | {got})
        if seen.hidden and self._place is None:  # in the line the kernel tells when they go
            return replace(seen, ending=self._ground.ending(seen.hidden))
        return seen

    def _lease(self, chosen: tuple[Device, ...], usages: Sequence[Usage]) -> Obtained | Device:
        slot = self._slot_for_claim()
        lease = self._held = self._ground.lease(slot)
        taken = lease.take(chosen)
        if taken is not None:
            return taken
        gpus = [self._ground.key(one) for one in chosen]
        slot.write({**self._record, "since": kernel.wall_clock(), "gpus": gpus})
        slot.hold_begins()
        return Obtained(
            devices=chosen,
            lease=lease,
            slot=slot,
            usages=tuple(usage for one in chosen for usage in usages if usage.device == one),
        )

    def _slot_for_claim(self) -> Slot:
        """The place's slot, which may be another one than before; else one of our own."""
        if self._place is not None:
            return self._place.slot
        if self._slot is None:
            self._slot = registry.take()
        return self._slot

    def _join(self, usages: Sequence[Usage]) -> Place:
        if self._slot is not None:  # from an attempt that came to nothing: the place has its own
            self._slot.release()
        # A GPU that this process can never use is kept from no other.
        fit = frozenset(self._ground.key(one.device) for one in usages if not one.lasting)
        self._fit = fit or self._wants
        return join(self._record, wanted=self._pool.count, gpus=self._fit)

    def _refused(self, entries: tuple[Entry, ...], usages: tuple[Usage, ...]) -> _Refused:
        ahead = self._ahead(entries)
        kept = {one: queue.kept_for(ahead, self._ground.key(one)) for one in self._pool.devices}
        return _Refused(
            usages=usages,
            ahead=ahead,
            in_the_way=queue.in_the_way(ahead, wants=self._fit, count=self._pool.count),
            kept={device: entry for device, entry in kept.items() if entry is not None},
            entries=entries,
        )

    def _ahead(self, entries: Sequence[Entry]) -> tuple[Entry, ...]:
        place = self._place
        found = queue.ahead(
            [entry for entry in entries if place is None or entry.slot != place.slot.number],
            wants=self._wants,
            now=kernel.uptime(),
            stopped=(),
            ticket=None if place is None else place.ticket,
        )
        passed = stopped(found)
        return tuple(entry for entry in found if entry.slot not in passed)

    def _never(self, got: _Refused) -> None:
        """Raise when waiting would not help."""
        never = sum(usage.lasting for usage in got.usages)
        found = len(got.usages) - never
        if never and found < self._pool.count:
            told = self._ground.in_words(got.usages, got.entries)
            why = "; ".join(usage.message for usage in told if usage.lasting)
            raise NotEnoughGpusError(self._pool.count, found, f"{found} can be used: {why}")

    def _too_late(self, got: _Refused, wait: float | None) -> Exception:
        remedy = "" if wait else _REMEDY
        pool = self._pool
        busy = GpusBusyError(pool.count, *self._reasons(got), pool.narrowed, remedy)
        if not wait:
            return busy
        return ClaimTimeoutError(time.monotonic() - self._started, busy)

    def _standing(self, got: _Refused) -> Waiting:
        free, reasons = self._reasons(got)
        return Waiting(
            position=len(got.ahead),
            waited=time.monotonic() - self._started,
            wanted=self._pool.count,
            free=free,
            reasons=reasons,
        )

    def _reasons(self, got: _Refused) -> tuple[int, tuple[str, ...]]:
        """How many can be had, and a line for each GPU that cannot."""
        usages = self._ground.in_words(got.usages, got.entries) if got.usages else ()
        told = {usage.device: usage.message for usage in usages if usage.busy is not None}
        for device in got.hidden:
            told.setdefault(device, f"{device}: leased by a process that cannot be seen from here")
        if not got.usages:
            told = self._leased(got.entries)
        waiters = {entry.slot: describe_waiter(entry) for entry in got.kept.values()}
        for device, entry in got.kept.items():
            told.setdefault(device, f"{device}: kept for {waiters[entry.slot]}")
        return len(got.free), tuple(told[one] for one in self._pool.devices if one in told)

    def _leased(self, entries: Sequence[Entry]) -> dict[Device, str]:
        """Who has which device by the board alone, in words."""
        held = {key: entry for entry in entries if not entry.waits for key in entry.gpus}
        found = {device: held.get(self._ground.key(device)) for device in self._pool.devices}
        return {
            device: f"{device}: leased by {describe_writer(entry, since=entry.since)}"
            for device, entry in found.items()
            if entry is not None
        }


class _Teller:
    """Tells how a wait stands, whenever that changes: to the log, and to a callback."""

    def __init__(self, on_wait: Callable[[Waiting], object] | None) -> None:
        self._on_wait = on_wait
        self._told: object = None

    def is_news(self, gist: object) -> bool:
        """Whether anything has changed. The words also say how long something has lasted."""
        is_same, self._told = gist == self._told, gist
        return not is_same

    def tell(self, standing: Waiting) -> None:
        """Tell it."""
        from logging import getLogger  # only those who wait pay for it

        from gpuaff.formatting import counted

        getLogger("gpuaff").info(
            "waiting for %s, %s: %s",
            counted(standing.wanted, "GPU"),
            f"{standing.position} before us" if standing.position else "next in line",
            "; ".join(standing.reasons),
        )
        if self._on_wait is not None:
            self._on_wait(standing)
