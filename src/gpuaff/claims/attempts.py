"""From candidates to leased devices: look, choose and lease; wait in the queue."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace

from gpuaff._system import kernel
from gpuaff._system.interrupts import interruptible
from gpuaff.claims.candidates import Candidates
from gpuaff.claims.devices.probe import describe_waiter, describe_writer
from gpuaff.claims.locking import queue, registry
from gpuaff.claims.locking.guard import guarded
from gpuaff.claims.locking.queue import Place, join
from gpuaff.claims.locking.registry import Entry, Slot, about_me, stopped
from gpuaff.claims.model import Device, Usage, Waiting
from gpuaff.claims.sources import AnyLease, Source
from gpuaff.errors import ClaimTimeoutError, GpusBusyError, NotEnoughGpusError
from gpuaff.formatting import counted

SETTLES = 1.0
"""How long to look again at GPUs whose processes have just ended, in seconds: the driver lists
these, and their memory, for another 0.10 to 0.15 s."""

EXITS = 10.0
"""How long, in seconds, while a process is still exiting. It takes 0.1 to 0.5 s on four H200, and
for each 16 GiB of the host's memory that it has in small pages about a second more. One that takes
longer hangs, in the driver or on a file system, and may do so for ever."""

STEP = 0.03
"""Seconds between two looks."""

_FRESH = 0.3
"""How old a look may be, in seconds, when the guard is locked: else the driver is asked again."""

_REMEDY = "to queue: wait=600 (at most so many seconds) or wait=None (no limit)"


class Settling:
    """Decides how long to look again at GPUs whose processes are about to end. Pure.

    The kernel ends a process in steps: it gives back memory, then files and with them locks and
    contexts, and only then is it a zombie. The driver lists it for all that time, and a little
    longer.
    """

    def __init__(self, settles: float = SETTLES) -> None:
        """Nothing is leaving yet.

        Args:
            settles: how long to look again when no process is exiting any more, in seconds.
        """
        self._settles = settles
        self._since: float | None = None
        self._exited = 0.0
        self._has_exiting = False

    def goes_on(self, now: float, *, leaving: bool, exiting: bool) -> bool:
        """Whether to look again.

        Also once more when a process was exiting at the last look, and what is left is not leaving:
        it may have ended between two readings of that look.

        Args:
            now: seconds, by a clock that only goes forward.
            leaving: whether what was seen now is about to go.
            exiting: whether a process is still exiting.
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
        """Whether it has not lasted longer yet than the rest of an ended process."""
        return self._since is not None and now < self._since + self._settles


@dataclass(frozen=True, slots=True, kw_only=True)
class Obtained:
    """Devices that this process has leased.

    Attributes:
        devices: which, in CUDA's order.
        lease: the locks.
        slot: this process's slot in the registry.
    """

    devices: tuple[Device, ...]
    lease: AnyLease
    slot: Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refused:
    """Why an attempt got nothing.

    Attributes:
        usages: how the candidates are used; empty where earlier waiters want so many that the
            driver was not asked.
        ahead: the earlier waiters.
        in_the_way: those of them that must leave before there are enough devices to choose from.
        kept: the candidates that these may choose, with the first such waiter of each.
        entries: the registry.
        hidden: devices whose lease an invisible process holds.
        exiting: those of them whose lease only exiting processes hold.
    """

    usages: tuple[Usage, ...]
    ahead: tuple[Entry, ...]
    in_the_way: tuple[Entry, ...]
    kept: Mapping[Device, Entry]
    entries: tuple[Entry, ...]
    hidden: frozenset[Device] = frozenset()
    exiting: frozenset[Device] = frozenset()

    @property
    def state(self) -> object:
        """What counts for ``on_wait``: it is called when this changes."""
        holders = {(one.slot, one.pid, one.gpus) for one in self.entries if not one.waits}
        if self.in_the_way:
            return len(self.ahead), holders
        uses = [(one.device.uuid, one.busy, one.pids) for one in self.usages]
        return len(self.ahead), holders, uses, self.hidden

    @property
    def holding(self) -> frozenset[int]:
        """The slots of all claims."""
        return frozenset(entry.slot for entry in self.entries if not entry.waits)

    @property
    def pids(self) -> frozenset[int]:
        """The other processes that use the devices."""
        return frozenset(pid for usage in self.usages for pid in usage.pids)

    @property
    def free(self) -> tuple[Device, ...]:
        """The devices that this process may lease now."""
        free = [usage.device for usage in self.usages if usage.busy is None]
        return tuple(one for one in free if one not in self.hidden and one not in self.kept)

    @property
    def free_soon(self) -> frozenset[Device]:
        """The free devices, and those whose processes are about to end."""
        leaving = frozenset(usage.device for usage in self.usages if usage.leaving)
        return (leaving | self.exiting).difference(self.kept).union(self.free)

    @property
    def has_exiting(self) -> bool:
        """Whether a process is exiting on one of the devices."""
        return bool(self.exiting) or any(usage.exiting for usage in self.usages)


