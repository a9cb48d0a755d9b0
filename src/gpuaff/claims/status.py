"""The holders of GPUs, and the waiters: observed without taking a lock."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum

from gpuaff._system import kernel
from gpuaff._system.nvml import open_session
from gpuaff._system.processes import ProcessInfo, look_up, user_name
from gpuaff.claims.candidates import unclaimable
from gpuaff.claims.devices.occupancy import listed
from gpuaff.claims.devices.probe import Probe, process_info, writer_of
from gpuaff.claims.locking import leases, queue, registry
from gpuaff.claims.locking.registry import Entry, living, stopped
from gpuaff.claims.model import Busy, Device, DeviceReading, Usage
from gpuaff.errors import LockDirectoryError, NoDriverError
from gpuaff.formatting import process_in_words
from gpuaff.notices import Notice
from gpuaff.topology.pci import device_files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

FOREIGN_PIDS = Notice(
    "pids-foreign",
    "the driver's process ids are not those of this container, so they are not looked up; run "
    "gpuaff status on the host",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseStatus(ProcessInfo):
    """The lease of a GPU: the process that claimed it.

    Attributes:
        gone: whether that has ended, and other processes still hold the lease. None when it is not
            visible here.
        sharers: the other processes that hold the lease, as far as they are visible: its children.
            They keep it when the claimer has ended.
        inside: the processes that have claimed the GPU inside the claim.
    """

    gone: bool | None
    sharers: tuple[ProcessInfo, ...] = ()
    inside: tuple[ProcessInfo, ...] = ()


class Kind(str, Enum):
    """What a process does on a GPU."""

    COMPUTE = "compute"
    """It has a CUDA context."""
    GRAPHICS = "graphics"
    """It uses the GPU for graphics."""
    OPEN = "open"
    """It has the GPU's device file open, and the driver does not list it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use(ProcessInfo):
    """A process on a GPU; ``memory`` is in bytes, None when unknown."""

    kind: Kind
    memory: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiter(ProcessInfo):
    """A process that waits for GPUs.

    Attributes:
        wanted: how many GPUs it requests; None when unknown.
        gpus: of which, by UUID; empty is any.
        well: whether it is neither stopped nor stuck; otherwise other waiters pass it.
    """

    wanted: int | None
    gpus: tuple[str, ...]
    well: bool


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
        reading, device = self.reading, self.reading.device
        return {
            **{key: getattr(device, key) for key in ("index", "uuid", "pci_bus_id", "name")},
            "parent": device.parent,
            "free": self.busy is None,
            "busy": self.busy,
            "message": self.message,
            **{f"memory_{key}": getattr(reading, key) for key in ("used", "free", "total")},
            "utilization": reading.utilization,
            "compute_mode": reading.compute_mode,
            "lease": None if self.lease is None else asdict(self.lease),
            "kept_for": None if self.kept_for is None else asdict(self.kept_for),
            "processes": [asdict(use) for use in self.uses],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What ``gpuaff status`` shows: all devices, the waiters in their order, and warnings."""

    gpus: tuple[GpuStatus, ...]
    waiting: tuple[Waiter, ...]
    warnings: tuple[Notice, ...]

    def to_dict(self) -> dict[str, Any]:
        """The status as JSON has it; ``docs/status-json.md`` has the schema."""
        return {
            "gpus": [gpu.to_dict() for gpu in self.gpus],
            "waiting": [
                {"position": place, **asdict(waiter)}
                for place, waiter in enumerate(self.waiting, 1)
            ],
            "warnings": [warning.to_dict() for warning in self.warnings],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything that was observed.

    Attributes:
        readings: what the driver reports of each device.
        usages: whether each is free; in the same order.
        entries: the registry.
        writers: the process of each entry, by slot.
        living: the slots whose process lives, and is visible here.
        stuck: the slots of waiters that are stopped or stuck.
        holders: the processes that hold each device's lease, by UUID: the one that took it (None:
            not visible here), then those that share it.
        opened: the processes that have each GPU's device file open, by its index.
        processes: the visible ones of these and of those that the driver lists, by id.
        notices: what could not be observed.
    """

    readings: tuple[DeviceReading, ...] = ()
    usages: tuple[Usage, ...] = ()
    entries: tuple[Entry, ...] = ()
    writers: Mapping[int, ProcessInfo]
    living: Collection[int] = ()
    stuck: Collection[int] = ()
    holders: Mapping[str, Sequence[int | None]]
    opened: Mapping[int, Collection[int]]
    processes: Mapping[int, ProcessInfo]
    notices: tuple[Notice, ...] = ()


def take_snapshot() -> Snapshot:
    """Observe the GPUs, their holders, and the queue. This changes nothing."""
    notices: list[Notice] = []
    entries = _entries(notices)
    usages, readings = _devices(entries, notices)
    devices = [reading.device for reading in readings]
    takers = {
        uuid: next((one.pid for one in found if one.pid is not None), None)
        for uuid, found in leases.holders(devices).items()
        if found
    }
    sharing, opened = _open_files([one for one in devices if one.uuid in takers], devices)
    holders = {uuid: (pid, *sharing.get(uuid, ())) for uuid, pid in takers.items()}
    if process_info(readings).me is None:
        notices.append(FOREIGN_PIDS)
    alive, waiting = living(entries), [entry for entry in entries if entry.waits]
    pids = {pid for found in (*holders.values(), *opened.values()) for pid in found}
    pids |= set() if FOREIGN_PIDS in notices else listed(readings)
    now = kernel.uptime()
    return Snapshot(
        readings=readings,
        usages=usages,
        entries=entries,
        writers={
            entry.slot: writer_of(
                entry,
                look_up(entry.pid) if entry.slot in alive and entry.pid else None,
                None if entry.uid is None else user_name(entry.uid),
            )
            for entry in entries
        },
        living=alive,
        stuck=stopped(waiting) | {one.slot for one in waiting if not queue.is_well(one, now)},
        holders=holders,
        opened=opened,
        processes={
            pid: found for pid in pids if pid is not None and (found := look_up(pid)) is not None
        },
        notices=tuple(notices),
    )


def _entries(notices: list[Notice]) -> tuple[Entry, ...]:
    try:
        return registry.entries()
    except LockDirectoryError as error:
        notices.append(Notice("board-unread", f"claims and waiters are not known: {error}"))
        return ()


def _devices(
    entries: Sequence[Entry], notices: list[Notice]
) -> tuple[tuple[Usage, ...], tuple[DeviceReading, ...]]:
    try:
        with open_session() as session:
            devices = session.devices()
            probe = Probe(session, devices, own_is_free=False, utilization=True)
            probe.look()
            notices += [Notice("nvml", note) for note in session.notes]
            bad = {
                one: f"{why}, so it cannot be claimed" for one, why in unclaimable(devices).items()
            }
            notices += [Notice("unclaimable", why) for why in dict.fromkeys(bad.values())]
            probe.evaluated(entries)
            usages = tuple(
                usage._replace(busy=Busy.UNREADABLE, message=bad[usage.device])
                if usage.busy is None and usage.device in bad
                else usage
                for usage in probe.described(entries)
            )
            return usages, probe.readings
    except NoDriverError as error:
        notices.append(Notice("no-driver", str(error)))
        return (), ()


def _open_files(
    leased: Sequence[Device], devices: Sequence[Device]
) -> tuple[dict[str, set[int]], dict[int, set[int]]]:
    """The processes that hold leases, by UUID, and that have device files open, by index."""
    uuids = {name: device.uuid for device in leased for name in leases.files_of(device)}
    gpu_files = device_files(kernel.Tree(), {one.pci_bus_id: one.index for one in devices})
    sharing: dict[str, set[int]] = {}
    opened: dict[int, set[int]] = {}
    for pid in kernel.process_ids():
        handles = kernel.handles_of(pid)
        for handle, name in handles.items():
            if name in uuids and kernel.holds_flock(pid, handle):
                sharing.setdefault(uuids[name], set()).add(pid)
        if pid != os.getpid():
            for name in gpu_files.keys() & handles.values():
                opened.setdefault(gpu_files[name], set()).add(pid)
    return sharing, opened


def status_of(snapshot: Snapshot) -> Status:
    """Evaluate a snapshot. Pure."""
    waiting = [entry for entry in snapshot.entries if entry.waits]
    waiting.sort(key=lambda entry: (entry.ticket, entry.slot))
    well = [entry for entry in waiting if entry.slot not in snapshot.stuck]
    pairs = zip(snapshot.readings, snapshot.usages, strict=True)
    return Status(
        gpus=tuple(_gpu(snapshot, reading, usage, well) for reading, usage in pairs),
        waiting=tuple(
            Waiter(
                **asdict(snapshot.writers[entry.slot]),
                wanted=entry.wanted,
                gpus=entry.devices,
                well=entry in well,
            )
            for entry in waiting
        ),
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
    kept_for = None if waiter is None else snapshot.writers[waiter.slot]
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
    holders = snapshot.holders.get(uuid, ())
    held = [entry for entry in snapshot.entries if not entry.waits]
    entry = next((entry for entry in held if uuid in entry.gpus), None)
    if not holders and entry is None:
        return None
    pid = next(iter(holders), None)
    if entry is None:
        claimer = replace(_process(snapshot, pid), since=None)  # the lease's age is not known
        gone = None if pid is None else pid not in snapshot.processes
        inside = []
    else:
        claimer = snapshot.writers[entry.slot]
        # The kernel shows the number of a process that was here, and nothing of other containers.
        was_here = pid is not None and pid == entry.pid
        gone = False if entry.slot in snapshot.living else True if was_here else None
        inside = [one for one in held if f"{entry.slot}/{uuid}" in one.gpus]
    # Where the claimer has ended, its number may be another process's by now.
    sharers = sorted(pid for pid in holders[1:] if pid and (gone or pid != claimer.pid))
    return LeaseStatus(
        **asdict(claimer),
        gone=gone,
        sharers=tuple(_process(snapshot, pid) for pid in sharers),
        inside=tuple(snapshot.writers[entry.slot] for entry in inside),
    )


def _uses(snapshot: Snapshot, reading: DeviceReading) -> Iterator[Use]:
    graphics = reading.graphics or {}
    # A process in both lists serves a display: it makes no GPU busy.
    compute = {p: memory for p, memory in (reading.compute or {}).items() if p not in graphics}
    is_foreign = FOREIGN_PIDS in snapshot.notices
    for kind, processes in ((Kind.COMPUTE, compute), (Kind.GRAPHICS, graphics)):
        for pid, memory in sorted(processes.items()):
            process = ProcessInfo(pid=pid) if is_foreign else _process(snapshot, pid)
            yield Use(**asdict(process), kind=kind, memory=memory)
    if not reading.device.is_mig:  # the device file is the whole GPU's
        # CUDA opens those of all visible GPUs; a listed process is on the GPU that lists it.
        opened = set(snapshot.opened.get(reading.device.index, ())) - listed(snapshot.readings)
        for pid in sorted(opened):
            yield Use(**asdict(_process(snapshot, pid)), kind=Kind.OPEN)


def _process(snapshot: Snapshot, pid: int | None) -> ProcessInfo:
    return snapshot.processes.get(pid or 0, ProcessInfo(pid=pid))
