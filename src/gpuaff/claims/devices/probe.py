"""How devices are used: the answers of the driver, the kernel and the registry, evaluated."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from gpuaff._system import kernel
from gpuaff._system.interrupts import interruptible
from gpuaff._system.nvml import Session
from gpuaff._system.processes import ProcessInfo, look_up, user_name
from gpuaff.claims.devices.occupancy import ListedProcesses, evaluate, listed
from gpuaff.claims.locking import leases
from gpuaff.claims.locking.queue import who
from gpuaff.claims.locking.registry import Entry, ending, living
from gpuaff.claims.model import Demand, Device, DeviceReading, Usage
from gpuaff.formatting import process_in_words

_CUDA_OPENS = "/dev/nvidia-uvm"  # each process with a CUDA context does; NVML does not


# Own are this process, its descendants, and its ancestors: a parent that has made contexts and then
# starts ranks. Not its siblings: another rank of the job needs a GPU of its own.
#
# Outside of the first PID namespace the driver's numbers may be the host's, and happen to be those
# of other processes here (case E15). So they count there only if each of them exists here, and only
# one that has CUDA's device file open counts as own, or is named.
def process_info(readings: Sequence[DeviceReading], *, own_is_free: bool = True) -> ListedProcesses:
    """Which of the processes that the driver lists are own, exiting or ended."""
    pids = listed(readings)
    first = kernel.in_first_pid_namespace()
    if not first and any(kernel.process_of(pid) != pid for pid in pids):
        return ListedProcesses(first_namespace=False)
    # First: one that ends between these two looks has ended in the second.
    exiting = frozenset(filter(kernel.is_exiting, pids))
    ended = frozenset(filter(kernel.has_ended, pids))
    me, above = os.getpid(), {os.getpid(), *kernel.ancestors()}
    own = {pid for pid in pids if own_is_free and (pid in above or me in kernel.ancestors(pid))}
    return ListedProcesses(
        own={pid for pid in own if first or _computes(pid)},
        ended=ended,
        exiting=exiting - ended,
        me=me,
        first_namespace=first,
    )


def _computes(pid: int) -> bool:
    return _CUDA_OPENS in kernel.open_files(pid).values()


def names_of(pids: Iterable[int], processes: ListedProcesses) -> dict[int, str]:
    """Listed processes in words, for errors and waits: it takes a while (psutil)."""
    if processes.me is None:
        return {}
    sure = [pid for pid in pids if processes.first_namespace or _computes(pid)]
    return {pid: name for pid in sure if (name := describe(pid, with_age=True)) is not None}


def describe(pid: int | None, entry: Entry | None = None, *, with_age: bool = False) -> str | None:
    """``train.py (pid 42) of alice, for 3 h``: a process by /proc, else by its registry entry."""
    # The age is the entry's, or without one the process's own.
    is_gone = entry is not None and entry.pid == pid and not living([entry])
    found = None if pid is None or is_gone else look_up(pid)
    if entry is not None:
        found = writer_of(entry, found)
    if found is None:
        return None
    since = found.since if with_age else None
    return process_in_words(found.command, found.pid, user=found.user, since=since)


def writer_of(entry: Entry, found: ProcessInfo | None) -> ProcessInfo:
    """The process of an entry: itself where it was found, else by what it has written."""
    if found is None:
        user = None if entry.uid is None else user_name(entry.uid)
        found = ProcessInfo(pid=entry.pid, command=entry.name or None, user=user)
    return replace(found, since=entry.since)


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
        self._session, self._devices = session, devices
        self._demand, self._own_is_free = demand or Demand(), own_is_free
        self._utilization = utilization or self._demand.max_utilization is not None
        self._holders: Mapping[str, str] = {}
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

    # With names it takes longer than all the rest: to read /proc/locks stops all processors, 20 ms
    # and more on a large machine. A claim finds such a lease when it tries to take its own.
    def usages(self, entries: Sequence[Entry], *, named: bool = False) -> tuple[Usage, ...]:
        """How the devices are used, by the driver's last answer and by the registry now.

        With ``named`` messages name processes, and leases count that are not in the registry.
        """
        held = [entry for entry in entries if not entry.waits]
        # A rank inside a claim holds its GPUs also when the process of that claim has died.
        holders = {uuid: who(entry) for entry in held for uuid in entry.devices}
        holders |= {uuid: who(entry) for entry in held for uuid in entry.gpus}
        processes = self.processes
        if named:
            written = {uuid: entry for entry in held for uuid in entry.gpus}
            for uuid, pid in leases.holders(self._devices).items():
                found = describe_lease(pid, written.get(uuid))
                holders[uuid] = found or holders.get(uuid, "")
            processes = processes._replace(names=names_of(listed(self.readings), processes))
        self._holders = holders
        usages = evaluate(
            self.readings,
            processes=processes,
            leased=holders,
            ending=ending(entries),
            demand=self._demand,
        )
        by_device = {usage.device: usage for usage in usages}  # two may have the same UUID
        return tuple(by_device[device] for device in self._devices)


def describe_lease(pid: int | None, entry: Entry | None) -> str:
    """The process that holds a lease, by the kernel; its age is known to the registry only."""
    if entry is None:
        return describe(pid) or ("" if pid is None else f"pid {pid}")
    name = describe(entry.pid if pid is None else pid, entry, with_age=True)
    is_gone = pid is not None and pid == entry.pid and not living([entry])
    return f"{name}, which has ended; children hold it" if is_gone else str(name)
