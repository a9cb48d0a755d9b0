"""Where GPUs are claimed from: the machine, or a claim that encloses this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from gpuaff.claims import board, leases
from gpuaff.claims.board import Entry, Slot
from gpuaff.claims.leases import Lease
from gpuaff.claims.model import Busy, Device, Usage
from gpuaff.claims.queue import who
from gpuaff.records import dataclass, field
from gpuaff.system import locks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias


@dataclass(frozen=True, kw_only=True)
class Machine:
    """All GPUs of the machine: a claim is a lease, and others may have GPUs without one.

    Attributes:
        look: asks how the devices of the pool are used; it is given what stands on the board.
    """

    look: Callable[[Sequence[Entry]], tuple[Usage, ...]]

    def usages(self, entries: Sequence[Entry]) -> tuple[Usage, ...]:
        """How the devices are used now."""
        return self.look(entries)

    def take(self, devices: Sequence[Device], slot: Slot) -> Lease | Device:
        """Lease the devices, or tell which one somebody else has."""
        del slot
        return leases.lease(devices)

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
        taken: the bytes.
    """

    slot: Slot
    taken: list[int] = field(default_factory=list)

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors that hold it, besides the slot's."""
        return ()

    def release(self) -> None:
        """Give all back, for children that share them, too."""
        while self.taken:
            locks.free_range(self.slot.handle, self.taken.pop())

    def abandon(self) -> None:
        """In a forked child: leave them to the parent."""
        self.taken.clear()


@dataclass(frozen=True, kw_only=True)
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

    def usages(self, entries: Sequence[Entry]) -> tuple[Usage, ...]:
        """How the devices are used now, by those who claim inside the claim."""
        names = {key: who(entry) for entry in entries if not entry.waits for key in entry.gpus}
        handle = board.opened()
        try:
            first = board.PARTS + self.slot * board.PART_COUNT
            used = locks.locked_bytes(handle, first, first + board.PART_COUNT)
        finally:
            locks.close(handle)
        return tuple(self._usages({at - first for at in used}, names))

    def _usages(self, used: set[int], names: dict[str, str]) -> Iterator[Usage]:
        for device in self.devices:
            if self.gpus.index(device.uuid) in used:
                holder = names.get(self.key(device), "a process of this claim")
                message = f"{device}: claimed inside this claim by {holder}"
                yield Usage(device=device, busy=Busy.LEASED, message=message)
            else:
                yield Usage(device=device)

    def take(self, devices: Sequence[Device], slot: Slot) -> Parts | Device:
        """Take the devices, or tell which one another rank has."""
        parts = Parts(slot)
        try:
            for device in devices:
                place = self.gpus.index(device.uuid)
                byte = board.PARTS + self.slot * board.PART_COUNT + place
                parts.taken.append(byte)
                if not locks.try_range(slot.handle, byte):
                    parts.taken.pop()
                    parts.release()
                    return device
        except BaseException:
            parts.release()
            raise
        return parts

    def watched(self, devices: Sequence[Device]) -> tuple[str, ...]:
        """The file that is closed when a rank gives its devices back."""
        del devices
        return (board.path(),)

    def key(self, device: Device) -> str:
        """What the board calls a device inside this claim."""
        return f"{self.slot}/{device.uuid}"


Ground: TypeAlias = "Machine | Enclosing"
AnyLease: TypeAlias = "Lease | Parts"
