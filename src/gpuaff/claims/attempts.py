"""From candidates to leased devices: look, choose and lease; wait in the queue."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from gpuaff._system import kernel
from gpuaff._system.interrupts import interruptible
from gpuaff.claims.candidates import Candidates, Request
from gpuaff.claims.devices.occupancy import EXITS, STEP, Settling
from gpuaff.claims.devices.probe import Probe, describe
from gpuaff.claims.devices.selection import choose, observe_connections
from gpuaff.claims.locking import leases, queue, registry, safe_gpu
from gpuaff.claims.locking.guard import guarded
from gpuaff.claims.locking.leases import Lease
from gpuaff.claims.locking.queue import Place
from gpuaff.claims.locking.registry import Entry, Slot, stopped
from gpuaff.claims.model import Demand, Device, Usage, Waiting
from gpuaff.claims.sources import SubLease, usages_inside
from gpuaff.errors import ClaimTimeoutError, GpusBusyError, NotEnoughGpusError
from gpuaff.formatting import counted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuaff._system.nvml import Session
    from gpuaff.launch.inherited import ParentClaim
    from gpuaff.notices import Notice

# A process without a lease that comes in this time is found by the look after occupying.
_FRESH = 0.3
"""How old a look may be, in seconds, when the guard is locked: else the driver is asked again."""

_REMEDY = "to queue: wait=600 (at most so many seconds) or wait=None (no limit)"


class Obtained(NamedTuple):
    """Devices that this process has leased, in CUDA's order, and its slot in the registry."""

    devices: tuple[Device, ...]
    lease: Lease | SubLease
    slot: Slot


class _Snapshot(NamedTuple):
    """What an attempt has seen: all that it has got, where too few devices are free.

    Attributes:
        usages: how the candidates are used; empty where the driver was not asked, as too many are
            ``in_the_way``.
        ahead: the earlier waiters.
        in_the_way: those of them that must leave before there are enough devices to choose from.
        kept: the candidates that ``ahead`` may choose, with the first such waiter of each.
    """

    usages: tuple[Usage, ...]
    ahead: tuple[Entry, ...]
    in_the_way: tuple[Entry, ...]
    kept: Mapping[Device, Entry]
    entries: tuple[Entry, ...]

    @property
    def state(self) -> object:
        """What counts for ``on_wait``: it is called when this changes."""
        holders = {(one.slot, one.pid, one.gpus) for one in self.entries if not one.waits}
        if self.in_the_way:
            return len(self.ahead), holders
        uses = [(one.device.uuid, one.busy, one.pids) for one in self.usages]
        return len(self.ahead), holders, uses

    @property
    def free(self) -> tuple[Device, ...]:
        free = (usage.device for usage in self.usages if usage.busy is None)
        return tuple(device for device in free if device not in self.kept)

    @property
    def free_soon(self) -> tuple[Device, ...]:
        soon = (one.device for one in self.usages if one.busy is None or one.leaving)
        return tuple(device for device in soon if device not in self.kept)


