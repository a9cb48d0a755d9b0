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
from gpuaff.claims.candidates import Candidates, Request
from gpuaff.claims.devices.occupancy import EXITS, STEP, Settling
from gpuaff.claims.devices.probe import Probe, describe
from gpuaff.claims.devices.selection import choose
from gpuaff.claims.locking import queue, registry, safe_gpu
from gpuaff.claims.locking.directory import guarded
from gpuaff.claims.locking.leases import Lease
from gpuaff.claims.locking.queue import Place, who
from gpuaff.claims.locking.registry import PART_COUNT, PARTS, Entry, Slot, ending, stopped
from gpuaff.claims.model import Device, Usage, Waiting
from gpuaff.errors import ClaimError, ClaimTimeoutError, GpusBusyError, NotEnoughGpusError
from gpuaff.formatting import counted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuaff.launch.inherited import ParentClaim
    from gpuaff.notices import Notice
    from gpuaff.topology.model import Topology

# A process without a lease that comes in this time is found by the look after occupying.
_FRESH = 0.3
"""How old a look may be, in seconds, when the guard is locked: else the driver is asked again."""

_REMEDY = "to queue: wait=600 (at most so many seconds) or wait=None (no limit)"


class SubLease:
    """Devices of the parent claim that this process has locked, through its slot's open file."""

    # Bytes, not leases: the parent claim holds those, and a flock cannot be divided.
    fds = ()  # those of the slot

    def __init__(self, parent: ParentClaim, slot: Slot) -> None:
        first = PARTS + parent.slot * PART_COUNT
        self._slot, self._locked = slot, list[int]()
        self._bytes = {uuid: byte for byte, uuid in enumerate(parent.uuids, first)}

    def take(self, devices: Sequence[Device]) -> Device | None:
        """Lock all devices, or none; returns a device that another rank has locked."""
        for device in devices:
            byte = self._bytes[device.uuid]
            if not locks.try_range(self._slot.handle, byte):
                self.release()
                return device
            self._locked.append(byte)
        return None

    def release(self) -> None:
        """Unlock all, for children that share them, too."""
        if self._slot.is_ours:
            for byte in self._locked:
                locks.free_range(self._slot.handle, byte)
        self._locked.clear()

    def abandon(self) -> None:
        """In a forked child: leave them to the parent."""
        self._locked.clear()


class Obtained(NamedTuple):
    """Devices that this process has leased, in CUDA's order, and its slot in the registry."""

    devices: tuple[Device, ...]
    lease: Lease | SubLease
    slot: Slot


class _Snapshot(NamedTuple):
    """What an attempt has seen: all that it has got, where too few devices are free."""

    usages: tuple[Usage, ...]  # of the candidates; empty: the driver was not asked
    ahead: tuple[Entry, ...]  # the earlier waiters
    in_the_way: tuple[Entry, ...]  # those that must leave before there are enough to choose from
    kept: Mapping[Device, Entry]  # the candidates that ``ahead`` may choose: the first for each
    entries: tuple[Entry, ...]  # the registry's

    @property
    def state(self) -> object:
        """What counts for ``on_wait``: it is called when this changes."""
        holders = {(one.slot, one.pid, one.gpus) for one in self.entries if not one.waits}
        uses = [(one.device.uuid, one.busy, one.pids) for one in self.usages]
        return len(self.ahead), holders, uses

    def free(self, *, soon: bool = False) -> tuple[Device, ...]:
        """The devices that are free, or with ``soon`` about to be, and kept for no waiter."""
        free = (one.device for one in self.usages if one.busy is None or (soon and one.leaving))
        return tuple(device for device in free if device not in self.kept)

    def with_hidden_lease(self, device: Device) -> _Snapshot:
        """The same, with a lease that is not in the registry: it may be about to end."""
        why = "leased by a process that is not visible here"
        hidden = Usage.leased(device, why, exiting=False)._replace(leaving=True)
        usages = (hidden if one.device == device else one for one in self.usages)
        return self._replace(usages=tuple(usages))


