"""From candidates to leased devices: look, choose and lease; wait in the queue.

Inside a claim its GPUs are shared among its ranks. The driver is not asked about them. Each is a
byte in the registry's file, in the order of the parent claim's GPUs, and the rank that has locked
it holds the GPU.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from gpuaff._system import kernel, locks
from gpuaff._system.interrupts import interruptible
from gpuaff.claims.candidates import Request, Supply, find_candidates
from gpuaff.claims.devices.occupancy import EXITS, STEP, Settling
from gpuaff.claims.devices.probe import Probe, describe, describe_lease
from gpuaff.claims.devices.selection import choose, observe_connections
from gpuaff.claims.locking import queue, registry, safe_gpu
from gpuaff.claims.locking.directory import guarded
from gpuaff.claims.locking.leases import Lease
from gpuaff.claims.locking.queue import Place, who
from gpuaff.claims.locking.registry import PART_COUNT, PARTS, Entry, Slot, ending, stopped
from gpuaff.claims.model import Demand, Device, DeviceReading, Usage, Waiting
from gpuaff.errors import ClaimError, ClaimTimeoutError, GpusBusyError, NotEnoughGpusError
from gpuaff.formatting import counted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuaff._system.nvml import Session
    from gpuaff.launch.inherited import ParentClaim
    from gpuaff.notices import Notice

# In seconds: a look may be this old when the guard is locked. A process without a lease that comes
# in this time is found by the look after occupying.
_FRESH = 0.3

_REMEDY = "to queue: wait=600 (at most so many seconds) or wait=None (no limit)"


# Bytes, not flocks: the parent claim holds those, and one cannot be divided.
class SubLease(Lease):
    """Devices of the parent claim that this process has locked, through its slot's open file."""

    def __init__(self, parent: ParentClaim, slot: Slot) -> None:
        super().__init__()
        self._uuids, self._slot = parent.uuids, slot
        self._first = PARTS + parent.slot * PART_COUNT

    def take(self, devices: Sequence[Device]) -> Device | None:
        """Lock all devices, or none; returns a device that another rank has locked."""
        for device in devices:
            if not locks.try_range(self._slot.handle, self._first + self._uuids.index(device.uuid)):
                self.release()
                return device
        return None

    def release(self) -> None:
        """Unlock all, for children that share them, too."""
        if self._slot.is_ours:
            locks.free_range(self._slot.handle, self._first, length=PART_COUNT)


class InnerProbe(Probe):
    """Finds out how devices of the parent claim are used: by claims inside it, at any depth."""

    def __init__(self, session: Session, devices: Sequence[Device], parent: ParentClaim) -> None:
        super().__init__(session, devices)
        self._parent = parent

    def look(self) -> tuple[DeviceReading, ...]:
        """Ask nothing."""
        return ()

    def usages(self, entries: Sequence[Entry], *, named: bool = False) -> tuple[Usage, ...]:  # noqa: ARG002 - it has all names
        """How the devices are used, by the registry."""
        held = {entry.slot: entry for entry in entries if not entry.waits}
        if self._parent.slot not in held:
            raise ClaimError(
                "the claim in which this process runs has ended, and its GPUs may belong to "
                "another claim by now"
            )
        slot: int | None = self._parent.slot
        while slot is not None and slot in held:  # the parent claim, and those around it
            slot = held.pop(slot).inside
        holders = {uuid: who(entry) for entry in held.values() for uuid in entry.devices}
        exiting, inside = ending(held.values()), "claimed inside this claim by"
        return tuple(
            Usage.leased(one, f"{inside} {holders[one.uuid]}", exiting=one.uuid in exiting)
            if one.uuid in holders
            else Usage(one)
            for one in self._devices
        )


class _Snapshot(NamedTuple):
    """What an attempt saw; it is returned where too few devices are free."""

    usages: tuple[Usage, ...]  # of the candidates; empty behind other waiters, without a look
    ahead: tuple[Entry, ...]  # the earlier waiters
    in_the_way: tuple[Entry, ...]  # those that must leave before there are enough to choose from
    kept: Mapping[Device, Entry]  # the candidates that ``ahead`` may choose: the first for each
    entries: tuple[Entry, ...]  # the registry's

    @property
    def state(self) -> object:
        """What counts for ``on_wait``: it is called when this changes."""
        holders = {(one.slot, one.pid, one.gpus) for one in self.entries if not one.waits}
        # Behind others the driver is asked once only, before joining the queue.
        usages = () if self.in_the_way else self.usages
        return len(self.ahead), holders, [(one.device.uuid, one.busy, one.pids) for one in usages]

    def free(self, *, soon: bool = False) -> tuple[Device, ...]:
        """The devices that are free, or with ``soon`` about to be, and kept for no waiter."""
        free = (one.device for one in self.usages if one.busy is None or (soon and one.leaving))
        return tuple(device for device in free if device not in self.kept)


