"""Has a stranger come onto a GPU between the look and the claim?

A stranger is a process that is listed now, was not before, and is not ours. Where the driver does
not list all processes, memory in use reveals one; and one that looked before we were visible may
come only a moment after us, so there we look once more.
"""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum

from gpuaff._system import cuda, descriptors, kernel, locks
from gpuaff._system.interrupts import interruptible
from gpuaff.claims.attempts import STEP, Settling
from gpuaff.claims.devices.occupancy import (
    EXCLUSIVE,
    UNEXPLAINED,
    People,
    memory_of_listed,
    same_memory,
)
from gpuaff.claims.devices.probe import Probe, process_info
from gpuaff.claims.locking import directory
from gpuaff.claims.model import Device, DeviceReading
from gpuaff.claims.placeholder import Kind, Occupied, Placeholder
from gpuaff.errors import ClaimLostError, PlaceholderError
from gpuaff.formatting import size

# Whether memory in use reveals a process that the driver does not list (case E15). Pure.
#
# Inside a container the lists may be empty, hold the host's numbers, or lack the processes outside:
# in a PID namespace of its own a process got only the processes there, by their numbers there, and
# all the memory in use (driver 580.159.04, H200). So outside of the first PID namespace, and
# wherever a process does not find itself in the lists, memory that no listed process has reveals
# strangers.


CONTEXT = 524 << 20
"""Bytes by which a context increases the memory in use: the most that was measured on an H100 and
an H200. It is less on smaller GPUs."""


class View(Enum):
    """Which processes the driver lists on a device that we have occupied."""

    ALL = "all"
    """All."""
    OURS = "ours"
    """Ours, with its memory, and perhaps no others: what no listed process has is not ours."""
    NONE = "none"
    """Not even ours, or not its memory: what no listed process has may be ours."""


def view(reading: DeviceReading, new: Collection[int], people: People) -> View:
    """Which processes the driver lists on a device.

    Args:
        reading: what it reports of the device, now that we are there.
        new: the processes that are listed and were not before we came.
        people: what is known of listed processes.
    """
    listed = reading.compute or {}
    if people.me in listed and people.first_namespace:
        return View.ALL
    if people.first_namespace or None in listed.values():
        return View.NONE
    return View.OURS if people.me in listed or len(new) == 1 else View.NONE


def unlisted(
    readings: Sequence[DeviceReading], devices: Collection[Device]
) -> Mapping[Device, int]:
    """The bytes in use on each device that no listed process has.

    Devices are missing on which they would prove nothing: where the memory in use is unknown, where
    a display is active (the lists show only part of its memory), where the compute mode allows one
    process, as a stranger and we cannot both be there, and where another part of the same GPU
    instance (MIG) uses the memory too: a rightful neighbour may not be listed either.

    Args:
        readings: what the driver reports of all devices of the machine.
        devices: the ones to check.
    """
    return {
        one.device: one.used - memory_of_listed(readings, one.device)[0]
        for one in readings
        if one.device in devices and one.used is not None
        if not (one.display or one.compute_mode in EXCLUSIVE)
        if not any(
            other.device != one.device and same_memory(other.device, one.device)
            for other in readings
        )
    }


def too_much(grown: Mapping[Device, int], readings: Sequence[DeviceReading]) -> bool:
    """Whether memory has grown by more than one context of ours explains, on any device.

    Contexts of a process are alike on GPUs that are alike, so the smallest growth is that of one
    context, unless strangers have come onto all of them. This may be wrong for a GPU that is larger
    than any that was measured, so the caller verifies it.

    Args:
        grown: by how many bytes, on each device that we have a context on.
        readings: what the driver reports of them.
    """
    kinds = {one.device: (one.device.name, one.total) for one in readings}
    alike = [[grown[one] for one in grown if kinds[one] == kind] for kind in {*kinds.values()}]
    return any(max(grew) > UNEXPLAINED + min(CONTEXT, *grew) for grew in alike if grew)


_SETTLES = 0.5
"""How long a stranger must stay, in seconds. The driver lists ended processes for another 0.10 to
0.15 s, and another claimer may have had the GPU, and ended, since our first look. An exiting one
gets longer."""

