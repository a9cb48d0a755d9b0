"""Has a process that takes no lease started on a GPU between the look and the claim?

Such a process is listed now, was not before, and is not ours. In a container the driver may not
list it: there, memory reveals it that has come into use since and that no listed process has, as
long as that cannot be ours (case E15): before we are on the GPU, and afterwards where the driver
lists us with our memory, as it does for a PID namespace's own processes (580.159.04, H200).
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from gpuaff._system import cuda, descriptors, kernel, locks
from gpuaff._system.interrupts import interruptible
from gpuaff.claims.devices.occupancy import (
    EXCLUSIVE,
    STEP,
    UNEXPLAINED,
    ListedProcesses,
    Settling,
    memory_of_listed,
    same_memory,
)
from gpuaff.claims.devices.probe import Probe, process_info
from gpuaff.claims.locking import directory
from gpuaff.claims.model import Device, DeviceReading, Usage
from gpuaff.errors import ClaimLostError, PlaceholderError
from gpuaff.formatting import size

# In seconds: so long must a process stay. The driver lists ended processes for another 0.10 to
# 0.15 s, and another claimer may have had the GPU, and ended, since our first look. An exiting one
# gets longer.
_SETTLES = 0.5
# So long does it take to start CUDA and make a context where one GPU is visible (H100, H200): a
# process that saw a free GPU just before our context was made is there by then. With more GPUs, or
# after importing a framework, it takes longer; we do not wait for that.
_COMES = 0.35


def unlisted(
    readings: Sequence[DeviceReading], devices: Collection[Device]
) -> Mapping[Device, int]:
    """The bytes in use on each of some devices that no listed process has.

    Devices are missing on which they would prove nothing: where the memory in use is unknown, where
    a display is active (the lists show only part of its memory), where the compute mode allows one
    process, as another and we cannot both be there, and where another part of the same GPU
    instance (MIG) uses the memory too: a rightful neighbour may not be listed either.
    """
    return {
        one.device: one.used - memory_of_listed(readings, one.device)[0]
        for one in readings
        if one.device in devices and one.used is not None
        if not (one.display or one.compute_mode in EXCLUSIVE)
        if sum(same_memory(other.device, one.device) for other in readings) == 1
    }


def shows_our_memory(
    reading: DeviceReading, new: Collection[int], processes: ListedProcesses
) -> bool:
    """Whether we are listed, with our memory, so that what no listed process has is not ours.

    ``new`` are the processes that are listed and were not before we came.
    """
    compute = reading.compute or {}
    is_listed = processes.me in compute or len(new) == 1
    return is_listed and not processes.first_namespace and None not in compute.values()


class SecondLook:
    """Looks again at the devices that are about to be claimed.

    Each look raises ClaimLostError where another process is there, and stays, and PlaceholderError
    where a device was lost meanwhile.
    """

    def __init__(self, probe: Probe, devices: Collection[Device]) -> None:
        """Remember what was there at the last look, when they were leased."""
        self._probe, self._devices = probe, devices
        self._before = {one.device: one for one in probe.readings if one.device in devices}
        self._unlisted = unlisted(probe.readings, devices)

    def before_occupying(self) -> None:
        """Look where another process may not be listed; CUDA is mostly not started yet."""
        is_complete = all(one.compute is not None for one in self._before.values())
        if not (is_complete and process_info(self._probe.readings).first_namespace):
            self._refuse_others(we_are_there=False)

    def after_occupying(self) -> None:
        """Look whether we are alone there; once more where memory alone reveals others."""
        readings = self._refuse_others(we_are_there=True)
        processes = process_info(readings)
        ours = (one for one in readings if one.device in self._unlisted)
        if any(shows_our_memory(one, self._new(one), processes) for one in ours):
            with interruptible():
                time.sleep(_COMES)
            self._refuse_others(we_are_there=True)

    def _refuse_others(self, *, we_are_there: bool) -> Sequence[DeviceReading]:
        settling = Settling(_SETTLES)
        while True:
            readings = self._probe.look()
            found = list(self._others(readings, we_are_there))
            if not found:
                return readings
            exiting = all(one.leaving for one in found) and any(one.exiting for one in found)
            if not settling.goes_on(time.monotonic(), leaving=True, exiting=exiting):
                raise _lost(found)
            with interruptible():
                time.sleep(STEP)

    def _others(self, readings: Sequence[DeviceReading], we_are_there: bool) -> Iterator[Usage]:
        """The use of the devices by processes that were not there before."""
        processes, now = process_info(readings), unlisted(readings, self._devices)
        for reading in readings:
            device = reading.device
            if device not in self._devices:
                continue
            if reading.lost:
                why = "; ".join(reading.problems) or "the driver has lost it"
                problem = f"{device} was lost while it was claimed: {why}"
                raise PlaceholderError(problem, gpus=(device.uuid,))
            new = self._new(reading)
            others = new - {*processes.own, processes.me}
            if processes.me is None or not processes.first_namespace:
                others = new if len(new) > we_are_there else frozenset()  # one of them is ours
            more = now.get(device, 0) - self._unlisted.get(device, now.get(device, 0))
            if others:
                yield Usage(
                    device=device,
                    pids=tuple(sorted(others)),
                    message=", ".join(f"pid {pid}" for pid in sorted(others)),
                    leaving=others <= processes.leaving,
                    exiting=not others.isdisjoint(processes.exiting),
                )
            elif more > UNEXPLAINED and (
                not we_are_there or shows_our_memory(reading, new, processes)
            ):
                message = f"{size(more)} more are in use, by no process that is listed here"
                yield Usage(device=device, message=message)

    def _new(self, reading: DeviceReading) -> frozenset[int]:
        known = self._before[reading.device].compute or {}
        return frozenset(reading.compute or ()) - {*known} - {*(reading.graphics or ())}


def _lost(found: Sequence[Usage]) -> ClaimLostError:
    started = cuda.is_initialized() is True
    undone = (
        "all was undone. CUDA has settled which GPUs this process sees: start it again"
        if started
        else "all was undone, and CUDA was not started: claim again"
    )
    return ClaimLostError(
        f"{found[0].device} was free and is leased, but a process that takes no lease has started "
        f"on it meanwhile ({found[0].message}); {undone}, and let that program claim, too",
        gpus=tuple(one.device.uuid for one in found),
        pids=tuple(sorted({pid for one in found for pid in one.pids})),
        cuda_started=started,
    )


# After a lost claim, the next one of this user waits a random moment first. Two jobs that come
# onto a GPU at the same time and both give up, because one of them takes no lease or the other
# cannot see it, would otherwise collide again at every new start.

_FRESH = 60.0  # seconds: so long is a loss remembered
_LONGEST = 2.0  # the longest pause
_TIME = struct.Struct("<d")


def remember_loss() -> None:
    """Record that a claim was lost just now; no failure here hides that error."""
    with suppress(OSError), _losses() as handle:
        locks.write_at(handle, 0, _TIME.pack(kernel.uptime()))


def back_off() -> None:
    """Wait a random moment if this user has lost a claim lately.

    This never prevents a claim: where another user has put something in the file's place, or keeps
    it from being opened, no loss is assumed.
    """
    with suppress(OSError):
        if not directory.has(_name()):
            return
        with _losses() as handle:
            (then,) = _TIME.unpack(locks.read_at(handle, 0, _TIME.size).ljust(_TIME.size, b"\0"))
            if not (then and 0 <= kernel.uptime() - then < _FRESH):
                return
            locks.write_at(handle, 0, _TIME.pack(0.0))
        import random  # hardly any claim needs it

        with interruptible():
            time.sleep(random.uniform(0, _LONGEST))  # noqa: S311 - no secret


def _name() -> str:
    return f"lost-{os.geteuid()}"


@contextmanager
def _losses() -> Iterator[int]:
    """Open this user's file; OSError if it cannot be used, or another user owns it."""
    handle = directory.open_file(_name(), size=_TIME.size)
    try:
        if descriptors.owner_of(handle) != os.geteuid():
            raise PermissionError(_name())
        yield handle
    finally:
        descriptors.close(handle)
