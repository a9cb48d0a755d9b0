"""The holders of GPUs, and the waiters: observed without taking a lock."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum

from gpuaff._system import kernel
from gpuaff._system.kernel import Tree
from gpuaff._system.nvml import open_session
from gpuaff._system.processes import Process, look_up, user_name
from gpuaff.claims.candidates import unclaimable
from gpuaff.claims.devices.occupancy import listed
from gpuaff.claims.devices.probe import Probe, process_info
from gpuaff.claims.locking import leases, queue, registry
from gpuaff.claims.locking.leases import Holder
from gpuaff.claims.locking.registry import Entry, living, stopped
from gpuaff.claims.model import Busy, Device, DeviceReading, Usage
from gpuaff.errors import LockDirectoryError, NoDriverError
from gpuaff.formatting import process_in_words
from gpuaff.notices import Notice
from gpuaff.topology.pci import device_files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_FOREIGN = Notice(
    "pids-foreign",
    "the driver's process ids are not those of this container, so they are not looked up; run "
    "gpuaff status on the host",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything that was observed.

    Attributes:
        readings: what the driver reports of each device.
        usages: whether each is free; in the same order.
        entries: the registry.
        living: the slots whose process lives, and is visible here.
        slow: the slots of waiters that are stopped or stuck.
        locks: the holders of each device's locks, by UUID, from the kernel.
        sharing: the processes that hold each device's lease, by UUID, as far as they are visible.
        opened: the processes that have each GPU's device file open, by its index; likewise.
        processes: the processes themselves, by id.
        users: the names of users, by number.
        ours: whether the driver's process ids are valid here.
        notices: what could not be observed.
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


def take_snapshot() -> Snapshot:
    """Observe the GPUs, their holders, and the queue. This changes nothing."""
    entries, notices = _entries()
    usages, readings, more = _devices(entries)
    devices = [reading.device for reading in readings]
    locks = leases.holders(devices)
    sharing, opened = _open_files([device for device in devices if locks[device.uuid]], devices)
    ours = process_info(readings).me is not None
    alive = living(entries)
    pids = {entry.pid for entry in entries if entry.slot in alive}
    pids |= {holder.pid for holders in locks.values() for holder in holders}
    pids |= {*(listed(readings) if ours else ())}.union(*sharing.values(), *opened.values())
    found = (look_up(pid) for pid in pids if pid is not None)
    uids = {entry.uid for entry in entries if entry.uid is not None}
    waiting = [entry for entry in entries if entry.waits]
    now = kernel.uptime()
    return Snapshot(
        readings=readings,
        usages=usages,
        entries=entries,
        living=alive,
        slow=stopped(waiting) | {one.slot for one in waiting if not queue.is_well(one, now)},
        locks=locks,
        sharing=sharing,
        opened=opened,
        processes={process.pid: process for process in found if process is not None},
        users={uid: user_name(uid) for uid in uids},
        ours=ours,
        notices=(*notices, *more, *(() if ours else (_FOREIGN,))),
    )


def _entries() -> tuple[tuple[Entry, ...], tuple[Notice, ...]]:
    try:
        return registry.entries(), ()
    except LockDirectoryError as error:
        return (), (Notice("board-unread", f"claims and waiters are not known: {error}"),)


def _devices(
    entries: Sequence[Entry],
) -> tuple[tuple[Usage, ...], tuple[DeviceReading, ...], tuple[Notice, ...]]:
    try:
        with open_session() as session:
            devices = session.devices()
            probe = Probe(session, devices, own_is_free=False, utilization=True)
            probe.look()
            notices = [Notice("nvml", note) for note in session.notes]
            notices += [
                Notice("unclaimable", f"{why}, so it cannot be claimed")
                for why in unclaimable(devices)
            ]
            probe.evaluated(entries)
            return probe.described(entries), probe.readings, tuple(notices)
    except NoDriverError as error:
        return (), (), (Notice("no-driver", str(error)),)


def _open_files(
    leased: Sequence[Device], devices: Sequence[Device]
) -> tuple[dict[str, set[int]], dict[int, set[int]]]:
    """The processes that hold leases, by UUID, and that have device files open, by index."""
    uuids = {name: device.uuid for device in leased for name in leases.files_of(device)}
    gpu_files = device_files(Tree(), {one.pci_bus_id: one.index for one in devices})
    sharing: dict[str, set[int]] = {}
    opened: dict[int, set[int]] = {}
    for pid in kernel.process_ids():
        handles = kernel.handles_of(pid)
        for handle, name in handles.items():
            if name in uuids and kernel.holds_flock(pid, handle):
                sharing.setdefault(uuids[name], set()).add(pid)
        if pid != kernel.process_id():
            for name in gpu_files.keys() & handles.values():
                opened.setdefault(gpu_files[name], set()).add(pid)
    return sharing, opened


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessInfo:
    """A process. What is not known is None.

    Attributes:
        pid: its id; where it is not visible here, that of its own PID namespace.
        command: its program and arguments; where it is not visible here, its program's name.
        user: its user's name.
        since: when a claimer or waiter began to hold or wait, or another process started, in
            seconds since 1970.
        exiting: whether it is exiting: the kernel is about to free all that it holds.
    """

    pid: int | None = None
    command: str | None = None
    user: str | None = None
    since: float | None = None
    exiting: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The process as JSON has it."""
        return {**asdict(self), "since": None if self.since is None else round(self.since, 3)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseStatus:
    """The lease of a GPU.

    Attributes:
        claimer: the process that claimed it.
        gone: whether the claimer has ended, and other processes still hold the lease. None when it
            is not visible here.
        sharers: the other processes that hold the lease, as far as they are visible: its children.
            They keep it when the claimer has ended.
        inside: the processes that have claimed the GPU inside the claim.
    """

    claimer: ProcessInfo
    gone: bool | None
    sharers: tuple[ProcessInfo, ...] = ()
    inside: tuple[ProcessInfo, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The lease as JSON has it."""
        return {
            **self.claimer.to_dict(),
            "gone": self.gone,
            "sharers": [one.to_dict() for one in self.sharers],
            "inside": [one.to_dict() for one in self.inside],
        }


class Kind(str, Enum):
    """What a process does on a GPU."""

    COMPUTE = "compute"
    """It has a CUDA context."""
    GRAPHICS = "graphics"
    """It uses the GPU for graphics."""
    OPEN = "open"
    """It has the GPU's device file open, and the driver does not list it."""

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A process on a GPU.

    Attributes:
        process: which one.
        kind: what it does there.
        memory: the bytes that it has there; None when unknown.
    """

    process: ProcessInfo
    kind: Kind
    memory: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """The process as JSON has it."""
        return {**self.process.to_dict(), "kind": str(self.kind), "memory": self.memory}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuStatus:
    """A GPU, or MIG instance.

    Attributes:
        reading: which one, and what the driver reports of it.
        busy: why it is not free; None when it is.
        message: the reason in words, without the GPU's name; empty when it is free.
        lease: its lease; None without.
        kept_for: the first waiter that may choose it, so that no new claim gets it; None when none
            waits, or it is not idle.
        uses: the processes on it, whether or not they make it busy.
    """

    reading: DeviceReading
    busy: Busy | None
    message: str
    lease: LeaseStatus | None
    kept_for: ProcessInfo | None
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
    """A process that waits for GPUs.

    Attributes:
        process: which one.
        wanted: how many GPUs it requests; None when unknown.
        gpus: of which, by UUID; empty is any.
        well: whether it is neither stopped nor stuck; otherwise other waiters pass it.
    """

    process: ProcessInfo
    wanted: int | None
    gpus: tuple[str, ...]
    well: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What ``gpuaff status`` shows.

    Attributes:
        gpus: all devices, as the driver counts them.
        waiting: the waiters, in their order.
        warnings: what could not be observed.
    """

    gpus: tuple[GpuStatus, ...]
    waiting: tuple[Waiter, ...]
    warnings: tuple[Notice, ...]

    def to_dict(self) -> dict[str, Any]:
        """The status as JSON has it; ``docs/status-json.md`` has the schema."""
        return {
            "gpus": [gpu.to_dict() for gpu in self.gpus],
            "waiting": [
                {
                    "position": place,
                    **waiter.process.to_dict(),
                    "wanted": waiter.wanted,
                    "gpus": list(waiter.gpus),
                    "well": waiter.well,
                }
                for place, waiter in enumerate(self.waiting, 1)
            ],
            "warnings": [warning.to_dict() for warning in self.warnings],
        }


def status_of(snapshot: Snapshot) -> Status:
    """Evaluate a snapshot. Pure."""
    pairs = zip(snapshot.readings, snapshot.usages, strict=True)
    waiting = [entry for entry in snapshot.entries if entry.waits]
    waiting.sort(key=lambda entry: (entry.ticket, entry.slot))
    well = [entry for entry in waiting if entry.slot not in snapshot.slow]
    return Status(
        gpus=tuple(_gpu(snapshot, reading, usage, well) for reading, usage in pairs),
        waiting=tuple(_waiter(snapshot, entry) for entry in waiting),
        warnings=snapshot.notices,
    )


def _gpu(
    snapshot: Snapshot, reading: DeviceReading, usage: Usage, waiting: Sequence[Entry]
) -> GpuStatus:
    lease = _lease(snapshot, reading.device.uuid)
    busy, message = usage.busy, usage.message.removeprefix(f"{reading.device}: ")
    if busy is None and lease is not None:  # its lock is in another PID namespace
        busy, message = Busy.LEASED, "leased by a process that is not visible here"
    waiter = queue.kept_for(waiting, reading.device.uuid) if busy is None else None
    kept_for = None if waiter is None else _writer(snapshot, waiter)
    if kept_for is not None:
        command = kept_for.command or "an unknown program"
        message = f"kept for {process_in_words(command, kept_for.pid, user=kept_for.user)}"
        busy = Busy.KEPT
    return GpuStatus(
        reading=reading,
        busy=busy,
        message=message,
        lease=lease,
        kept_for=kept_for,
        uses=tuple(_uses(snapshot, reading)),
    )


def _lease(snapshot: Snapshot, uuid: str) -> LeaseStatus | None:
    holders = snapshot.locks.get(uuid, ())
    held = [entry for entry in snapshot.entries if not entry.waits]
    entry = next((entry for entry in held if uuid in entry.gpus), None)
    if not holders and entry is None:
        return None
    pid = next((holder.pid for holder in holders if holder.pid is not None), None)
    sharers = set(snapshot.sharing.get(uuid, ()))
    inside = [] if entry is None else [e for e in held if f"{entry.slot}/{uuid}" in e.gpus]
    if entry is None:
        claimer = replace(_process(snapshot, pid), since=None)  # the lease's age is not known
        gone = None if pid is None else pid not in snapshot.processes
    else:
        claimer = _writer(snapshot, entry)
        # The kernel shows the number of a process that was here, and nothing of other containers.
        was_here = pid is not None and pid == entry.pid
        gone = False if entry.slot in snapshot.living else True if was_here else None
    return LeaseStatus(
        claimer=claimer,
        gone=gone,
        sharers=tuple(
            _process(snapshot, pid)
            for pid in sorted(sharers)
            if gone or pid != claimer.pid  # else the number may be another process's by now
        ),
        inside=tuple(_writer(snapshot, entry) for entry in inside),
    )


def _uses(snapshot: Snapshot, reading: DeviceReading) -> Iterator[Use]:
    graphics = reading.graphics or {}
    # A process in both lists serves a display: it makes no GPU busy.
    compute = {p: memory for p, memory in (reading.compute or {}).items() if p not in graphics}
    for kind, processes in ((Kind.COMPUTE, compute), (Kind.GRAPHICS, graphics)):
        for pid, memory in sorted(processes.items()):
            process = _process(snapshot, pid) if snapshot.ours else ProcessInfo(pid=pid)
            yield Use(process=process, kind=kind, memory=memory)
    if not reading.device.is_mig:  # the device file is the whole GPU's
        # CUDA opens those of all visible GPUs; a listed process is on the GPU that lists it.
        opened = set(snapshot.opened.get(reading.device.index, ())) - listed(snapshot.readings)
        for pid in sorted(opened):
            yield Use(process=_process(snapshot, pid), kind=Kind.OPEN)


def _waiter(snapshot: Snapshot, entry: Entry) -> Waiter:
    return Waiter(
        process=_writer(snapshot, entry),
        wanted=entry.wanted,
        gpus=entry.devices,
        well=entry.slot not in snapshot.slow,
    )


def _process(snapshot: Snapshot, pid: int | None) -> ProcessInfo:
    found = None if pid is None else snapshot.processes.get(pid)
    if found is None:
        return ProcessInfo(pid=pid)
    return ProcessInfo(
        pid=pid,
        command=found.command,
        user=found.user,
        since=found.started,
        exiting=found.exiting,
    )


def _writer(snapshot: Snapshot, entry: Entry) -> ProcessInfo:
    """The process of a registry entry: itself where it is visible, else by what it has written."""
    pid, user = entry.pid, None if entry.uid is None else snapshot.users.get(entry.uid)
    found = _process(snapshot, pid) if entry.slot in snapshot.living else ProcessInfo(pid=pid)
    return replace(
        found,
        command=found.command or entry.text("name") or None,
        user=found.user or user,
        since=entry.since,
    )
