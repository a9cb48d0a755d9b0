"""Where GPUs are claimed from: the machine, or a claim that encloses this process."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence

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

    def lease(self, slot: Slot) -> Lease:
        """A lease that has nothing yet."""
        del slot
        return Lease()

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
        while self.taken:
            locks.free_range(self.slot.handle, self.taken[-1])
            self.taken.pop()

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
        first = self._byte(0)
        handle = board.opened()
        try:
            used = set(locks.locked_bytes(handle, first, first + board.PART_COUNT))
        finally:
            locks.close(handle)
        return tuple(self._usages(used, names))

    def _usages(self, used: Container[int], names: Mapping[str, str]) -> Iterator[Usage]:
        for device in self.devices:
            if self._byte(self.gpus.index(device.uuid)) in used:
                holder = names.get(self.key(device), "a process of this claim")
                message = f"{device}: claimed inside this claim by {holder}"
                yield Usage(device=device, busy=Busy.LEASED, message=message)
            else:
                yield Usage(device=device)

    def lease(self, slot: Slot) -> Parts:
        """A lease that has nothing yet."""
        places = {uuid: self._byte(place) for place, uuid in enumerate(self.gpus)}
        return Parts(slot=slot, bytes_of=places)

    def _byte(self, place: int) -> int:
        return board.PARTS + self.slot * board.PART_COUNT + place

    def watched(self, devices: Sequence[Device]) -> tuple[str, ...]:
        """The file that is closed when a rank gives its devices back."""
        del devices
        return (board.path(),)

    def key(self, device: Device) -> str:
        """What the board calls a device inside this claim."""
        return f"{self.slot}/{device.uuid}"


Ground: TypeAlias = "Machine | Enclosing"
AnyLease: TypeAlias = "Lease | Parts"
