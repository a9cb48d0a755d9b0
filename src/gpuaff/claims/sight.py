"""What is read for ``gpuaff status``. No lock is taken to look, and nothing is changed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from gpuaff.claims import board, leases, queue
from gpuaff.claims.entries import Entry, living, stopped
from gpuaff.claims.leases import Holder
from gpuaff.claims.looking import Looker
from gpuaff.claims.model import Device, DeviceReading, Usage
from gpuaff.claims.occupancy import listed
from gpuaff.claims.people import people_on
from gpuaff.claims.pool import unclaimable
from gpuaff.errors import LockDirectoryError, NoDriverError
from gpuaff.notices import Notice
from gpuaff.records import dataclass
from gpuaff.system import kernel
from gpuaff.system.kernel import Tree
from gpuaff.system.nvml import usage_session
from gpuaff.system.processes import Process, look_up, user_name
from gpuaff.topology.device_files import indices_by_minor, minors_of

_FOREIGN = Notice(
    "pids-foreign",
    "the driver tells processes by numbers that are not those of this container, so they are not "
    "looked up; look from the host",
)


@dataclass(frozen=True, kw_only=True)
class Sight:
    """Everything that was seen, as it was told.

    Attributes:
        readings: what the driver tells of each device.
        usages: whether each is free; in the same order.
        entries: what stands on the board.
        living: the slots of those who live, and can be seen from here.
        slow: the slots of those who wait and are stopped or stuck.
        locks: who has taken each device's locks, by UUID, as the kernel tells.
        sharing: the processes that hold each device's lease, by UUID, as far as they show it.
        opened: the processes that have the device file of each GPU open, by its index; likewise.
        processes: what processes tell of themselves, by id.
        users: the names of users, by number.
        ours: whether the driver's numbers of processes are those of here.
        notices: what could not be seen.
    """

    readings: tuple[DeviceReading, ...] = ()
    usages: tuple[Usage, ...] = ()
    entries: tuple[Entry, ...] = ()
    living: Collection[int] = ()
    slow: Collection[int] = ()
    locks: Mapping[str, tuple[Holder, ...]]
    sharing: Mapping[str, Collection[int]]
    opened: Mapping[int, Collection[int]]
    processes: Mapping[int, Process]
    users: Mapping[int, str]
    ours: bool = True
    notices: tuple[Notice, ...] = ()


def look() -> Sight:
    """Look at the GPUs, at who has them and at who waits for them."""
    entries, trouble = _entries()
    usages, readings, notes = _devices(entries)
    devices = [reading.device for reading in readings]
    locks = leases.holders(devices)
    sharing, opened = _handles([device for device in devices if locks[device.uuid]], devices)
    ours = people_on(readings).me is not None
    told = listed(readings) if ours else frozenset[int]()
    alive = living(entries)
    writers = {entry.pid for entry in entries if entry.slot in alive}
    pids = {*told, *_ids(sharing), *_ids(opened), *writers}
    pids |= {holder.pid for each in locks.values() for holder in each}
    uids = {entry.uid for entry in entries if entry.uid is not None}
    found = (look_up(pid) for pid in pids if pid is not None)
    return Sight(
        readings=readings,
        usages=usages,
        entries=entries,
        living=alive,
        slow=_slow(entries),
        locks=locks,
        sharing=sharing,
        opened=opened,
        processes={process.pid: process for process in found if process is not None},
        users={uid: user_name(uid) for uid in uids},
        ours=ours,
        notices=(*trouble, *notes, *(() if ours else (_FOREIGN,))),
    )


def _entries() -> tuple[tuple[Entry, ...], tuple[Notice, ...]]:
    try:
        return board.entries(), ()
    except LockDirectoryError as error:
        return (), (Notice("board-unread", f"who holds and who waits is not told: {error}"),)


def _devices(
    entries: Sequence[Entry],
) -> tuple[tuple[Usage, ...], tuple[DeviceReading, ...], tuple[Notice, ...]]:
    try:
        with usage_session() as session:
            looker = Looker(session, session.devices(), own_is_free=False)
            usages, readings = looker.usages(entries), session.look(utilization=True)
            odd = dict.fromkeys(unclaimable(session.devices()).values())
            notes = [Notice("nvml", note) for note in session.notes]
            notes += [Notice("unclaimable", f"{words}; no claim takes such a one") for words in odd]
            return usages, readings, tuple(notes)
    except NoDriverError as error:
        return (), (), (Notice("no-driver", str(error)),)


def _handles(
    leased: Sequence[Device], devices: Sequence[Device]
) -> tuple[dict[str, set[int]], dict[int, set[int]]]:
    """Who holds the leases, and who has device files open, by what processes have open."""
    names = {name: device.uuid for device in leased for name in leases.files_of(device)}
    addresses = {device.pci_bus_id: device.index for device in devices}
    minors = indices_by_minor(Tree(), addresses)
    sharing: dict[str, set[int]] = {}
    opened: dict[int, set[int]] = {}
    me = kernel.process_id()
    for pid in kernel.process_ids():
        handles = kernel.handles_of(pid)
        for handle, name in handles.items():
            if name in names and kernel.holds_flock(pid, handle):
                sharing.setdefault(names[name], set()).add(pid)
        for minor in minors_of(handles.values()):
            if minor in minors and pid != me:
                opened.setdefault(minors[minor], set()).add(pid)
    return sharing, opened


def _slow(entries: Iterable[Entry]) -> frozenset[int]:
    waiting = [entry for entry in entries if entry.waits]
    now = kernel.uptime()
    stuck = frozenset(entry.slot for entry in waiting if not queue.is_well(entry, now))
    return stuck | stopped(waiting)


def _ids(by_device: Mapping[str, Collection[int]] | Mapping[int, Collection[int]]) -> set[int]:
    return {pid for pids in by_device.values() for pid in pids}
