"""Has a stranger come onto a GPU between the look and the claim?"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from gpuaff.claims.model import Device, DeviceReading
from gpuaff.claims.people import people_on
from gpuaff.errors import ClaimLostError, PlaceholderError

_SETTLES = 0.5
"""For how long a stranger must be there, in seconds. The driver lists the dead for another 0.10 to
0.15 s, and another claimer may have had the GPU, and died, since we looked first."""

_STEP = 0.03
"""Seconds between two looks at a stranger."""


def refuse_strangers(
    before: Sequence[DeviceReading],
    look: Callable[[], Sequence[DeviceReading]],
    devices: Collection[Device],
    *,
    own: Callable[[Sequence[DeviceReading]], Collection[int] | None],
) -> None:
    """Compare the processes on the claimed devices with those before we came.

    Args:
        before: what the driver told when they were leased.
        look: asks what it tells now that they are occupied.
        devices: the claimed ones.
        own: tells our processes among those that are listed; None where the driver's numbers mean
            nothing to us (another PID namespace): then one that is new is ours.

    Raises:
        ClaimLostError: there is a stranger, who stays.
        PlaceholderError: a device was lost meanwhile.
    """
    end = time.monotonic() + _SETTLES
    while True:
        after = look()
        found = _strangers(before, after, devices, own(after))
        if not found:
            return
        if time.monotonic() >= end:
            break
        time.sleep(_STEP)
    device, strangers = found[0]
    who = ", ".join(f"pid {pid}" for pid in sorted(strangers))
    raise ClaimLostError(
        f"{device} was free and is leased, but a process that does not ask for "
        f"leases has come onto it meanwhile ({who}); all was undone. CUDA has settled "
        "which GPUs this process sees: start it again, and let others claim as well"
    )


def _strangers(
    before: Sequence[DeviceReading],
    after: Sequence[DeviceReading],
    devices: Collection[Device],
    own: Collection[int] | None,
) -> list[tuple[Device, set[int]]]:
    """Who is on which claimed device and was not there before."""
    earlier = {reading.device.uuid: reading for reading in before}
    found = []
    for reading in after:
        if reading.device in devices and reading.lost:
            why = "; ".join(reading.problems) or "the driver has lost it"
            raise PlaceholderError(f"{reading.device} was lost while it was claimed: {why}")
        if reading.device not in devices or reading.compute is None:
            continue
        known = earlier[reading.device.uuid].compute or {}
        new = set(reading.compute) - set(known) - set(reading.graphics or ())
        strangers = new - set(own) if own is not None else (new if len(new) > 1 else set())
        if strangers:
            found.append((reading.device, strangers))
    return found


def our_own(readings: Sequence[DeviceReading]) -> frozenset[int] | None:
    """Our processes among those that the driver lists; None where its numbers mean nothing here."""
    people = people_on(readings)
    return frozenset((*people.own, people.me)) if people.me and people.first_namespace else None
