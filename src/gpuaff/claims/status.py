"""The holders of GPUs, and the waiters: observed without taking a lock."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import NamedTuple

from gpuaff._system import kernel
from gpuaff._system.nvml import open_session
from gpuaff._system.processes import ProcessInfo, look_up
from gpuaff.claims.candidates import unclaimable
from gpuaff.claims.devices.occupancy import listed
from gpuaff.claims.devices.probe import Probe, process_info, writer_of
from gpuaff.claims.locking import leases, queue, registry
from gpuaff.claims.locking.registry import Entry, living, stopped
from gpuaff.claims.model import Busy, Device, DeviceReading, Usage
from gpuaff.errors import LockDirectoryError, NoDriverError
from gpuaff.formatting import process_in_words
from gpuaff.notices import Notice
from gpuaff.topology.sysfs import device_files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

FOREIGN_PIDS = Notice(
    "pids-foreign",
    "the driver's process ids are not those of this container, so they are not looked up; run "
    "gpuaff status on the host",
)

# docs/status-json.md describes the values of these records.


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseStatus(ProcessInfo):
    """The lease of a GPU: the process that claimed it, and those that share the claim."""

    gone: bool | None
    sharers: tuple[ProcessInfo, ...] = ()
    inside: tuple[ProcessInfo, ...] = ()


class Kind(str, Enum):
    """What a process does on a GPU: it has a context, draws, or has the device file open."""

    COMPUTE = "compute"
    GRAPHICS = "graphics"
    OPEN = "open"


@dataclass(frozen=True, slots=True, kw_only=True)
class Use(ProcessInfo):
    """A process on a GPU, and the bytes that it has there."""

    kind: Kind
    memory: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiter(ProcessInfo):
    """A process that waits for GPUs."""

    wanted: int | None
    gpus: tuple[str, ...]
    well: bool


class GpuStatus(NamedTuple):
    """A GPU, or MIG instance; ``uses`` has all processes, whether or not they make it busy."""

    reading: DeviceReading
    busy: Busy | None
    message: str
    lease: LeaseStatus | None
    kept_for: ProcessInfo | None
    uses: tuple[Use, ...]

    def to_dict(self) -> dict[str, Any]:
        """The GPU as JSON has it."""
        reading, names = self.reading, ("index", "uuid", "pci_bus_id", "name", "parent")
        return {
            **{key: getattr(reading.device, key) for key in names},
            "free": self.busy is None,
            "busy": self.busy,
            "message": self.message,
            **{f"memory_{key}": getattr(reading, key) for key in ("used", "free", "total")},
            **{key: getattr(reading, key) for key in ("utilization", "compute_mode")},
            "lease": None if self.lease is None else asdict(self.lease),
            "kept_for": None if self.kept_for is None else asdict(self.kept_for),
            "processes": [asdict(use) for use in self.uses],
        }


class Status(NamedTuple):
    """What ``gpuaff status`` shows: all devices, the waiters in their order, and warnings."""

    gpus: tuple[GpuStatus, ...]
    waiting: tuple[Waiter, ...]
    warnings: tuple[Notice, ...]

    def to_dict(self) -> dict[str, Any]:
        """The status as JSON has it."""
        places = enumerate(self.waiting, 1)
        return {
            "gpus": [gpu.to_dict() for gpu in self.gpus],
            "waiting": [{"position": place, **asdict(waiter)} for place, waiter in places],
            "warnings": [warning.to_dict() for warning in self.warnings],
        }


class Snapshot(NamedTuple):
    """Everything that was observed."""

    readings: tuple[DeviceReading, ...]
    usages: tuple[Usage, ...]  # whether each device is free, in the same order
    entries: tuple[Entry, ...]  # the registry's
    living: Collection[int]  # the slots of those whose processes are visible and have not ended
    well: Collection[int]  # the slots of waiters that are neither stopped nor stuck
    # Of each device's lease, by UUID: the process that took it (None: not visible here), then those
    # that share it. The processes that have a GPU's device file open, by its index. The visible
    # ones of all these, and of those that the driver lists, by id.
    holders: Mapping[str, Sequence[int | None]]
    opened: Mapping[int, Collection[int]]
    processes: Mapping[int, ProcessInfo]
    notices: tuple[Notice, ...]  # what could not be observed

    def process(self, pid: int | None) -> ProcessInfo:
        """A process, as far as it is known."""
        return self.processes.get(pid or 0, ProcessInfo(pid=pid))

    def writer(self, entry: Entry) -> ProcessInfo:
        """The process of an entry."""
        found = self.processes.get(entry.pid or 0) if entry.slot in self.living else None
        return writer_of(entry, found)


def take_snapshot() -> Snapshot:
    """Observe the GPUs, their holders, and the queue. This changes nothing."""
    notices, entries = list[Notice](), tuple[Entry, ...]()
    try:
        entries = registry.entries()
    except LockDirectoryError as error:
        notices.append(Notice("board-unread", f"claims and waiters are not known: {error}"))
    usages, readings = _devices(entries, notices)
    holders, opened = _open_files([reading.device for reading in readings])
    writers, now = [entry.pid for entry in entries], kernel.uptime()
    pids = {pid for found in (writers, *holders.values(), *opened.values()) for pid in found}
    if process_info(readings).me is None:
        notices.append(FOREIGN_PIDS)
    else:
        pids |= listed(readings)
    found = {pid: look_up(pid) for pid in pids if pid is not None}
    waiting = [entry for entry in entries if entry.waits and queue.is_well(entry, now)]
    return Snapshot(
        readings=readings,
        usages=usages,
        entries=entries,
        living=living(entries),
        well={entry.slot for entry in waiting} - stopped(waiting),
        holders=holders,
        opened=opened,
        processes={pid: process for pid, process in found.items() if process is not None},
        notices=tuple(notices),
    )


def _devices(
    entries: Sequence[Entry], notices: list[Notice]
) -> tuple[tuple[Usage, ...], tuple[DeviceReading, ...]]:
    try:
        with open_session() as session:
            devices = session.devices()
            probe = Probe(session, devices, own_is_free=False, utilization=True)
            probe.look()
            notices += [Notice("nvml", note) for note in session.notes]
            bad = unclaimable(devices)
            unfit = {one: f"{one}: {why}, so it cannot be claimed" for one, why in bad.items()}
            notices += [Notice("unclaimable", message) for message in unfit.values()]
            usages = tuple(
                usage._replace(busy=Busy.UNREADABLE, message=unfit[usage.device])
                if usage.busy is None and usage.device in unfit
                else usage
                for usage in probe.usages(entries, named=True)
            )
            return usages, probe.readings
    except NoDriverError as error:
        notices.append(Notice("no-driver", str(error)))
        return (), ()


def _open_files(
    devices: Sequence[Device],
) -> tuple[dict[str, list[int | None]], dict[int, set[int]]]:
    """The processes that hold leases, by UUID, and that have device files open, by index."""
    holders = {uuid: [pid] for uuid, pid in leases.holders(devices).items()}
    uuids = {
        os.path.realpath(path): device.uuid  # as /proc names open files
        for device in devices
        if device.uuid in holders
        for path, is_shared in leases.locks_of(device)
        if not is_shared
    }
    gpu_files = device_files(kernel.Tree(), {one.pci_bus_id: one.index for one in devices})
    opened: dict[int, set[int]] = {}
    for pid in kernel.process_ids():
        handles = kernel.open_files(pid)
        for handle, name in handles.items():
            if name in uuids and kernel.holds_flock(pid, handle):
                holders[uuids[name]].append(pid)
        if pid != os.getpid():
            for name in gpu_files.keys() & handles.values():
                opened.setdefault(gpu_files[name], set()).add(pid)
    return holders, opened


def status_of(snapshot: Snapshot) -> Status:
    """Evaluate a snapshot. Pure."""
    waiters = (entry for entry in snapshot.entries if entry.waits and entry.is_written)
    waiting = sorted(waiters, key=lambda entry: (entry.ticket, entry.slot))
    pairs = zip(snapshot.readings, snapshot.usages, strict=True)
    return Status(
        gpus=tuple(_gpu(snapshot, reading, usage, waiting) for reading, usage in pairs),
        waiting=tuple(
            Waiter(
                **asdict(snapshot.writer(entry)),
                wanted=entry.wanted,
                gpus=entry.devices,
                well=entry.slot in snapshot.well,
            )
            for entry in waiting
        ),
        warnings=snapshot.notices,
    )


def _gpu(
    snapshot: Snapshot, reading: DeviceReading, usage: Usage, waiting: Sequence[Entry]
) -> GpuStatus:
    uuid, kept_for = reading.device.uuid, None
    lease = _lease(snapshot, uuid)
    busy, message = usage.busy, usage.message.removeprefix(f"{reading.device}: ")
    first = queue.kept_for((one for one in waiting if one.slot in snapshot.well), uuid)
    if busy is None and first is not None:
        kept_for = snapshot.writer(first)
        who = process_in_words(kept_for.command, kept_for.pid, user=kept_for.user)
        message = f"kept for {who}"
        busy = Busy.KEPT
    uses = tuple(_uses(snapshot, reading))
    return GpuStatus(reading, busy, message, lease, kept_for, uses)


def _lease(snapshot: Snapshot, uuid: str) -> LeaseStatus | None:
    pid, *sharers = snapshot.holders.get(uuid, (None,))
    held = [entry for entry in snapshot.entries if not entry.waits]
    entry = next((one for one in held if uuid in one.gpus), None)
    if entry is None and uuid not in snapshot.holders:
        return None
    inside: tuple[ProcessInfo, ...] = ()
    if entry is None:
        claimer = replace(snapshot.process(pid), since=None)  # the lease's age is not known
        gone = None if pid is None else pid not in snapshot.processes
    else:
        claimer, key = snapshot.writer(entry), f"{entry.slot}/{uuid}"
        # The kernel shows the number of a process that was here, and nothing of other containers.
        was_here = pid is not None and pid == entry.pid
        gone = False if entry.slot in snapshot.living else True if was_here else None
        inside = tuple(snapshot.writer(one) for one in held if key in one.gpus)
    # Where the claimer has ended, its number may be another process's by now.
    others = sorted({one for one in sharers if one and (gone or one != claimer.pid)})
    sharing = tuple(map(snapshot.process, others))
    return LeaseStatus(**asdict(claimer), gone=gone, sharers=sharing, inside=inside)


def _uses(snapshot: Snapshot, reading: DeviceReading) -> Iterator[Use]:
    graphics = reading.graphics or {}
    # A process in both lists serves a display: it makes no GPU busy.
    compute = {p: memory for p, memory in (reading.compute or {}).items() if p not in graphics}
    is_foreign = FOREIGN_PIDS in snapshot.notices
    for kind, processes in ((Kind.COMPUTE, compute), (Kind.GRAPHICS, graphics)):
        for pid, memory in sorted(processes.items()):
            process = ProcessInfo(pid=pid) if is_foreign else snapshot.process(pid)
            yield Use(**asdict(process), kind=kind, memory=memory)
    if not reading.device.is_mig:  # the device file is the whole GPU's
        # CUDA opens those of all visible GPUs; a listed process is on the GPU that lists it.
        opened = set(snapshot.opened.get(reading.device.index, ())) - listed(snapshot.readings)
        for pid in sorted(opened):
            yield Use(**asdict(snapshot.process(pid)), kind=Kind.OPEN)
