"""Whether memory tells of a process that the driver does not list (case E15). Pure.

Inside a container the lists may be empty, hold the host's numbers, or hold nobody from outside: in
a PID namespace of its own a process was told of the processes there alone, by their numbers there,
and of all the memory in use (driver 580.159.04, H200). So outside of the first PID namespace, and
wherever a process does not find itself in the lists, what tells of strangers is memory that no
listed process has.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import Enum

from gpuaff.claims.model import Device, DeviceReading
from gpuaff.claims.occupancy import EXCLUSIVE, UNEXPLAINED, People, memory_of_listed, same_memory

CONTEXT = 524 << 20
"""Bytes by which a context makes the memory in use grow on an H100 and an H200, the most that was
seen; it is less on smaller GPUs."""


class View(Enum):
    """Whom the driver lists on a device that we have occupied."""

    ALL = "all"
    """Everybody."""
    OURS = "ours"
    """Us, with our memory, and perhaps not others: what nobody who is listed has is not ours."""
    NONE = "none"
    """Not even us, or not what we have: what nobody who is listed has may be ours."""


def view(reading: DeviceReading, new: Collection[int], people: People) -> View:
    """Whom the driver lists on a device.

    Args:
        reading: what it tells of the device, now that we are there.
        new: those who are listed and were not before we came.
        people: who is who.
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

    Those are missing on which they would tell nothing: where it is not known how many are in use,
    where a display is active (what a screen needs is listed only in part), where the compute mode
    lets one process in, as a stranger and we cannot both be there, and where another part of the
    same GPU instance (MIG) uses the memory too: a rightful neighbour may not be listed either.

    Args:
        readings: what the driver tells of all devices of the machine.
        devices: those that are asked about.
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
    than any that was seen, so it is to be made sure of.

    Args:
        grown: by how many bytes, on each device that we have a context on.
        readings: what the driver tells of them.
    """
    kinds = {one.device: (one.device.name, one.total) for one in readings}
    alike = [[grown[one] for one in grown if kinds[one] == kind] for kind in {*kinds.values()}]
    return any(max(grew) > UNEXPLAINED + min(CONTEXT, *grew) for grew in alike if grew)