class Attempts:
    """Tries to lease some of the candidates, until it succeeds or its time is up.

    The driver is asked about them by ``probe``, unless they are part of a parent claim.
    """

    def __init__(
        self,
        session: Session,
        request: Request,
        candidates: Candidates,
        parent: ParentClaim | None,
        *,
        own_is_free: bool = True,
        until_occupied: ExitStack,
    ) -> None:
        """Nothing is leased yet; ``until_occupied`` gets safe_gpu's lock when devices are."""
        self._devices, self._count = candidates.devices, candidates.wanted
        self._narrowed, self._wait, self._parent = candidates.narrowed, request.wait, parent
        demand = Demand(
            min_free_memory=request.min_free_memory, max_utilization=request.max_utilization
        )
        self.probe = Probe(session, self._devices, demand=demand, own_is_free=own_is_free)
        self.warnings: tuple[Notice, ...] = ()
        self._until_occupied = until_occupied
        self._topology = None
        is_open = request.gpus is None and self._count < len(self._devices)
        if is_open and not any(one.is_mig for one in self._devices):
            self._topology = observe_connections(session)
        self._wants = self._fit = frozenset(map(self._key, self._devices))
        self._record = registry.about_me()
        self._place: Place | None = None
        self._slot: Slot | None = None
        self._lease: Lease | SubLease | None = None
        self._started = time.monotonic()
        self._reported: object = None

    def obtain(self, on_wait: Callable[[Waiting], object] | None = None) -> Obtained:
        """Lease the devices, waiting in the queue if that was requested.

        Raises:
            NotEnoughGpusError: too many of the devices can never be used by this process.
            GpusBusyError: they are not free, and no wait was requested.
            ClaimTimeoutError: they did not become free in time.
        """
        settling, wait = Settling(), self._wait
        while isinstance(got := self._attempt(), _Snapshot):
            self._refuse_if_hopeless(got)
            now = time.monotonic()
            leaving = len(got.free_soon) >= self._count
            exiting = any(usage.exiting for usage in got.usages)
            settles = settling.goes_on(now, leaving=leaving, exiting=exiting)
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
                holding = frozenset(entry.slot for entry in got.entries if not entry.waits)
                pids = frozenset(pid for usage in got.usages for pid in usage.pids)
                self._place.wait_for_gpus(holding, pids, left)
        return got

    def preview(self) -> tuple[Device, ...]:
        """The devices that :meth:`obtain` would lease now, without waiting. Nothing is locked."""
        self._look()
        entries = registry.entries()
        found = self._snapshot(entries, self._usages(entries))
        self._refuse_if_hopeless(found)
        free = found.free if len(found.free) >= self._count else found.free_soon
        if len(free) < self._count:
            raise self._not_free(found, 0)
        return self._choose(free)

    def release(self) -> None:
        """Give back the place in the queue, the leases and the slot, as far as it has them."""
        slot = self._slot if self._place is None else self._place.slot
        if slot is not None:
            slot.withdraw()  # first: waiters wake up by the leases, and read the registry
        if self._lease is not None:
            self._lease.release()
        if slot is not None:
            slot.release()

    def _attempt(self) -> Obtained | _Snapshot:
        if self._place is not None:
            found = self._snapshot(self._entries(), ())
            if found.in_the_way:
                return found
        with ExitStack() as locked:
            if self._parent is None:  # inside a claim, safe_gpu's users never choose
                limit = None if self._wait is None else max(safe_gpu.LIMIT, self._wait)
                self.warnings = locked.enter_context(safe_gpu.holding(self._count, limit=limit))
            while True:
                # Before the guard, so that many claimers start their driver at the same time.
                self._look()
                looked = time.monotonic()
                with guarded():
                    if time.monotonic() - looked > _FRESH:
                        continue
                    got = self._choose_and_lease()
                    if isinstance(got, Obtained):
                        self._until_occupied.push(locked.pop_all())
                    elif self._wait != 0 and self._place is None:
                        self._place = self._join(got.usages)
                    return got

    def _choose_and_lease(self) -> Obtained | _Snapshot:
        entries = self._entries()
        found = self._snapshot(entries, self._usages(entries))
        free, hidden = found.free, set[Device]()
        while len(free) >= self._count:
            got = self._lease_all(self._choose(free))
            if isinstance(got, Obtained):
                return got
            hidden.add(got)
            free = tuple(device for device in free if device != got)
        return found._replace(usages=self._with_hidden(found.usages, hidden)) if hidden else found

    def _with_hidden(self, usages: Sequence[Usage], hidden: set[Device]) -> tuple[Usage, ...]:
        """The same, with leases that are not in the registry."""
        # A waiter sees when their locks go; those of a parent claim go with the registry's entry.
        is_needed = self._parent is None and self._place is None
        holders = leases.holders(hidden) if is_needed else {}

        def leased(device: Device) -> Usage:
            pids = [holder.pid for holder in holders.get(device.uuid, ())]
            exiting = bool(pids) and all(pid and kernel.is_exiting(pid) for pid in pids)
            why = "leased by a process that is not visible here"
            return Usage.leased(device, why, exiting=exiting)

        return tuple(leased(one.device) if one.device in hidden else one for one in usages)

    def _choose(self, free: Sequence[Device]) -> tuple[Device, ...]:
        if self._topology is None:
            return tuple(free[: self._count])
        indices = [device.index for device in free]
        chosen = choose(self._count, indices, topology=self._topology, idle=self.probe.idle)
        return tuple(device for device in free if device.index in chosen)

    def _lease_all(self, chosen: tuple[Device, ...]) -> Obtained | Device:
        """Lease all of them, and register that; else none, and the one that another has leased."""
        if self._place is not None:
            slot = self._place.slot
        else:
            slot = self._slot = self._slot or registry.take()
        self._lease = Lease() if self._parent is None else SubLease(self._parent, slot)
        leased = self._lease.take(chosen)
        if leased is not None:
            return leased
        gpus = [self._key(one) for one in chosen]
        slot.write({**self._record, "since": time.time(), "gpus": gpus})
        slot.hold_begins()
        return Obtained(chosen, self._lease, slot)

    def _join(self, usages: Sequence[Usage]) -> Place:
        if self._slot is not None:  # of an attempt that failed: the place has its own
            self._slot.release()
            self._slot = None
        # A GPU that this process can never use is not kept from others.
        fit = frozenset(self._key(one.device) for one in usages if not one.lasting)
        self._fit = fit or self._wants
        return queue.join(self._record, wanted=self._count, gpus=self._fit)

    def _entries(self) -> tuple[Entry, ...]:
        return registry.entries() if self._place is None else self._place.entries()

    def _snapshot(self, entries: tuple[Entry, ...], usages: tuple[Usage, ...]) -> _Snapshot:
        ahead = queue.ahead(entries, wants=self._wants, now=kernel.uptime())
        way: tuple[Entry, ...] = ()
        passed: Collection[int] = {-1}
        while passed:  # of those in the way the near ones decide; with none, all may keep GPUs
            ahead = tuple(entry for entry in ahead if entry.slot not in passed)
            way = queue.in_the_way(ahead, wants=self._fit, count=self._count)
            passed = stopped(way[: queue.NEAR] or ahead)
        devices = self._devices
        kept = {device: queue.kept_for(ahead, self._key(device)) for device in devices}
        return _Snapshot(
            usages=usages,
            ahead=ahead,
            in_the_way=way,
            kept={device: entry for device, entry in kept.items() if entry is not None},
            entries=entries,
        )

    # What differs between the GPUs of the machine and those of a parent claim.

    def _key(self, device: Device) -> str:
        """The registry's name of a device."""
        return device.uuid if self._parent is None else f"{self._parent.slot}/{device.uuid}"

    def _look(self) -> None:
        """Ask the driver, which takes a while, and may hang."""
        if self._parent is None:
            self.probe.look()

    def _usages(self, entries: Sequence[Entry]) -> tuple[Usage, ...]:
        """How the devices are used: by the driver's last answer, and by the registry now."""
        if self._parent is None:
            return self.probe.evaluated(entries)
        return usages_inside(self._parent, self._devices, entries)

    def _described(self, got: _Snapshot) -> tuple[Usage, ...]:
        """The last usages, with the names of processes in their messages."""
        is_known = self._parent is not None or not got.usages
        return got.usages if is_known else self.probe.described(got.entries)

    def _refuse_if_hopeless(self, got: _Snapshot) -> None:
        usable = sum(not usage.lasting for usage in got.usages)
        if len(got.usages) > usable and usable < self._count:
            never = [usage.message for usage in self._described(got) if usage.lasting]
            reason = "\n  ".join([f"{usable or 'none'} can be used", *never])
            raise NotEnoughGpusError(self._count, usable, reason)

    def _not_free(self, got: _Snapshot, wait: float | None) -> Exception:
        remedy, narrowed = "" if wait else _REMEDY, self._narrowed
        busy = GpusBusyError(self._count, len(got.free), self._reasons(got), narrowed, remedy)
        return ClaimTimeoutError(time.monotonic() - self._started, busy) if wait else busy

    def _report(self, got: _Snapshot, on_wait: Callable[[Waiting], object] | None) -> None:
        """Log the state of the wait, and call ``on_wait``, when it has changed."""
        if got.state == self._reported:
            return
        self._reported = got.state
        waiting = Waiting(
            position=len(got.ahead),
            waited=time.monotonic() - self._started,
            wanted=self._count,
            free=len(got.free),
            reasons=self._reasons(got),
        )
        from logging import getLogger  # only waiters need it

        with interruptible():
            place = f"{waiting.position} before us" if waiting.position else "next in line"
            reasons = "; ".join(waiting.reasons)
            gpus = counted(waiting.wanted, "GPU")
            getLogger("gpuaff").info("waiting for %s, %s: %s", gpus, place, reasons)
            if on_wait is not None:
                on_wait(waiting)

    def _reasons(self, got: _Snapshot) -> tuple[str, ...]:
        """A line for each candidate that is not free."""
        usages = (*got.usages, *self._described(got))  # these know the names
        reasons = {usage.device: usage.message for usage in usages if usage.busy is not None}
        if not got.usages:  # the registry alone knows the holders
            held = {key: entry for entry in got.entries if not entry.waits for key in entry.gpus}
            for device in self._devices:
                if (entry := held.get(self._key(device))) is not None:
                    holder = describe(entry.pid, entry, with_age=True)
                    reasons[device] = f"{device}: leased by {holder}"
        waiters = {entry.slot: describe(entry.pid, entry) for entry in got.kept.values()}
        for device, entry in got.kept.items():
            waits = f"who waits for {entry.wanted or 'some'} of them"
            reasons.setdefault(device, f"{device}: kept for {waiters[entry.slot]}, {waits}")
        return tuple(reasons[one] for one in self._devices if one in reasons)
