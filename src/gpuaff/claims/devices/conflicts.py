"""Has a process that takes no lease started on a GPU between the look and the claim?

Such a process is listed now, was not before, and is not ours. In a container, where it may not be
listed, memory reveals it that has come into use since and that no listed process has, if the driver
lists us with our memory, as in a PID namespace (case E15; 580.159.04, H200).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from gpuaff._system.interrupts import interruptible
from gpuaff.claims.devices import occupancy
from gpuaff.claims.devices.occupancy import ListedProcesses, Settling
from gpuaff.claims.devices.probe import Probe
from gpuaff.claims.model import Device, DeviceReading, Usage
from gpuaff.errors import ClaimLostError
from gpuaff.formatting import size

# In seconds. So long must a process stay: another claimer may have had the GPU since our look, and
# ended, and the driver lists it for another 0.10 to 0.15 s. An exiting one gets longer.
_SETTLES = 0.5
_LONGEST_BACK_OFF = 1.0


# It does not count where a display is active (the lists show only part of its memory), where the
# compute mode allows one process, and where another part of the same GPU instance (MIG) uses the
# memory too: a rightful neighbour may not be listed either.
def unlisted(
    readings: Sequence[DeviceReading], devices: Collection[Device]
) -> Mapping[Device, int]:
    """The bytes on each of some devices that no listed process has, as far as that counts."""
    return {
        one.device: one.used - occupancy.memory_of_listed(readings, one.device)[0]
        for one in readings
        if one.device in devices and one.used is not None
        if not (one.display or one.compute_mode in occupancy.EXCLUSIVE)
        if sum(occupancy.same_memory(other.device, one.device) for other in readings) == 1
    }


def shows_our_memory(
    reading: DeviceReading, new: Collection[int], processes: ListedProcesses
) -> bool:
    """Whether we are listed, with our memory, so that what no listed process has is not ours."""
    compute = reading.compute or {}
    is_listed = processes.me in compute or len(new) == 1
    return is_listed and not processes.first_namespace and None not in compute.values()


class SecondLook:
    """Looks again at devices that have been occupied."""

    def __init__(self, probe: Probe, devices: Collection[Device]) -> None:
        """Remember what was there at the last look, when they were leased."""
        self._probe, self._devices = probe, devices
        self._before = {one.device: one for one in probe.readings}
        self._unlisted = unlisted(probe.readings, devices)

    def refuse_others(self) -> None:
        """Raise ClaimLostError where another process is there, and stays."""
        settling = Settling(_SETTLES)
        while found := list(self._others(self._probe.look())):
            exiting = all(one.leaving for one in found) and any(one.exiting for one in found)
            if not settling.goes_on(time.monotonic(), leaving=True, exiting=exiting):
                raise ClaimLostError(
                    f"{found[0].device} was free and is leased, but a process that takes no lease "
                    f"has started on it meanwhile ({found[0].message}); all was undone. CUDA has "
                    "settled which GPUs this process sees: start it again, and let that program "
                    "claim, too",
                    gpus=tuple(one.device.uuid for one in found),
                    pids=tuple(sorted({pid for one in found for pid in one.pids})),
                )
            with interruptible():
                time.sleep(occupancy.STEP)

    def _others(self, readings: Sequence[DeviceReading]) -> Iterator[Usage]:
        """The use of the devices by processes that were not there before."""
        processes, now = self._probe.processes, unlisted(readings, self._devices)
        for reading in (one for one in readings if one.device in self._devices):
            device = reading.device
            before = self._before[device].compute or {}
            new = frozenset(reading.compute or ()) - {*before, *(reading.graphics or ())}
            others = new - {*processes.own, processes.me}
            if processes.me is None or not processes.first_namespace:
                others = new if len(new) > 1 else frozenset()  # one of them is ours
            more = now.get(device, 0) - self._unlisted.get(device, now.get(device, 0))
            if others:
                yield Usage(
                    device=device,
                    pids=tuple(sorted(others)),
                    message=", ".join(f"pid {pid}" for pid in sorted(others)),
                    leaving=others <= processes.leaving,
                    exiting=not others.isdisjoint(processes.exiting),
                )
            elif more > occupancy.UNEXPLAINED and shows_our_memory(reading, new, processes):
                message = f"{size(more)} more are in use, by no process that is listed here"
                yield Usage(device=device, message=message)


# Two jobs that come onto a GPU at the same time and both give up would otherwise collide again at
# every new start.
@contextmanager
def backing_off() -> Iterator[None]:
    """After a lost claim, when all is undone, wait a random moment before the error is raised."""
    try:
        yield
    except ClaimLostError:
        import random  # hardly any claim needs it

        with interruptible():
            time.sleep(random.uniform(0, _LONGEST_BACK_OFF))  # noqa: S311 - no secret
        raise