class Attempts:
    """Tries to lease some of the candidates, until it succeeds or its time is up.

    The driver is asked about them by ``probe``, unless they are part of a parent claim.
    """

    def __init__(
        self,
        probe: Probe,
        request: Request,
        candidates: Candidates,
        parent: ParentClaim | None,
        topology: Topology | None,
        until_occupied: ExitStack,
    ) -> None:
        """Without a topology the first free ones are taken.

        ``until_occupied`` gets safe_gpu's lock when devices are leased.
        """
        self.probe, self._request, self._parent = probe, request, parent
        self._devices, self._count, self._narrowed = candidates
        self._topology, self._until_occupied = topology, until_occupied
        self.warnings: tuple[Notice, ...] = ()
        self._wants = self._usable = frozenset(map(self._key, self._devices))
        self._place: Place | None = None
        self._slot: Slot | None = None
        self._lease: Lease | SubLease | None = None
        self._started = time.monotonic()
        self._reported: object = None

    def obtain(self) -> Obtained:
        """Lease the devices, waiting in the queue if that was requested."""
        settling, wait = Settling(), self._request.wait
        while isinstance(result := self._attempt(), _Snapshot):
            self._refuse_if_hopeless(result)
            now = time.monotonic()
            leaving = len(result.free(soon=True)) >= self._count
            exiting = any(usage.exiting for usage in result.usages)
            settles = settling.goes_on(now, leaving=leaving, exiting=exiting)
            if settles and (self._place is None or settling.is_short(now)):
                with interruptible():
                    time.sleep(STEP)
                continue
            # A short wait is no less patient than none.
            limit = math.inf if wait is None else max(wait, EXITS if settles else 0)
            left = self._started + limit - now
            if self._place is None or left <= 0:
                raise self._not_free(result, wait)
            self._report(result)
            if result.in_the_way:
                self._place.wait_behind(result.in_the_way, left)
            else:
                holding = frozenset(entry.slot for entry in result.entries if not entry.waits)
                pids = frozenset(pid for usage in result.usages for pid in usage.pids)
                self._place.wait_for_gpus(holding, pids, left)
        return result

    def preview(self) -> tuple[Device, ...]:
        """The devices that :meth:`obtain` would lease now, without waiting. Nothing is locked."""
        self._look()
        entries = registry.entries()
        snapshot = self._snapshot(entries, self._usages(entries))
        self._refuse_if_hopeless(snapshot)
        free = snapshot.free()
        if len(free) < self._count:
            free = snapshot.free(soon=True)
        if len(free) < self._count:
            raise self._not_free(snapshot, 0)
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
            snapshot = self._snapshot(self._place.entries(), ())
            if snapshot.in_the_way:
                return snapshot
        with ExitStack() as locked:
            if self._parent is None:  # inside a claim, safe_gpu's users never choose
                wait = self._request.wait
                limit = None if wait is None else max(safe_gpu.LIMIT, wait)
                self.warnings = locked.enter_context(safe_gpu.holding(self._count, limit=limit))
            while True:
                # Before the guard, so that many claimers start their driver at the same time.
                self._look()
                looked = time.monotonic()
                with guarded():
                    if time.monotonic() - looked > _FRESH:
                        continue
                    result = self._choose_and_lease()
                    if isinstance(result, Obtained):
                        self._until_occupied.push(locked.pop_all())
                    elif self._request.wait != 0 and self._place is None:
                        self._join(result.usages)
                    return result

    def _choose_and_lease(self) -> Obtained | _Snapshot:
        entries = registry.entries() if self._place is None else self._place.entries()
        snapshot = self._snapshot(entries, self._usages(entries))
        while len(free := snapshot.free()) >= self._count:
            result = self._lease_all(self._choose(free))
            if isinstance(result, Obtained):
                return result
            snapshot = snapshot.with_hidden_lease(result)
        return snapshot

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
        gpus = [self._key(device) for device in chosen]
        slot.write({**registry.about_me(), "gpus": gpus})
        slot.hold_begins()
        return Obtained(chosen, self._lease, slot)

    def _join(self, usages: Sequence[Usage]) -> None:
        """Join the queue, for the devices that this process can ever use."""
        if self._slot is not None:  # of an attempt that failed: the place has its own
            self._slot.release()
            self._slot = None
        usable = frozenset(self._key(usage.device) for usage in usages if not usage.lasting)
        self._usable = usable or self._wants
        self._place = queue.join(registry.about_me(), wanted=self._count, gpus=self._usable)

    def _snapshot(self, entries: tuple[Entry, ...], usages: tuple[Usage, ...]) -> _Snapshot:
        ahead = queue.ahead(entries, wants=self._wants, now=kernel.uptime())
        while True:
            way = queue.in_the_way(ahead, wants=self._usable, count=self._count)
            # Of those in the way the near ones decide; with none, all may keep GPUs. To look up
            # 200 in /proc takes 16 ms.
            passed = stopped(way[: queue.NEAR] or ahead)
            if not passed:
                break
            ahead = tuple(entry for entry in ahead if entry.slot not in passed)
        kept = {device: queue.kept_for(ahead, self._key(device)) for device in self._devices}
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
            return self.probe.usages(entries)
        return _usages_inside(self._parent, self._devices, entries)

    def _described(self, snapshot: _Snapshot) -> tuple[Usage, ...]:
        """The last usages, with the names of processes in their messages."""
        is_known = self._parent is not None or not snapshot.usages
        return snapshot.usages if is_known else self.probe.usages(snapshot.entries, named=True)

    # What is said of devices that are not free.

    def _refuse_if_hopeless(self, snapshot: _Snapshot) -> None:
        usable = sum(not usage.lasting for usage in snapshot.usages)
        if len(snapshot.usages) > usable and usable < self._count:
            never = [usage.message for usage in self._described(snapshot) if usage.lasting]
            reason = "\n  ".join([f"{usable or 'none'} can be used", *never])
            raise NotEnoughGpusError(self._count, usable, reason)

    def _not_free(self, snapshot: _Snapshot, wait: float | None) -> Exception:
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
            if self._request.on_wait is not None:
                self._request.on_wait(waiting)

    def _reasons(self, snapshot: _Snapshot) -> tuple[str, ...]:
        """A line for each candidate that is not free."""
        usages = (*snapshot.usages, *self._described(snapshot))  # these know the names
        reasons = {usage.device: usage.message for usage in usages if usage.busy is not None}
        if not snapshot.usages:  # the registry alone knows the holders
            for entry in snapshot.entries:
                keys = () if entry.waits else entry.gpus
                for device in (one for one in self._devices if self._key(one) in keys):
                    holder = describe(entry.pid, entry, with_age=True)
                    reasons[device] = f"{device}: leased by {holder}"
        waiters = {entry.slot: describe(entry.pid, entry) for entry in snapshot.kept.values()}
        for device, entry in snapshot.kept.items():
            waits = f"who waits for {entry.wanted or 'some'} of them"
            reasons.setdefault(device, f"{device}: kept for {waiters[entry.slot]}, {waits}")
        return tuple(reasons[one] for one in self._devices if one in reasons)


def _usages_inside(
    parent: ParentClaim, devices: Sequence[Device], entries: Sequence[Entry]
) -> tuple[Usage, ...]:
    """How devices of the parent claim are used by claims inside it, at any depth."""
    held = {entry.slot: entry for entry in entries if not entry.waits}
    if parent.slot not in held:
        raise ClaimError(
            "the claim in which this process runs has ended, and its GPUs may belong to another "
            "claim by now"
        )
    slot: int | None = parent.slot
    while slot is not None and slot in held:  # the parent claim, and those around it
        slot = held.pop(slot).inside
    holders = {uuid: who(entry) for entry in held.values() for uuid in entry.devices}
    exiting = ending(held.values())

    def usage(device: Device) -> Usage:
        if device.uuid not in holders:
            return Usage(device=device)
        why = f"claimed inside this claim by {holders[device.uuid]}"
        return Usage.leased(device, why, exiting=device.uuid in exiting)

    return tuple(map(usage, devices))
