"""Where GPUs are claimed from: the machine, or a claim that encloses this process."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gpuaff._system import descriptors, kernel, locks
from gpuaff.claims.locking import leases, registry
from gpuaff.claims.locking.leases import Lease
from gpuaff.claims.locking.queue import who
from gpuaff.claims.locking.registry import Entry, Slot, ending
from gpuaff.claims.model import Busy, Device, Usage
from gpuaff.errors import ClaimError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    from gpuaff.claims.devices.probe import Looker


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """All GPUs of the machine: a claim is a lease, and others may have GPUs without one.

    Attributes:
        looker: asks how the devices of the pool are used.
    """

    looker: Looker

    def look(self) -> None:
        """Ask the driver, which takes a while, and may hang."""
        self.looker.prepare(registry.entries())

    def usages(self, entries: Sequence[Entry]) -> tuple[Usage, ...]:
        """How the devices are used, as of the last look, and by the leases of this moment."""
        return self.looker.judged(entries)

    def in_words(self, usages: tuple[Usage, ...], entries: Sequence[Entry]) -> tuple[Usage, ...]:
        """The last usages, for those who are to be told."""
        del usages
        return self.looker.in_words(entries)

    def lease(self, slot: Slot) -> Lease:
        """A lease that has nothing yet."""
        del slot
        return Lease()

    def ending(self, devices: Collection[Device]) -> frozenset[Device]:
        """Those whose lease is held by processes that are exiting, board or not."""
        holders = leases.holders(devices)
        pids = {one: [holder.pid for holder in holders[one.uuid]] for one in devices}
        return frozenset(one for one in devices if pids[one] and all(map(_is_exiting, pids[one])))

    def watched(self, devices: Sequence[Device]) -> tuple[str, ...]:
        """The files that are closed when somebody gives a device back."""
        return tuple({lock.path: None for one in devices for lock in leases.locks_of(one)})

    def key(self, device: Device) -> str:
        """What the board calls a device."""
        return device.uuid


@dataclass()
class Parts:
    """Devices of an enclosing claim that this process has to itself: bytes of the board.

    Attributes:
        slot: this process's slot, through whose open file they are locked.
        bytes_of: the byte of each device, by UUID.
        taken: the bytes that are locked.
    """

    slot: Slot
    bytes_of: Mapping[str, int]
    taken: list[int] = field(default_factory=list)

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors that hold it, besides the slot's."""
        return ()

    def take(self, devices: Sequence[Device]) -> Device | None:
        """Take all devices, or none.

        Returns:
            None; or a device that another rank has.
        """
        try:
            for device in devices:
                byte = self.bytes_of[device.uuid]
                self.taken.append(byte)  # first: Ctrl-C may come as soon as it is locked
                if not locks.try_range(self.slot.handle, byte):
                    self.taken.pop()
                    self.release()
                    return device
        except BaseException:
            self.release()
            raise
        return None

    def release(self) -> None:
        """Give all back, for children that share them, too."""
        while self.taken and self.slot.is_ours:
            locks.free_range(self.slot.handle, self.taken[-1])
            self.taken.pop()
        self.taken.clear()

    def abandon(self) -> None:
        """In a forked child: leave them to the parent."""
        self.taken.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class Enclosing:
    """A claim in which this process runs: all of its GPUs are ours, and shared among its ranks.

    Attributes:
        slot: its slot on the board.
        gpus: its devices, by UUID, in its order.
        devices: the devices of the pool.
    """

    slot: int
    gpus: tuple[str, ...]
    devices: tuple[Device, ...]

    def look(self) -> None:
        """Nothing: the driver is not asked about the GPUs of a claim."""

    def in_words(self, usages: tuple[Usage, ...], entries: Sequence[Entry]) -> tuple[Usage, ...]:
        """The last usages, for those who are to be told."""
        del entries
        return usages

    def usages(self, entries: Sequence[Entry]) -> tuple[Usage, ...]:
        """How the devices are used now, by those who claim inside the claim.

        Also by those who claim inside a claim inside it, whose process may have died.

        Raises:
            ClaimError: the claim itself is over.
        """
        around = self._around(entries)
        if self.slot not in around:
            raise ClaimError(
                "the claim in which this process runs has ended meanwhile, and its GPUs may be "
                "somebody else's by now"
            )
        held = [entry for entry in entries if not entry.waits and entry.slot not in around]
        names = {uuid: who(entry) for entry in held for uuid in entry.devices}
        leaving = ending(held)
        first = self._byte(0)
        handle = registry.opened()
        try:
            used = locks.locked_bytes(handle, first, first + registry.PART_COUNT)
        finally:
            descriptors.close(handle)
        taken = {self.gpus[byte - first] for byte in used if byte - first < len(self.gpus)}
        return tuple(self._usages(taken | names.keys(), names, leaving))

    def _around(self, entries: Sequence[Entry]) -> frozenset[int]:
        """The slots of this claim and of those around it, as far as they hold still."""
        holding = {entry.slot: entry for entry in entries if not entry.waits}
        found: set[int] = set()
        slot: int | None = self.slot
        while slot is not None and slot in holding and slot not in found:
            found.add(slot)
            slot = holding[slot].inside
        return frozenset(found)

    def _usages(
        self, taken: Container[str], names: Mapping[str, str], leaving: Container[str]
    ) -> Iterator[Usage]:
        for device in self.devices:
            if device.uuid in taken:
                holder = names.get(device.uuid, "a process of this claim")
                exiting = device.uuid in leaving
                message = f"{device}: claimed inside this claim by {holder}"
                message += ", which is exiting" if exiting else ""
                yield Usage(
                    device=device,
                    busy=Busy.LEASED,
                    message=message,
                    leaving=exiting,
                    exiting=exiting,
                )
            else:
                yield Usage(device=device)

    def ending(self, devices: Collection[Device]) -> frozenset[Device]:
        """None: the lock of a part goes together with what the board says of it."""
        del devices
        return frozenset()

    def lease(self, slot: Slot) -> Parts:
        """A lease that has nothing yet."""
        places = {uuid: self._byte(place) for place, uuid in enumerate(self.gpus)}
        return Parts(slot=slot, bytes_of=places)

    def _byte(self, place: int) -> int:
        return registry.PARTS + self.slot * registry.PART_COUNT + place

    def watched(self, devices: Sequence[Device]) -> tuple[str, ...]:
        """No file tells: the board is closed at every look, also by who would be woken."""
        del devices
        return ()

    def key(self, device: Device) -> str:
        """What the board calls a device inside this claim."""
        return f"{self.slot}/{device.uuid}"


def _is_exiting(pid: int | None) -> bool:
    return pid is not None and kernel.is_exiting(pid)


Ground: TypeAlias = "Machine | Enclosing"
AnyLease: TypeAlias = "Lease | Parts"
