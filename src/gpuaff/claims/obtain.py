"""From a pool of devices to leased ones: look, choose and lease, and wait in the queue."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack

from gpuaff.claims import board, queue
from gpuaff.claims.board import Entry, Slot
from gpuaff.claims.ground import AnyLease, Ground
from gpuaff.claims.guard import guarded
from gpuaff.claims.line import Place, join
from gpuaff.claims.model import Busy, Device, Usage, Waiting
from gpuaff.claims.pool import Pool
from gpuaff.errors import ClaimTimeoutError, GpusBusyError, NotEnoughGpusError
from gpuaff.notices import Notice
from gpuaff.records import dataclass, replace
from gpuaff.system import kernel
from gpuaff.system.watch import Watch

_SETTLES = 1.0
"""How long GPUs are looked at again whose processes have just ended, in seconds: the driver lists
them for another 0.10 to 0.15 s, and their memory."""

_SETTLE_STEP = 0.03
"""Seconds between two such looks."""

_LOOKS = 1.0
"""How often the first in the line looks, in seconds, at what the kernel does not tell: memory that
nobody explains, processes that are out of sight."""


@dataclass(frozen=True, kw_only=True)
class Obtained:
    """Devices that this process has leased.

    Attributes:
        devices: which, in CUDA's order.
        lease: the locks.
        slot: this process's slot on the board.
        usages: how they were used when they were leased.
        notices: what was not as hoped.
    """

    devices: tuple[Device, ...]
    lease: AnyLease
    slot: Slot
    usages: tuple[Usage, ...]
    notices: tuple[Notice, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Refused:
    """Why an attempt has got nothing.

    Attributes:
        usages: how the devices of the pool are used.
        ahead: who comes first.
        entries: what stands on the board.
    """

    usages: tuple[Usage, ...]
    ahead: tuple[Entry, ...]
    entries: tuple[Entry, ...]

    @property
    def free(self) -> int:
        return sum(usage.busy is None for usage in self.usages)

    @property
    def settling(self) -> int:
        """How many will probably be free in a moment."""
        return self.free + sum(usage.leaving for usage in self.usages)


class Attempts:
    """Tries to obtain devices, until it has them or its time is up."""

    def __init__(
        self,
        ground: Ground,
        pool: Pool,
        *,
        choose: Callable[[Sequence[Device]], tuple[Device, ...]],
        quiet: Callable[[], AbstractContextManager[tuple[Notice, ...]]],
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
        self._wants = frozenset(map(ground.key, pool.devices))
        self._record = board.about_me()
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
        with ExitStack() as ends:
            return self._until_obtained(wait, _Teller(on_wait), ends)

    def undo(self) -> None:
        """Give back whatever there is: a place in the queue, leases; however far it has come.

        May be called again.
        """
        try:
            if self._held is not None:
                self._held.release()
        finally:
            if self._place is not None:
                self._place.leave()
            if self._slot is not None:
                self._slot.release()

    def _until_obtained(self, wait: float | None, teller: _Teller, ends: ExitStack) -> Obtained:
        watch: Watch | None = None
        settles = None
        while True:
            if self._place is not None and watch is None:
                watch = ends.enter_context(Watch(self._ground.watched(self._pool.devices)))
            got = self._attempt(may_join=wait is None or wait > 0)
            if isinstance(got, Obtained):
                return got
            self._never(got.usages)
            now = time.monotonic()
            if not got.ahead and got.settling >= self._pool.count:
                settles = settles or now + _SETTLES
                if now < settles:
                    time.sleep(_SETTLE_STEP)
                    continue
            else:
                settles = None
            left = None if wait is None else self._started + wait - now
            if self._place is None or (left is not None and left <= 0):
                raise self._too_late(got, wait)
            teller.tell(self._standing(got))
            self._sleep(got, watch, left)

    def _attempt(self, *, may_join: bool) -> Obtained | _Refused:
        if self._place is not None:
            entries = board.entries()
            ahead = self._ahead(entries)
            if ahead:
                return _Refused(usages=(), ahead=ahead, entries=entries)
        with ExitStack() as stack:
            notices = stack.enter_context(self._quiet())
            with guarded():
                got = self._look_and_lease()
                if isinstance(got, Obtained):
                    self._kept.push(stack.pop_all())
                    got = replace(got, notices=notices)
                elif may_join and self._place is None:
                    self._place = join(self._record, wanted=self._pool.count, gpus=self._wants)
        return got

    def _look_and_lease(self) -> Obtained | _Refused:
        entries = board.entries()
        ahead = self._ahead(entries)
        usages = self._ground.usages(entries)
        while not ahead:
            free = [usage.device for usage in usages if usage.busy is None]
            if len(free) < self._pool.count:
                break
            got = self._lease(self._choose(free), usages)
            if isinstance(got, Obtained):
                return got
            taken = f"{got}: leased by a process that cannot be seen from here"
            usages = tuple(
                replace(usage, busy=Busy.LEASED, message=taken) if usage.device == got else usage
                for usage in usages
            )
        return _Refused(usages=usages, ahead=ahead, entries=entries)

    def _lease(self, chosen: tuple[Device, ...], usages: Sequence[Usage]) -> Obtained | Device:
        if self._slot is None:
            self._slot = board.take() if self._place is None else self._place.slot
        slot = self._slot
        lease = self._held = self._ground.lease(slot)
        taken = lease.take(chosen)
        if taken is not None:
            return taken
        slot.write({**self._record, "gpus": [self._ground.key(one) for one in chosen]})
        slot.hold_begins()
        return Obtained(
            devices=chosen,
            lease=lease,
            slot=slot,
            usages=tuple(usage for one in chosen for usage in usages if usage.device == one),
        )

    def _ahead(self, entries: Sequence[Entry]) -> tuple[Entry, ...]:
        place = self._place
        return queue.ahead(
            [entry for entry in entries if place is None or entry.slot != place.slot.number],
            wants=self._wants,
            now=kernel.uptime(),
            stopped=board.stopped(entry for entry in entries if entry.waits),
            ticket=None if place is None else place.ticket,
        )

    def _sleep(self, got: _Refused, watch: Watch | None, left: float | None) -> None:
        """Sleep until something may have changed."""
        place = self._place
        if place is None or watch is None:
            return
        end = None if left is None else time.monotonic() + left
        while got.ahead:
            limit = queue.BEAT if end is None else min(queue.BEAT, end - time.monotonic())
            if place.sleep_behind(got.ahead[-1], max(limit, 0)) or limit <= 0:
                break
            place.beat()
            if not place.is_behind(got.ahead[-1]):
                break
        else:
            watch.follow({pid for usage in got.usages for pid in usage.pids})
            limit = _LOOKS if watch.sees_files else _LOOKS / 10
            watch.wait(limit if left is None else min(limit, left))
        place.beat()

    def _never(self, usages: Sequence[Usage]) -> None:
        """Raise when waiting would not help."""
        never = [usage for usage in usages if usage.lasting]
        found = len(usages) - len(never)
        if never and found < self._pool.count:
            why = "; ".join(usage.message for usage in never)
            raise NotEnoughGpusError(self._pool.count, found, f"{found} can be used: {why}")

    def _too_late(self, got: _Refused, wait: float | None) -> Exception:
        busy = GpusBusyError(self._pool.count, *self._reasons(got))
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
        if not got.ahead:
            return got.free, tuple(usage.message for usage in got.usages if usage.busy is not None)
        first = queue.in_words(got.ahead[0])
        held = {
            key: f"leased by {queue.who(entry)}"
            for entry in got.entries
            if not entry.waits
            for key in entry.gpus
        }
        told = {usage.device: usage.message for usage in got.usages if usage.busy is not None}
        return 0, tuple(
            told.get(one) or f"{one}: {held.get(self._ground.key(one), f'kept for {first}')}"
            for one in self._pool.devices
        )


class _Teller:
    """Tells how a wait stands, whenever that changes: to the log, and to a callback."""

    def __init__(self, on_wait: Callable[[Waiting], object] | None) -> None:
        self._on_wait = on_wait
        self._told: object = None

    def tell(self, standing: Waiting) -> None:
        what = standing.position, standing.free, standing.reasons
        if what == self._told:
            return
        self._told = what
        from logging import getLogger  # only those who wait pay for it

        getLogger("gpuaff").info(
            "waiting for %d GPUs, %d before: %s",
            standing.wanted,
            standing.position,
            "; ".join(standing.reasons),
        )
        if self._on_wait is not None:
            self._on_wait(standing)
