"""Who has which GPU and who waits, put together from what was seen. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from gpuaff._system import kernel
from gpuaff._system.kernel import Tree
from gpuaff._system.nvml import usage_session
from gpuaff._system.processes import Process, look_up, user_name
from gpuaff.claims.candidates import unclaimable
from gpuaff.claims.devices.occupancy import listed
from gpuaff.claims.devices.probe import Looker, process_info
from gpuaff.claims.locking import leases, queue, registry
from gpuaff.claims.locking.leases import Holder
from gpuaff.claims.locking.registry import Entry, living, stopped
from gpuaff.claims.model import Busy, Device, DeviceReading, Usage
from gpuaff.errors import LockDirectoryError, NoDriverError
from gpuaff.formatting import person as in_words
from gpuaff.notices import Notice
from gpuaff.topology.pci import indices_by_minor, minors_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# What is read for ``gpuaff status``. No lock is taken to look, and nothing is changed.


_FOREIGN = Notice(
    "pids-foreign",
    "the driver tells processes by numbers that are not those of this container, so they are not "
    "looked up; look from the host",
)


@dataclass(frozen=True, slots=True, kw_only=True)
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
    ours = process_info(readings).me is not None
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
        return registry.entries(), ()
    except LockDirectoryError as error:
        return (), (Notice("board-unread", f"who holds and who waits is not told: {error}"),)


def _devices(
    entries: Sequence[Entry],
) -> tuple[tuple[Usage, ...], tuple[DeviceReading, ...], tuple[Notice, ...]]:
    try:
        with usage_session() as session:
            looker = Looker(session, session.devices(), own_is_free=False)
            usages, readings = looker.usages(entries), session.look(utilization=True)
            odd = unclaimable(session.devices())
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """Somebody: a process, as far as it is known. What is not known is None.

    Attributes:
        pid: its id; where it is out of sight, that of its own PID namespace.
        command: its program and arguments; of one that is out of sight, its program's name.
        user: whose it is.
        since: in seconds since 1970. Of a claimer or a waiter: since when it holds or waits; of
            all others, when they started.
        exiting: whether it is exiting: soon the kernel gives back all that it has.
    """

    pid: int | None = None
    command: str | None = None
    user: str | None = None
    since: float | None = None
    exiting: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The process as JSON has it."""
        return {
            "pid": self.pid,
            "command": self.command,
            "user": self.user,
            "since": None if self.since is None else round(self.since, 3),
            "exiting": self.exiting,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseStatus:
    """Who has leased a GPU.

    Attributes:
        claimer: who has claimed it.
        gone: whether the claimer has ended: others still hold what it had claimed. None when it
            is out of sight.
        sharers: those who hold the lease besides the claimer, as far as they can be seen: its
            children. They keep it when the claimer has ended.
        inside: those who have claimed the GPU inside the claim.
    """

    claimer: Person
    gone: bool | None
    sharers: tuple[Person, ...] = ()
    inside: tuple[Person, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The lease as JSON has it."""
        return {
            **self.claimer.to_dict(),
            "gone": self.gone,
            "sharers": [person.to_dict() for person in self.sharers],
            "inside": [person.to_dict() for person in self.inside],
        }


class Kind(str, Enum):
    """What a process does on a GPU."""

    COMPUTE = "compute"
    """It has a CUDA context."""
    GRAPHICS = "graphics"
    """It draws."""
    OPEN = "open"
    """It has the GPU's device file open, and the driver lists it nowhere."""

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A process on a GPU.

    Attributes:
        person: which one.
        kind: what it does there.
        memory: the bytes that it has there; None when that is not told.
    """

    person: Person
    kind: Kind
    memory: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """The process as JSON has it."""
        return {**self.person.to_dict(), "kind": str(self.kind), "memory": self.memory}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuStatus:
    """A GPU, or MIG instance.

    Attributes:
        reading: which one, and what the driver tells of it.
        busy: why it is not free; None when it is.
        message: that in words, without the GPU's name; empty when it is free.
        lease: who has leased it; None when nobody has.
        kept_for: the first waiter that may choose it, so that no new claim gets it; None when none
            waits, or it is not idle.
        uses: the processes on it, whether or not they make it busy.
    """

    reading: DeviceReading
    busy: Busy | None
    message: str
    lease: LeaseStatus | None
    kept_for: Person | None
    uses: tuple[Use, ...]

    def to_dict(self) -> dict[str, Any]:
        """The GPU as JSON has it."""
        reading = self.reading
        device, mode = reading.device, reading.compute_mode
        return {
            "index": device.index,
            "uuid": device.uuid,
            "pci_bus_id": device.pci_bus_id,
            "name": device.name,
            "parent": device.parent,
            "free": self.busy is None,
            "busy": None if self.busy is None else str(self.busy),
            "message": self.message,
            "memory_used": reading.used,
            "memory_free": reading.free,
            "memory_total": reading.total,
            "utilization": reading.utilization,
            "compute_mode": None if mode is None else mode.value,
            "lease": None if self.lease is None else self.lease.to_dict(),
            "kept_for": None if self.kept_for is None else self.kept_for.to_dict(),
            "processes": [use.to_dict() for use in self.uses],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiter:
    """Somebody who waits.

    Attributes:
        person: who.
        wanted: how many GPUs are wanted; None when that is not told.
        gpus: of which, by UUID; empty is any.
        well: whether it is neither stopped nor stuck, for then others pass it.
    """

    person: Person
    wanted: int | None
    gpus: tuple[str, ...]
    well: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What ``gpuaff status`` tells.

    Attributes:
        gpus: all devices, as the driver counts them.
        waiting: who waits, in their order.
        warnings: what could not be seen.
    """

    gpus: tuple[GpuStatus, ...]
    waiting: tuple[Waiter, ...]
    warnings: tuple[Notice, ...]

    def to_dict(self) -> dict[str, Any]:
        """The status as JSON has it; ``docs/status-json.md`` tells the schema."""
        return {
            "gpus": [gpu.to_dict() for gpu in self.gpus],
            "waiting": [
                {
                    "position": place,
                    **waiter.person.to_dict(),
                    "wanted": waiter.wanted,
                    "gpus": list(waiter.gpus),
                    "well": waiter.well,
                }
                for place, waiter in enumerate(self.waiting, 1)
            ],
            "warnings": [warning.to_dict() for warning in self.warnings],
        }


def status_of(sight: Sight) -> Status:
    """Put together what was seen."""
    pairs = zip(sight.readings, sight.usages, strict=True)
    waiting = sorted((e for e in sight.entries if e.waits), key=lambda e: (e.ticket, e.slot))
    well = [entry for entry in waiting if entry.slot not in sight.slow]
    return Status(
        gpus=tuple(_gpu(sight, reading, usage, well) for reading, usage in pairs),
        waiting=tuple(_waiter(sight, entry) for entry in waiting),
        warnings=sight.notices,
    )


def _gpu(sight: Sight, reading: DeviceReading, usage: Usage, waiting: Sequence[Entry]) -> GpuStatus:
    lease = _lease(sight, reading.device.uuid)
    busy, message = usage.busy, usage.message.removeprefix(f"{reading.device}: ")
    if busy is None and lease is not None:
        # The lock is out of sight (another PID namespace), and the board tells of it.
        busy, message = Busy.LEASED, "leased by somebody who cannot be seen from here"
    waiter = queue.kept_for(waiting, reading.device.uuid) if busy is None else None
    kept_for = None if waiter is None else _writer(sight, waiter)
    if kept_for is not None:
        command = kept_for.command or "an unknown program"
        message = f"kept for {in_words(command, kept_for.pid, user=kept_for.user, since=None)}"
        busy = Busy.KEPT
    return GpuStatus(
        reading=reading,
        busy=busy,
        message=message,
        lease=lease,
        kept_for=kept_for,
        uses=tuple(_uses(sight, reading)),
    )


def _lease(sight: Sight, uuid: str) -> LeaseStatus | None:
    holders = sight.locks.get(uuid, ())
    entry = next((e for e in sight.entries if not e.waits and uuid in e.gpus), None)
    if not holders and entry is None:
        return None
    taker = next((holder.pid for holder in holders if holder.pid is not None), None)
    if entry is None:
        claimer = replace(_process(sight, taker), since=None)  # the lease's age is not known
        gone = None if taker is None else taker not in sight.processes
    else:
        claimer = _writer(sight, entry)
        gone = _is_gone(sight, entry, taker)
    others = set(sight.sharing.get(uuid, ())) - ({claimer.pid} if not gone else set())
    return LeaseStatus(
        claimer=claimer,
        gone=gone,
        sharers=tuple(_process(sight, pid) for pid in sorted(others)),
        inside=tuple(_inside(sight, entry, uuid)),
    )


def _is_gone(sight: Sight, entry: Entry, taker: int | None) -> bool | None:
    """Whether a claimer has ended; None when it is out of sight."""
    if entry.slot in sight.living:
        return False
    if taker is not None and taker == entry.pid:  # the kernel's number: so it was here
        return True
    return None


def _inside(sight: Sight, around: Entry | None, uuid: str) -> Iterator[Person]:
    """Those who have claimed a GPU inside the claim that has it."""
    for entry in sight.entries:
        if around is not None and not entry.waits and f"{around.slot}/{uuid}" in entry.gpus:
            yield _writer(sight, entry)


def _uses(sight: Sight, reading: DeviceReading) -> Iterator[Use]:
    told = ((Kind.COMPUTE, reading.compute), (Kind.GRAPHICS, reading.graphics))
    for kind, processes in told:
        for pid, memory in sorted((processes or {}).items()):
            if kind is Kind.COMPUTE and pid in (reading.graphics or {}):
                continue  # one that does both draws: it makes no GPU busy
            person = _process(sight, pid) if sight.ours else Person(pid=pid)
            yield Use(person=person, kind=kind, memory=memory)
    if not reading.device.is_mig:  # the device file is the whole GPU's
        # CUDA opens those of all GPUs that it may see: whom the driver lists is where it says.
        others = set(sight.opened.get(reading.device.index, ())) - listed(sight.readings)
        for pid in sorted(others):
            yield Use(person=_process(sight, pid), kind=Kind.OPEN)


def _waiter(sight: Sight, entry: Entry) -> Waiter:
    return Waiter(
        person=_writer(sight, entry),
        wanted=entry.wanted,
        gpus=tuple(map(_without_claim, entry.gpus)),
        well=entry.slot not in sight.slow,
    )


def _without_claim(name: str) -> str:
    """A UUID, without the slot that stands before it where it is wanted from a claim."""
    slot, _, uuid = name.partition("/")
    return uuid if slot.isdecimal() else name


def _process(sight: Sight, pid: int | None) -> Person:
    """A process by what it tells of itself."""
    found = None if pid is None else sight.processes.get(pid)
    if found is None:
        return Person(pid=pid)
    return Person(
        pid=pid,
        command=found.command,
        user=found.user,
        since=found.started,
        exiting=found.exiting,
    )


def _writer(sight: Sight, entry: Entry) -> Person:
    """Who has written on the board: by what the process tells, else by what it has written."""
    told = _process(sight, entry.pid) if entry.slot in sight.living else Person(pid=entry.pid)
    user = None if entry.uid is None else sight.users.get(entry.uid)
    return Person(
        pid=entry.pid,
        command=told.command or entry.text("name") or None,
        user=told.user or user,
        since=entry.since,
        exiting=told.exiting,
    )
