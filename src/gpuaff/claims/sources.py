"""Where GPUs are claimed from: the host, or the claim in which this process runs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gpuaff._system import descriptors, kernel, locks
from gpuaff.claims.locking import leases, registry
from gpuaff.claims.locking.leases import Lease
from gpuaff.claims.locking.queue import who
from gpuaff.claims.locking.registry import Entry, Slot, ending
from gpuaff.claims.model import Busy, Device, Usage
from gpuaff.errors import ClaimError
from gpuaff.launch import inherited
from gpuaff.launch.inherited import ParentClaim

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    from gpuaff.claims.devices.probe import Probe


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSource:
    """All GPUs of the machine: a claim is a lease, and other programs may use GPUs without one."""

    probe: Probe

    def look(self) -> None:
        """Ask the driver, which takes a while, and may hang."""
        self.probe.prepare(registry.entries(before=0))

    def usages(self, entries: Sequence[Entry]) -> tuple[Usage, ...]:
        """How the devices are used: by the driver's last answer, and by the registry now."""
        return self.probe.evaluated(entries)

    def described(self, usages: tuple[Usage, ...], entries: Sequence[Entry]) -> tuple[Usage, ...]:
        """The last usages, with the names of processes in their messages."""
        del usages
        return self.probe.described(entries)

    def lease(self, slot: Slot) -> Lease:
        """A lease of no device yet."""
        del slot
        return Lease()

    def exiting(self, devices: Collection[Device]) -> frozenset[Device]:
        """Those whose lease only exiting processes hold, in the registry or not."""
        holders = leases.holders(devices)
        pids = {one: [holder.pid for holder in holders[one.uuid]] for one in devices}
        return frozenset(one for one in devices if pids[one] and all(map(_is_exiting, pids[one])))

    def key(self, device: Device) -> str:
        """The registry's name of a device."""
        return device.uuid


def _is_exiting(pid: int | None) -> bool:
    return pid is not None and kernel.is_exiting(pid)


@dataclass
class SubLease:
    """Devices of the parent claim that this process has locked: bytes of the registry's file.

    Attributes:
        slot: this process's slot, through whose open file they are locked.
        bytes_of: the byte of each device, by UUID.
        locked: the bytes that are locked.
    """

    slot: Slot
    bytes_of: Mapping[str, int]
    locked: list[int] = field(default_factory=list)
    fds = ()  # those of the slot

    def take(self, devices: Sequence[Device]) -> Device | None:
        """Lock all devices, or none.

        Returns:
            None; or a device that another rank has locked.
        """
        for device in devices:
            byte = self.bytes_of[device.uuid]
            if not locks.try_range(self.slot.handle, byte):
                self.release()
                return device
            self.locked.append(byte)
        return None

    def release(self) -> None:
        """Unlock all, for children that share them, too."""
        if self.slot.is_ours:
            for byte in self.locked:
                locks.free_range(self.slot.handle, byte)
        self.locked.clear()

    def abandon(self) -> None:
        """In a forked child: leave them to the parent."""
        self.locked.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class ParentClaimSource:
    """The claim in which this process runs: its GPUs are shared among its ranks.

    Attributes:
        parent: the claim; its devices are in the order of the registry's bytes.
        devices: the candidates.
    """

    parent: ParentClaim
    devices: tuple[Device, ...]

    def look(self) -> None:
        """Nothing: the driver is not asked about the GPUs of a claim."""

    def described(self, usages: tuple[Usage, ...], entries: Sequence[Entry]) -> tuple[Usage, ...]:
        """The last usages."""
        del entries
        return usages

    def usages(self, entries: Sequence[Entry]) -> tuple[Usage, ...]:
        """How the devices are used by claims inside the parent claim, at any depth.

        Raises:
            ClaimError: the parent claim is over.
        """
        parents = self._parents(entries)
        if self.parent.slot not in parents:
            raise ClaimError(
                "the claim in which this process runs has ended, and its GPUs may belong to "
                "another claim by now"
            )
        held = [entry for entry in entries if not entry.waits and entry.slot not in parents]
        holders = {uuid: who(entry) for entry in held for uuid in entry.devices}
        exiting = ending(held)
        for uuid in self._locked():  # its holder may be about to write its record
            holders.setdefault(uuid, "a process of this claim")
        return tuple(self._usages(holders, exiting))

    def _parents(self, entries: Sequence[Entry]) -> frozenset[int]:
        """The slots of the parent claim and of those around it, as far as they still hold."""
        holding = {entry.slot: entry for entry in entries if not entry.waits}
        found: set[int] = set()
        slot: int | None = self.parent.slot
        while slot is not None and slot in holding and slot not in found:
            found.add(slot)
            slot = holding[slot].inside
        return frozenset(found)

    def _locked(self) -> list[str]:
        first, uuids = self._byte(0), self.parent.uuids
        handle = registry.opened()
        try:
            used = locks.locked_bytes(handle, first, first + registry.PART_COUNT)
        finally:
            descriptors.close(handle)
        return [uuids[byte - first] for byte in used if byte - first < len(uuids)]

    def _usages(self, holders: Mapping[str, str], exiting: Collection[str]) -> Iterator[Usage]:
        for device in self.devices:
            if device.uuid not in holders:
                yield Usage(device=device)
                continue
            leaving = device.uuid in exiting
            message = f"{device}: claimed inside this claim by {holders[device.uuid]}"
            yield Usage(
                device=device,
                busy=Busy.LEASED,
                message=f"{message}, which is exiting" if leaving else message,
                leaving=leaving,
                exiting=leaving,
            )

    def exiting(self, devices: Collection[Device]) -> frozenset[Device]:
        """None: the lock of a device ends together with the registry's entry."""
        del devices
        return frozenset()

    def lease(self, slot: Slot) -> SubLease:
        """A lease of no device yet."""
        places = {uuid: self._byte(place) for place, uuid in enumerate(self.parent.uuids)}
        return SubLease(slot=slot, bytes_of=places)

    def _byte(self, place: int) -> int:
        return registry.PARTS + self.parent.slot * registry.PART_COUNT + place

    def key(self, device: Device) -> str:
        """The registry's name of a device inside this claim."""
        return f"{self.parent.slot}/{device.uuid}"


Source: TypeAlias = "HostSource | ParentClaimSource"
AnyLease: TypeAlias = "Lease | SubLease"


def parent_claim() -> ParentClaim | None:
    """The claim in which this process runs, by ``GPUAFF_CLAIM``; None without one.

    Raises:
        ClaimError: the variable is invalid, or names a claim that is over.
        LockDirectoryError: the registry cannot be used.
    """
    found, notice = inherited.parent_claim()
    if notice is not None:
        raise ClaimError(notice.message)
    if found is None:
        return None
    for entry in registry.entries():
        writer = entry.slot, entry.waits, entry.pid, entry.start or 0  # without /proc: not known
        expected = found.slot, False, found.pid, found.started
        # In this order, by which the ranks know which byte stands for which device.
        if writer == expected and entry.devices == found.uuids:
            return found
    raise ClaimError(
        f"{inherited.CLAIM_VARIABLE} says that this process runs inside a claim of process "
        f"{found.pid}, which is over (or was made with another GPUAFF_LOCK_DIR); to claim from "
        f"the machine unset {inherited.CLAIM_VARIABLE}, CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER"
    )