class Attempts:
    """Tries to lease some of the candidates, until it succeeds or its time is up."""

    def __init__(self, session: Session, request: Request, supply: Supply) -> None:
        """Find the candidates, and how they are connected, where that decides."""
        self.session, self.request, self.supply = session, request, supply
        self._devices, self._count, self._narrowed = find_candidates(request, supply)
        self._parent = supply.parent
        self.probe: Probe
        if supply.parent is not None:
            self.probe = InnerProbe(session, self._devices, supply.parent)
        else:
            demand = Demand(request.min_free_memory, request.max_utilization)
            own = request.own_is_free
            self.probe = Probe(session, self._devices, demand=demand, own_is_free=own)
        is_open = request.gpus is None and self._count < len(self._devices)
        are_whole = not any(device.is_mig for device in self._devices)
        self._topology = observe_connections(session) if is_open and are_whole else None
        self.warnings: tuple[Notice, ...] = ()
        self.until_occupied = ExitStack()  # safe_gpu's lock, once devices are leased
        self._wants = self._usable = frozenset(map(self._key, self._devices))
        self.place: Place
        self.lease = Lease()
        self._started = time.monotonic()
        self._patience = math.inf if request.wait is None else request.wait
        self._reported: object = None

    def obtain(self, undo: ExitStack) -> tuple[Device, ...]:
        """Lease devices, waiting in the queue if that was requested. They are in CUDA's order."""
        self.place = Place()
        undo.callback(self._release)
        settling = Settling()
        while isinstance(result := self._attempt(), _Snapshot):
            self._refuse_if_hopeless(result)
            now = time.monotonic()
            leaving = len(result.free(soon=True)) >= self._count
            exiting = any(usage.exiting for usage in result.usages)
            settles = settling.goes_on(now, leaving=leaving, exiting=exiting)
            if settles and (not self.place.is_queued or settling.is_short(now)):
                with interruptible():
                    time.sleep(STEP)
                continue
            # A short wait is no less patient than none.
            left = self._started + max(self._patience, EXITS if settles else 0) - now
            if left <= 0 or not self.place.is_queued:
                raise self._not_free(result, self._patience)
            self._report(result)
            if result.in_the_way:
                self.place.wait_behind(result.in_the_way, left)
            else:
                holding = frozenset(entry.slot for entry in result.entries if not entry.waits)
                pids = frozenset(pid for usage in result.usages for pid in usage.pids)
                self.place.wait_for_gpus(holding, pids, left)
        return result

    def preview(self) -> tuple[Device, ...]:
        """The devices that :meth:`obtain` would lease now, without waiting. Nothing is locked."""
        self.probe.look()
        entries = registry.entries()
        snapshot = self._snapshot(entries, self.probe.usages(entries))
        self._refuse_if_hopeless(snapshot)
        for free in (snapshot.free(), snapshot.free(soon=True)):
            if len(free) >= self._count:
                return self._choose(free)
        raise self._not_free(snapshot, 0)

    def _release(self) -> None:
        with self.until_occupied:
            self.place.slot.withdraw()  # first: who gets the lease finds no entry for it
            self.lease.release()
            self.place.slot.release()

    def _attempt(self) -> tuple[Device, ...] | _Snapshot:
        if self.place.is_queued:
            snapshot = self._snapshot(self.place.entries(), ())
            if snapshot.in_the_way:
                return snapshot
        with ExitStack() as locked:
            if self._parent is None:  # inside a claim, safe_gpu's users never choose
                limit = max(safe_gpu.LIMIT, self._patience)
                self.warnings = locked.enter_context(safe_gpu.holding(self._count, limit=limit))
            while True:
                # Before the guard, so that many claimers start their driver at the same time.
                self.probe.look()
                looked = time.monotonic()
                with guarded():
                    if time.monotonic() - looked > _FRESH:
                        continue
                    result = self._choose_and_lease()
                    if not isinstance(result, _Snapshot):
                        self.until_occupied = locked.pop_all()
                    elif self._patience and not self.place.is_queued:
                        self._join(result)
                    return result

    def _choose_and_lease(self) -> tuple[Device, ...] | _Snapshot:
        self.place.renew()  # the claims inside this one look for its slot in the current file
        entries, slot = self.place.entries(), self.place.slot
        snapshot = self._snapshot(entries, self.probe.usages(entries))
        if self._parent is not None:
            self.lease = SubLease(self._parent, slot)
        while len(free := snapshot.free()) >= self._count:
            chosen = self._choose(free)
            leased = self.lease.take(chosen)
            if leased is None:
                slot.write({**registry.about_me(), "gpus": [*map(self._key, chosen)]})
                slot.hold_begins()
                return chosen
            # Its lease is not in the registry: it may be about to end.
            why = "leased by a process that is not visible here"
            hidden = Usage.leased(leased, why, exiting=False)._replace(leaving=True)
            usages = (hidden if one.device == leased else one for one in snapshot.usages)
            snapshot = snapshot._replace(usages=tuple(usages))
        return snapshot

    def _choose(self, free: Sequence[Device]) -> tuple[Device, ...]:
        if self._topology is None:
            return tuple(free[: self._count])
        indices = [device.index for device in free]
        chosen = choose(self._count, indices, topology=self._topology, idle=self.probe.idle)
        return tuple(device for device in free if device.index in chosen)

    def _join(self, snapshot: _Snapshot) -> None:
        """Join the queue, for the devices that this process can ever use."""
        usable = (self._key(usage.device) for usage in snapshot.usages if not usage.lasting)
        self._usable = frozenset(usable) or self._wants
        self.place.join(snapshot.entries, wanted=self._count, gpus=self._usable)

    def _snapshot(self, entries: tuple[Entry, ...], usages: tuple[Usage, ...]) -> _Snapshot:
        ahead = queue.ahead(entries, wants=self._wants, now=kernel.uptime())
        while True:
            way = queue.in_the_way(ahead, wants=self._usable, count=self._count)
            # Look up only the nearest in the way; if there is none, any may keep GPUs. To look up
            # 200 in /proc takes 16 ms.
            passed = stopped(way[: queue.NEAR] or ahead)
            if not passed:
                break
            ahead = tuple(entry for entry in ahead if entry.slot not in passed)
        kept = {device: queue.kept_for(ahead, self._key(device)) for device in self._devices}
        keepers = {device: entry for device, entry in kept.items() if entry is not None}
        return _Snapshot(usages, ahead, way, keepers, entries)

    def _key(self, device: Device) -> str:
        """The registry's name of a device."""
        return device.uuid if self._parent is None else f"{self._parent.slot}/{device.uuid}"

    def _refuse_if_hopeless(self, snapshot: _Snapshot) -> None:
        usable = sum(not usage.lasting for usage in snapshot.usages)
        if len(snapshot.usages) > usable and usable < self._count:
            described = self.probe.usages(snapshot.entries, named=True)
            never = [usage.message for usage in described if usage.lasting]
            reason = "\n  ".join([f"{usable or 'none'} can be used", *never])
            raise NotEnoughGpusError(self._count, usable, reason)

    def _not_free(self, snapshot: _Snapshot, wait: float) -> Exception:
        free, reasons = len(snapshot.free()), self._reasons(snapshot)
        busy = GpusBusyError(self._count, free, reasons, self._narrowed, "" if wait else _REMEDY)
        return ClaimTimeoutError(time.monotonic() - self._started, busy) if wait else busy

    def _report(self, snapshot: _Snapshot) -> None:
        """Log the state of the wait, and call ``on_wait``, when it has changed."""
        if snapshot.state == self._reported:
            return
        self._reported = snapshot.state
        waiting = Waiting(
            position=len(snapshot.ahead),
            waited=time.monotonic() - self._started,
            wanted=self._count,
            free=len(snapshot.free()),
            reasons=self._reasons(snapshot),
        )
        from logging import getLogger  # only waiters need it

        with interruptible():
            place = f"{waiting.position} before us" if waiting.position else "next in line"
            reasons = "; ".join(waiting.reasons)
            gpus = counted(waiting.wanted, "GPU")
            getLogger("gpuaff").info("waiting for %s, %s: %s", gpus, place, reasons)
            if self.request.on_wait is not None:
                self.request.on_wait(waiting)

    def _reasons(self, snapshot: _Snapshot) -> tuple[str, ...]:
        """A line for each candidate that is not free."""
        reasons = dict[Device, str]()
        if snapshot.usages:
            described = self.probe.usages(snapshot.entries, named=True)
            busy = (one for one in (*snapshot.usages, *described) if one.busy is not None)
            reasons = {usage.device: usage.message for usage in busy}
        else:  # the registry alone knows the holders
            for entry in snapshot.entries:
                keys = () if entry.waits else entry.gpus
                for device in (one for one in self._devices if self._key(one) in keys):
                    reasons[device] = f"{device}: leased by {describe_lease(entry.pid, entry)}"
        waiters = {entry.slot: describe(entry.pid, entry) for entry in snapshot.kept.values()}
        for device, entry in snapshot.kept.items():
            waits = f"who waits for {entry.wanted or 'some'} of them"
            reasons.setdefault(device, f"{device}: kept for {waiters[entry.slot]}, {waits}")
        return tuple(reasons[one] for one in self._devices if one in reasons)
