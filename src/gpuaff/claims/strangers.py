"""Has a stranger come onto a GPU between the look and the claim?"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gpuaff.claims.model import Device, DeviceReading
from gpuaff.claims.people import people_on
from gpuaff.errors import ClaimLostError, PlaceholderError


def refuse_strangers(
    before: Sequence[DeviceReading],
    after: Sequence[DeviceReading],
    devices: Collection[Device],
    *,
    own: Collection[int] | None,
) -> None:
    """Compare the processes on the claimed devices with those before we came.

    Args:
        before: what the driver told when they were leased.
        after: what it tells now that they are occupied.
        devices: the claimed ones.
        own: our processes; None where the driver's numbers mean nothing to us (another PID
            namespace): then one that is new is ours.

    Raises:
        ClaimLostError: there is a stranger.
        PlaceholderError: a device was lost meanwhile.
    """
    earlier = {reading.device.uuid: reading for reading in before}
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
            who = ", ".join(f"pid {pid}" for pid in sorted(strangers))
            raise ClaimLostError(
                f"{reading.device} was free and is leased, but a process that does not ask for "
                f"leases has come onto it meanwhile ({who}); all was undone. CUDA has settled "
                "which GPUs this process sees: start it again, and let others claim as well"
            )


def our_own(readings: Sequence[DeviceReading]) -> frozenset[int] | None:
    """Our processes among those that the driver lists; None where its numbers mean nothing here."""
    people = people_on(readings)
    return frozenset((*people.own, people.me)) if people.me and people.first_namespace else None
