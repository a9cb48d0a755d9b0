"""How devices are used: the answers of the driver, the kernel and the registry, evaluated."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from gpuaff._system import kernel
from gpuaff._system.interrupts import interruptible
from gpuaff._system.processes import look_up, user_name
from gpuaff.claims.devices.occupancy import ListedProcesses, evaluate, listed
from gpuaff.claims.locking import leases
from gpuaff.claims.locking.queue import who
from gpuaff.claims.locking.registry import Entry, ending, living
from gpuaff.claims.model import Demand, Device, DeviceReading, Usage
from gpuaff.formatting import process_in_words

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuaff._system.nvml import Session

_CUDA_OPENS = "/dev/nvidia-uvm"  # each process with a CUDA context does; NVML does not


def process_info(readings: Sequence[DeviceReading], *, own_is_free: bool = True) -> ListedProcesses:
    """Which of the processes that the driver lists are own, exiting or ended.

    Own are this process, its descendants, and its ancestors: a parent that has made contexts and
    then starts ranks. Not its siblings: another rank of the job needs a GPU of its own.

    Outside of the first PID namespace the driver's numbers may be the host's, and happen to be
    those of other processes here (case E15). So they count there only if each of them exists here,
    and only a process that has CUDA's device file open counts as own, or is named.
    """
    pids = listed(readings)
    first = kernel.in_first_pid_namespace()
    if not first and any(kernel.process_of(pid) != pid for pid in pids):
        return ListedProcesses(first_namespace=False)
    # First: one that ends between these two looks has ended in the second.
    exiting = frozenset(filter(kernel.is_exiting, pids))
    ended = frozenset(filter(kernel.has_ended, pids))
    me = kernel.process_id()
    above = {me, *_ancestors(me)}
    own = {pid for pid in pids if own_is_free and (pid in above or me in _ancestors(pid))}
    return ListedProcesses(
        own=own if first else set(filter(_computes, own)),
        ended=ended,
        exiting=exiting - ended,
        me=me,
        first_namespace=first,
    )


def _computes(pid: int) -> bool:
    """Whether a process has CUDA's device file open, as far as this user may see."""
    return _CUDA_OPENS in kernel.open_files(pid)


def _ancestors(pid: int) -> set[int]:
    """A process's parent, its parent and so on, as far as they are visible."""
    found: set[int] = set()
    parent = kernel.parent_of(pid)
    while parent is not None and parent not in found:
        found.add(parent)
        parent = kernel.parent_of(parent)
    return found


def names_of(pids: Iterable[int], processes: ListedProcesses) -> dict[int, str]:
    """Descriptions of listed processes, for messages; those that cannot be looked up are missing.

    It takes a while (psutil), so only an error or a wait calls it.
    """
    if processes.me is None:
        return {}
    sure = [pid for pid in pids if processes.first_namespace or _computes(pid)]
    return {pid: name for pid in sure if (name := describe(pid)) is not None}


def describe(pid: int) -> str | None:
    """``train.py (pid 42) of alice, for 3 h``, as far as this user may see; None when hidden."""
    found = look_up(pid)
    if found is None:
        return None
    return process_in_words(found.command, pid, user=found.user, since=found.started)


def describe_lease(pid: int | None, entry: Entry | None) -> str:
    """The process that holds a lease, with the lease's age, which only the registry knows.

    Empty when nothing is known.
    """
    found = None if pid is None else look_up(pid)
    if found is not None:
        since = None if entry is None else entry.since
        return process_in_words(found.command, pid, user=found.user, since=since)
    if entry is None:
        return "" if pid is None else f"pid {pid}"
    return who(entry) if pid is None else f"{who(entry)}, which has ended; children hold it"


def describe_writer(entry: Entry, *, since: float | None = None) -> str:
    """The process of a registry entry: by /proc, else by what it has written; with an age."""
    found = look_up(entry.pid) if living([entry]) and entry.pid is not None else None
    command, user = (found.command, found.user) if found else (entry.name, None)
    if user is None and entry.uid is not None:
        user = user_name(entry.uid)
    return process_in_words(command or "an unknown program", entry.pid, user=user, since=since)


def describe_waiter(entry: Entry) -> str:
    """A waiter, and how many GPUs it requests."""
    wanted = "some" if entry.wanted is None else entry.wanted
    return f"{describe_writer(entry)}, who waits for {wanted} of them"