_COMES = 0.35
"""How long it takes to start CUDA and make a context, in seconds, where one GPU is visible (H100,
H200): a process that saw a free GPU just before our context was made is there by then. With more
GPUs, or after importing a framework, it takes longer; we do not wait for that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stranger:
    """A stranger on a claimed device.

    Attributes:
        device: which one.
        pids: in the driver's numbers; empty where only memory reveals it.
        bytes: how many no listed process has, beyond the explained ones.
        leaving: whether all of them are exiting, or have ended.
        exiting: whether some of these are exiting.
    """

    device: Device
    pids: frozenset[int] = frozenset()
    bytes: int = 0
    leaving: bool = False
    exiting: bool = False

    def __str__(self) -> str:
        if self.pids:
            return ", ".join(f"pid {pid}" for pid in sorted(self.pids))
        return f"{size(self.bytes)} have come into use that no process which is listed here has"


class Strangers:
    """Looks for strangers on the devices that are about to be claimed."""

    def __init__(self, probe: Probe, devices: Collection[Device]) -> None:
        """Remember the last look.

        Args:
            probe: has looked when they were leased, and looks again.
            devices: the claimed ones.
        """
        self._probe, self._devices = probe, devices
        self._before = {one.device.uuid: one for one in probe.readings}
        self._rests = unlisted(probe.readings, devices)
        self._taken: Mapping[Device, int] = {}
        self._are_there = False

    def refuse_early(self) -> None:
        """Look once more before we occupy, where strangers may not be listed afterwards.

        Then memory cannot distinguish them from us; and CUDA is mostly not started yet, so that
        this process can claim again.

        Raises:
            ClaimLostError: there is a stranger, and it stays.
            PlaceholderError: a device was lost meanwhile.
        """
        before = [one for one in self._before.values() if one.device in self._devices]
        first = process_info(self._probe.readings).first_namespace
        if first and all(one.compute is not None for one in before):
            return
        self._taken = self._rests
        self._rests = unlisted(self._steady(), self._devices)

    def refuse(self, kind: Kind, occupied: Occupied, ordinals: Sequence[int]) -> None:
        """Check that we are alone on the devices.

        Where not even we are listed, memory has grown by our contexts, and perhaps by a stranger's.
        If it is more than ours explain, we release them for a moment: what stays is not ours. (They
        are gone at once, and come back as large as they were: driver 580.159.04, H200.) How much a
        framework or a function allocates is unknown.

        Args:
            kind: what occupies them.
            occupied: their placeholders.
            ordinals: CUDA's numbers of them.

        Raises:
            ClaimLostError: there is a stranger, and it stays.
            PlaceholderError: a device was lost meanwhile, or could not be occupied again.
        """
        self._are_there, self._taken = True, {}
        readings = self._steady()
        rests = unlisted(readings, self._devices)
        views = self._views(readings)
        blind = {device for device in rests if views[device] is View.NONE}
        if kind is Placeholder.CONTEXT:
            known = blind & self._rests.keys()
            grown = {device: rests[device] - self._rests[device] for device in known}
            if too_much(grown, readings):
                self._make_sure(occupied, ordinals)
        # Our placeholders have allocated all by now; what a function started may still allocate.
        self._taken = rests if isinstance(kind, Placeholder) else {}
        if any(views[one] is View.OURS for one in rests) or blind & self._taken.keys():
            with interruptible():
                time.sleep(_COMES)
            self._steady()

    def _make_sure(self, occupied: Occupied, ordinals: Sequence[int]) -> None:
        occupied.release()
        self._are_there, self._taken = False, self._rests
        self._steady()
        occupied.take(ordinals)
        self._are_there = True

    def _steady(self) -> Sequence[DeviceReading]:
        """What the driver reports when there is no stranger, or no longer one."""
        settling = Settling(_SETTLES)
        while True:
            readings = self._probe.look()
            found = self._found(readings)
            if not found:
                return readings
            exiting = all(one.leaving for one in found) and any(one.exiting for one in found)
            if not settling.goes_on(time.monotonic(), leaving=True, exiting=exiting):
                raise _lost(found)
            with interruptible():
                time.sleep(STEP)

    def _found(self, readings: Sequence[DeviceReading]) -> list[_Stranger]:
        """The strangers on the claimed devices, which were not there before."""
        people = process_info(readings)
        rests = unlisted(readings, self._devices)
        found = []
        for reading in readings:
            device = reading.device
            if device not in self._devices:
                continue
            if reading.lost:
                why = "; ".join(reading.problems) or "the driver has lost it"
                raise PlaceholderError(
                    f"{device} was lost while it was claimed: {why}", gpus=(device.uuid,)
                )
            new = self._new(reading)
            limit = self._limit(device, view(reading, new, people))
            more = rests[device] - limit if limit is not None and device in rests else 0
            if pids := self._strangers(new, people):
                leaving, exiting = pids <= people.leaving, not pids.isdisjoint(people.exiting)
                found.append(_Stranger(device=device, pids=pids, leaving=leaving, exiting=exiting))
            elif more > UNEXPLAINED:
                found.append(_Stranger(device=device, bytes=more))
        return found

    def _new(self, reading: DeviceReading) -> frozenset[int]:
        known = self._before[reading.device.uuid].compute or {}
        return frozenset(reading.compute or ()) - {*known} - {*(reading.graphics or ())}

    def _strangers(self, new: frozenset[int], people: People) -> frozenset[int]:
        """The strangers among them. Without valid numbers one of the new ones is ours."""
        if people.me is not None and people.first_namespace:
            return new - {*people.own, people.me}
        return new if len(new) > self._are_there else frozenset()

    def _limit(self, device: Device, seen: View) -> int | None:
        """How many bytes may be in use that no listed process has; None is any number."""
        if not self._are_there or seen is View.NONE:
            return self._taken.get(device)
        return self._rests.get(device) if seen is View.OURS else None

    def _views(self, readings: Sequence[DeviceReading]) -> dict[Device, View]:
        people = process_info(readings)
        return {one.device: view(one, self._new(one), people) for one in readings}


def _lost(found: Sequence[_Stranger]) -> ClaimLostError:
    started = cuda.is_initialized() is True
    undone = (
        "all was undone. CUDA has settled which GPUs this process sees: start it again"
        if started
        else "all was undone, and CUDA was not started: claim again"
    )
    return ClaimLostError(
        f"{found[0].device} was free and is leased, but a process that does not ask for "
        f"leases has come onto it meanwhile ({found[0]}); {undone}, and let others claim as well",
        gpus=tuple(one.device.uuid for one in found),
        pids=tuple(sorted({pid for one in found for pid in one.pids})),
        cuda_started=started,
    )


# After a lost claim, the next one of this user waits a random moment first.
#
# Two jobs that come onto a GPU at the same time and both give up, because one of them takes no
# lease or the other cannot see it, would otherwise collide again at every new start.


_FRESH = 60.0
"""How long a loss is remembered, in seconds."""

_LONGEST = 2.0
"""The longest pause, in seconds."""

_TIME = struct.Struct("<d")


def _name() -> str:
    return f"lost-{kernel.user_id()}"


def remember() -> None:
    """Record that a claim was lost just now; no failure here hides that error."""
    with suppress(OSError), _opened() as handle:
        locks.write_at(handle, 0, _TIME.pack(kernel.uptime()))


def stand_back() -> None:
    """Wait a random moment if this user has lost a claim lately.

    This never prevents a claim: where another user has put something in the file's place, or keeps
    it from being opened, no loss is assumed.
    """
    with suppress(OSError):
        if not directory.has(_name()):
            return
        with _opened() as handle:
            data = locks.read_at(handle, 0, _TIME.size)
            then = _TIME.unpack(data)[0] if len(data) == _TIME.size else 0.0
            if not (then and 0 <= kernel.uptime() - then < _FRESH):
                return
            locks.write_at(handle, 0, _TIME.pack(0.0))
        with interruptible():
            time.sleep(random.uniform(0, _LONGEST))  # noqa: S311 - no secret


@contextmanager
def _opened() -> Iterator[int]:
    """Open this user's file, which is made if it is missing.

    Raises:
        OSError: it cannot be used, or another user owns it.
    """
    handle = directory.open_file(_name(), size=_TIME.size)
    try:
        if descriptors.owner_of(handle) != kernel.user_id():
            raise PermissionError(_name())
        yield handle
    finally:
        descriptors.close(handle)