class Attempts:
    """Tries to lease devices, until it succeeds or its time is up."""

    def __init__(
        self,
        source: Source,
        candidates: Candidates,
        *,
        choose: Callable[[Sequence[Device]], tuple[Device, ...]],
        until_occupied: ExitStack,
        lock_others: Callable[[], AbstractContextManager[object]],
    ) -> None:
        """Nothing is leased yet.

        Args:
            source: where they are claimed from.
            candidates: the devices to choose from, and how many are requested.
            choose: chooses among the free ones.
            until_occupied: gets the lock of ``lock_others`` when devices are leased.
            lock_others: keeps other libraries' users from choosing at the same time.
        """
        self._source, self._candidates, self._choose = source, candidates, choose
        self._until_occupied, self._lock_others = until_occupied, lock_others
        self._wants = self._fit = frozenset(map(source.key, candidates.devices))
        self._record = about_me()
        self._place: Place | None = None
        self._slot: Slot | None = None
        self._lease: AnyLease | None = None
        self._started = time.monotonic()
        self._reported: object = None

    def obtain(
        self, *, wait: float | None, on_wait: Callable[[Waiting], object] | None = None
    ) -> Obtained:
        """Lease the devices, waiting in the queue if necessary.

        Args:
            wait: for how long, in seconds; None is without limit.
            on_wait: called when the wait begins, and when its state changes.

        Raises:
            NotEnoughGpusError: too many of the devices can never be used by this process.
            GpusBusyError: they are not free, and ``wait`` is 0.
            ClaimTimeoutError: they did not become free in time.
            LockDirectoryError: the lock directory cannot be used.
        """
        settling = Settling()
        while isinstance(got := self._attempt(may_join=wait is None or wait > 0), _Refused):
            self._refuse_if_hopeless(got)
            now = time.monotonic()
            leaving = len(got.free_soon) >= self._candidates.count
            settles = settling.goes_on(now, leaving=leaving, exiting=got.has_exiting)
            if settles and (self._place is None or settling.is_short(now)):
                with interruptible():
                    time.sleep(STEP)
                continue
            # A short wait is no less patient than none.
            limit = math.inf if wait is None else max(wait, EXITS if settles else 0)
            left = self._started + limit - now
            if self._place is None or left <= 0:
                raise self._not_free(got, wait)
            self._report(got, on_wait)
            if got.in_the_way:
                self._place.wait_behind(got.in_the_way, left)
            else:
                self._place.wait_for_gpus(got.holding, got.pids, left)
        return got

    def preview(self) -> tuple[Device, ...]:
        """The devices that :meth:`obtain` would lease now, without waiting. Nothing is locked.

        Raises:
            NotEnoughGpusError: too many of the devices can never be used by this process.
            GpusBusyError: they are not free.
            LockDirectoryError: the lock directory cannot be used.
        """
        self._source.look()
        entries = registry.entries()
        found = self._refused(entries, self._source.usages(entries))
        self._refuse_if_hopeless(found)
        free = found.free
        if len(free) < self._candidates.count:
            free = tuple(one for one in self._candidates.devices if one in found.free_soon)
        if len(free) < self._candidates.count:
            raise self._not_free(found, 0)
        return self._choose(free)

    def release(self) -> None:
        """Give back the place in the queue, the leases and the slot, as far as it has them."""
        held = self._slot, None if self._place is None else self._place.slot
        slots = [slot for slot in held if slot is not None]
        for slot in slots:
            slot.withdraw()  # first: waiters wake up by the leases, and read the registry
        if self._lease is not None:
            self._lease.release()
        for slot in slots:
            slot.release()

    def _attempt(self, *, may_join: bool) -> Obtained | _Refused:
        if self._place is not None:
            found = self._refused(self._entries(), ())
            if found.in_the_way:
                return found
        with ExitStack() as locked:
            locked.enter_context(self._lock_others())
            while True:
                self._source.look()
                looked = time.monotonic()
                with guarded():
                    if time.monotonic() - looked > _FRESH:
                        continue
                    got = self._choose_and_lease()
                    if isinstance(got, Obtained):
                        self._until_occupied.push(locked.pop_all())
                    elif may_join and self._place is None:
                        self._place = self._join(got.usages)
                    return got

    def _choose_and_lease(self) -> Obtained | _Refused:
        entries = self._entries()
        found = self._refused(entries, self._source.usages(entries))
        while len(found.free) >= self._candidates.count:
            got = self._lease_all(self._choose(found.free))
            if isinstance(got, Obtained):
                return got
            found = replace(found, hidden=found.hidden | {got})
        if found.hidden and self._place is None:  # a waiter sees when their locks go
            return replace(found, exiting=self._source.exiting(found.hidden))
        return found

    def _lease_all(self, chosen: tuple[Device, ...]) -> Obtained | Device:
        slot = self._slot_for_claim()
        self._lease = lease = self._source.lease(slot)
        leased = lease.take(chosen)
        if leased is not None:
            return leased
        gpus = [self._source.key(one) for one in chosen]
        slot.write({**self._record, "since": kernel.wall_clock(), "gpus": gpus})
        slot.hold_begins()
        return Obtained(devices=chosen, lease=lease, slot=slot)

    def _slot_for_claim(self) -> Slot:
        """The place's slot, which changes when the registry was removed; else one of our own."""
        if self._place is not None:
            return self._place.slot
        if self._slot is None:
            self._slot = registry.take()
        return self._slot

    def _join(self, usages: Sequence[Usage]) -> Place:
        if self._slot is not None:  # of an attempt that failed: the place has its own
            self._slot.release()
            self._slot = None
        # A GPU that this process can never use is not kept from others.
        fit = frozenset(self._source.key(one.device) for one in usages if not one.lasting)
        self._fit = fit or self._wants
        return join(self._record, wanted=self._candidates.count, gpus=self._fit)

    def _refused(self, entries: tuple[Entry, ...], usages: tuple[Usage, ...]) -> _Refused:
        devices, key = self._candidates.devices, self._source.key
        ahead = queue.ahead(entries, wants=self._wants, now=kernel.uptime())
        way: tuple[Entry, ...] = ()
        passed: Collection[int] = {-1}
        while passed:  # of those in the way the near ones decide; with none, all may keep GPUs
            ahead = tuple(entry for entry in ahead if entry.slot not in passed)
            way = queue.in_the_way(ahead, wants=self._fit, count=self._candidates.count)
            passed = stopped(way[: queue.NEAR] or ahead)
        kept = {device: queue.kept_for(ahead, key(device)) for device in devices}
        return _Refused(
            usages=usages,
            ahead=ahead,
            in_the_way=way,
            kept={device: entry for device, entry in kept.items() if entry is not None},
            entries=entries,
        )

    def _entries(self) -> tuple[Entry, ...]:
        return registry.entries() if self._place is None else self._place.entries()

    def _refuse_if_hopeless(self, got: _Refused) -> None:
        never = sum(usage.lasting for usage in got.usages)
        usable = len(got.usages) - never
        if never and usable < self._candidates.count:
            usages = self._source.described(got.usages, got.entries)
            why = "; ".join(usage.message for usage in usages if usage.lasting)
            raise NotEnoughGpusError(self._candidates.count, usable, f"{usable} can be used: {why}")

    def _not_free(self, got: _Refused, wait: float | None) -> Exception:
        count, narrowed = self._candidates.count, self._candidates.narrowed
        reasons = self._reasons(got)
        busy = GpusBusyError(count, len(got.free), reasons, narrowed, "" if wait else _REMEDY)
        return ClaimTimeoutError(time.monotonic() - self._started, busy) if wait else busy

    def _report(self, got: _Refused, on_wait: Callable[[Waiting], object] | None) -> None:
        """Log the state of the wait, and call ``on_wait``, when it has changed."""
        if got.state == self._reported:
            return
        self._reported = got.state
        waiting = Waiting(
            position=len(got.ahead),
            waited=time.monotonic() - self._started,
            wanted=self._candidates.count,
            free=len(got.free),
            reasons=self._reasons(got),
        )
        from logging import getLogger  # only waiters need it

        with interruptible():
            getLogger("gpuaff").info(
                "waiting for %s, %s: %s",
                counted(waiting.wanted, "GPU"),
                f"{waiting.position} before us" if waiting.position else "next in line",
                "; ".join(waiting.reasons),
            )
            if on_wait is not None:
                on_wait(waiting)

    def _reasons(self, got: _Refused) -> tuple[str, ...]:
        """A line for each candidate that is not free."""
        usages = self._source.described(got.usages, got.entries) if got.usages else ()
        reasons = {usage.device: usage.message for usage in usages if usage.busy is not None}
        for device in got.hidden:
            reasons.setdefault(device, f"{device}: leased by a process that is not visible here")
        if not got.usages:
            reasons = self._leased(got.entries)
        waiters = {entry.slot: describe_waiter(entry) for entry in got.kept.values()}
        for device, entry in got.kept.items():
            reasons.setdefault(device, f"{device}: kept for {waiters[entry.slot]}")
        return tuple(reasons[one] for one in self._candidates.devices if one in reasons)

    def _leased(self, entries: Sequence[Entry]) -> dict[Device, str]:
        """The holders by the registry alone."""
        held = {key: entry for entry in entries if not entry.waits for key in entry.gpus}
        found = {one: held.get(self._source.key(one)) for one in self._candidates.devices}
        return {
            device: f"{device}: leased by {describe_writer(entry, since=entry.since)}"
            for device, entry in found.items()
            if entry is not None
        }