class Probe:
    """Finds out how devices are used, as often as needed; keeps the driver's last answer."""

    def __init__(
        self,
        session: Session,
        devices: Sequence[Device],
        *,
        demand: Demand | None = None,
        own_is_free: bool = True,
        utilization: bool = False,
    ) -> None:
        """Of these devices, which must meet the demand; utilization also if none is demanded."""
        self._session, self._devices, self._demand = session, devices, demand
        self._own_is_free = own_is_free
        needed = demand is not None and demand.max_utilization is not None
        self._utilization = utilization or needed
        self._holders: Mapping[str, str] = {}
        self._exiting: Collection[str] = ()
        self._is_asked = True
        self.readings: tuple[DeviceReading, ...] = ()
        self.processes = ListedProcesses(me=0)

    @property
    def idle(self) -> frozenset[int]:
        """The indices of the whole GPUs that are free, candidates or not."""
        usages = evaluate(self.readings, processes=self.processes, leased=self._holders)
        free = (usage.device for usage in usages if usage.busy is None)
        return frozenset(device.index for device in free if not device.is_mig)

    def look(self) -> tuple[DeviceReading, ...]:
        """Ask the driver, and the kernel about the processes that it lists."""
        with interruptible():
            self.readings = self._session.look(utilization=self._utilization)
        self.processes = process_info(self.readings, own_is_free=self._own_is_free)
        return self.readings

    def usages(self, entries: Sequence[Entry]) -> tuple[Usage, ...]:
        """Look, and evaluate how the devices are used now, with the names of processes."""
        self.prepare(entries)
        self.evaluated(entries)
        return self.described(entries)

    def prepare(self, entries: Sequence[Entry]) -> None:
        """Look for :meth:`evaluated`, unless the registry shows a lease of each device.

        The driver answers slowly while other processes start CUDA.
        """
        self._read(entries)
        self._is_asked = any(device.uuid not in self._holders for device in self._devices)
        if self._is_asked:
            self.look()
        else:
            self.readings = tuple(DeviceReading(device=device) for device in self._devices)

    def evaluated(self, entries: Sequence[Entry]) -> tuple[Usage, ...]:
        """How the devices are used, by the driver's last answer and by the registry now.

        A lease that is not in the registry is found when this one is tried: /proc/locks has it as
        well, but reading that stops all processors, 20 ms and more on a large machine. Messages
        have the numbers of processes only: finding their names takes longer than all the rest.
        """
        if self._is_asked:
            self._read(entries)
        return self._evaluate(self._holders, self.processes)

    def described(self, entries: Sequence[Entry]) -> tuple[Usage, ...]:
        """The last usages, with the names of processes, and with leases outside the registry."""
        by_kernel = _holders_by_kernel(self._devices, entries)
        known = {uuid: name for uuid, name in by_kernel.items() if name}
        names = names_of(listed(self.readings), self.processes)
        holders = {**by_kernel, **self._holders, **known}
        return self._evaluate(holders, replace(self.processes, names=names))

    def _read(self, entries: Sequence[Entry]) -> None:
        """A rank inside a claim holds its GPUs also when the process of that claim has died."""
        held = [entry for entry in entries if not entry.waits]
        inside = {uuid: who(entry) for entry in held for uuid in entry.devices}
        self._holders = {**inside, **{uuid: who(entry) for entry in held for uuid in entry.gpus}}
        self._exiting = ending(entries)

    def _evaluate(
        self, holders: Mapping[str, str], processes: ListedProcesses
    ) -> tuple[Usage, ...]:
        usages = evaluate(
            self.readings,
            processes=processes,
            leased=holders,
            ending=self._exiting,
            demand=self._demand,
        )
        by_device = {usage.device: usage for usage in usages}  # two may have the same UUID
        return tuple(by_device[device] for device in self._devices)


def _holders_by_kernel(devices: Sequence[Device], entries: Sequence[Entry]) -> dict[str, str]:
    """The holders of leases of these devices, and of the GPUs that they are part of, by UUID."""
    wholes = {
        one.parent: Device(index=one.index, uuid=one.parent, pci_bus_id=one.pci_bus_id)
        for one in devices
        if one.parent is not None
    }
    written = {uuid: entry for entry in entries if not entry.waits for uuid in entry.gpus}
    described = {}
    for uuid, found in leases.holders([*devices, *wholes.values()]).items():
        # The locks of a MIG GPU's instances are shared.
        pids = [one.pid for one in found if not (uuid in wholes and one.shared)]
        if pids:
            pid = next((pid for pid in pids if pid is not None), None)
            described[uuid] = describe_lease(pid, written.get(uuid))
    return described
