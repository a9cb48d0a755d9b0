"""Claims inside a claim: the GPUs of the parent claim are shared among its ranks.

The driver is not asked about them. Each is a byte in the registry's file, in the order of the
parent claim's GPUs, and the rank that has locked it holds the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpuaff._system import locks
from gpuaff.claims.locking import registry
from gpuaff.claims.locking.queue import who
from gpuaff.claims.locking.registry import PART_COUNT, PARTS, Entry, Slot, ending
from gpuaff.claims.model import Device, Usage
from gpuaff.errors import ClaimError
from gpuaff.launch import inherited
from gpuaff.launch.inherited import CLAIM_VARIABLE, ParentClaim


def verified_parent_claim() -> ParentClaim | None:
    """The claim in which this process runs, by ``GPUAFF_CLAIM``; ClaimError where it is over."""
    parent, notice = inherited.claim_in_environment()
    if notice is not None:
        raise ClaimError(notice.message)
    if parent is None:
        return None
    for entry in registry.entries():
        writer = entry.slot, entry.waits, entry.pid, entry.start or 0  # without /proc: not known
        # The GPUs in this order, by which the ranks know which byte stands for which device.
        expected = parent.slot, False, parent.pid, parent.started
        if writer == expected and entry.devices == parent.uuids:
            return parent
    raise ClaimError(
        f"{CLAIM_VARIABLE} says that this process runs inside a claim of process {parent.pid}, "
        "which is over (or was made with another GPUAFF_LOCK_DIR); to claim from the machine "
        f"unset {CLAIM_VARIABLE}, CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER"
    )


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


def usages_inside(
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
