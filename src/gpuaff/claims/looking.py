"""Looking at the devices: what the driver, the kernel and the board tell, put before the judge."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from gpuaff.claims import leases
from gpuaff.claims.board import Entry
from gpuaff.claims.leases import Holder
from gpuaff.claims.model import Demand, Device, DeviceReading, Usage
from gpuaff.claims.occupancy import People, judge
from gpuaff.claims.people import names_of, people_on
from gpuaff.claims.queue import who

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuaff.system.nvml_usage import UsageSession


class Names(Mapping[int, str]):
    """Processes in words, looked up when one is asked for: psutil costs more than all the rest."""

    def __init__(self, people: People) -> None:
        """None is looked up at first."""
        self._people = people
        self._known: dict[int, str | None] = {}

    def __getitem__(self, pid: int) -> str:
        if pid not in self._known:
            self._known[pid] = names_of([pid], self._people).get(pid)
        found = self._known[pid]
        if found is None:
            raise KeyError(pid)
        return found

    def __iter__(self) -> Iterator[int]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


HERE = People(me=0)
"""For processes of whom the kernel has told: their numbers are those of this PID namespace."""


class Looker:
    """Looks at devices again and again.

    Attributes:
        readings: what the driver told last, of all devices.
        idle: the whole GPUs that were free for anybody then, by index, whether they are in
            question here or not.
    """

    def __init__(
        self,
        session: UsageSession,
        devices: Sequence[Device],
        *,
        demand: Demand | None = None,
        own_is_free: bool = True,
    ) -> None:
        """Get ready.

        Args:
            session: asks the driver.
            devices: those that are judged, in their order.
            demand: what is asked of each.
            own_is_free: whether what this process's own family computes does not count.
        """
        self._session, self._devices, self._demand = session, devices, demand
        self._own_is_free = own_is_free
        self._holders = Names(HERE)
        self.readings: tuple[DeviceReading, ...] = ()
        self.idle: frozenset[int] = frozenset()

    def look(self) -> tuple[DeviceReading, ...]:
        """Ask the driver."""
        asks = self._demand is not None and self._demand.max_utilization is not None
        self.readings = self._session.look(utilization=asks)
        return self.readings

    def usages(self, entries: Sequence[Entry]) -> tuple[Usage, ...]:
        """How the devices are used now.

        Args:
            entries: what stands on the board.
        """
        readings = self.look()
        people = people_on(readings, own_is_free=self._own_is_free)
        names = Names(people)
        everybody = [reading.device for reading in readings]
        held = leased(self._devices, entries, self._holders, others=everybody)
        judged = judge(readings, people=people, leased=held, names=names, demand=self._demand)
        self.idle = frozenset(
            usage.device.index
            for usage in judge(readings, people=people, leased=held, names=names)
            if usage.busy is None and not usage.device.is_mig
        )
        by_uuid = {usage.device.uuid: usage for usage in judged}
        return tuple(by_uuid[device.uuid] for device in self._devices)


def leased(
    devices: Iterable[Device],
    entries: Sequence[Entry],
    names: Mapping[int, str],
    *,
    others: Iterable[Device] = (),
) -> dict[str, str]:
    """Who holds a lease, by UUID, in one line. No lock is taken to look.

    Args:
        devices: which are asked about.
        entries: what stands on the board.
        names: processes in words.
        others: of these it only counts whether they are leased: nothing is looked up.
    """
    on_board = {uuid: entry for entry in entries if not entry.waits for uuid in entry.gpus}
    asked = _with_parents(devices)
    all_asked = _with_parents(others) | asked
    return {
        uuid: _in_words(on_board.get(uuid), found, names) if uuid in asked else ""
        for uuid, found in leases.holders(all_asked.values()).items()
        if any(not holder.shared for holder in found)
    }


def _with_parents(devices: Iterable[Device]) -> dict[str, Device]:
    asked = {device.uuid: device for device in devices}
    for device in tuple(asked.values()):
        if device.parent is not None:
            asked.setdefault(device.parent, whole_of(device))
    return asked


def whole_of(instance: Device) -> Device:
    """The GPU that a MIG instance is part of."""
    return Device(index=instance.index, uuid=str(instance.parent), pci_bus_id=instance.pci_bus_id)


def _in_words(entry: Entry | None, holders: Sequence[Holder], names: Mapping[int, str]) -> str:
    """Who holds a lease: as the kernel tells, and since when, as the board does."""
    pid = next((holder.pid for holder in holders if holder.pid is not None), None)
    if pid is None:
        return "" if entry is None else who(entry)
    known = names.get(pid)
    if known is not None:
        return known
    return f"pid {pid}" if entry is None else f"{who(entry)}, which has ended; children hold it"
