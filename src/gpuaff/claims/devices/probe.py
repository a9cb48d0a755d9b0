"""How devices are used: the answers of the driver, the kernel and the registry, evaluated."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from gpuaff._system import kernel
from gpuaff._system.interrupts import interruptible
from gpuaff._system.processes import Process, look_up, user_name
from gpuaff.claims.devices.occupancy import People, judge, leased_by, listed
from gpuaff.claims.locking import leases
from gpuaff.claims.locking.leases import Holder
from gpuaff.claims.locking.queue import who
from gpuaff.claims.locking.registry import Entry, ending, living
from gpuaff.claims.model import Busy, Demand, Device, DeviceReading, Usage
from gpuaff.formatting import process_in_words

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuaff._system.nvml import Session

_CUDA_OPENS = "/dev/nvidia-uvm"
"""The device file that each process with a CUDA context has open; NVML does not open it."""


def process_info(readings: Sequence[DeviceReading], *, own_is_free: bool = True) -> People:
    """Which of the processes that the driver lists are own, exiting or ended.

    Own are this process, its descendants, and its ancestors: a parent that has made contexts and
    then starts ranks. Not its siblings: another rank of the job needs a GPU of its own.

    Outside of the first PID namespace the driver's numbers may be the host's, and happen to be
    those of other processes here (case E15). So they count there only if each of them exists here,
    and only a process that has CUDA's device file open counts as own, or is named.

    Args:
        readings: what the driver lists.
        own_is_free: whether to ignore own processes.
    """
    pids = listed(readings)
    first = kernel.in_first_pid_namespace()
    if not first and any(kernel.process_of(pid) != pid for pid in pids):
        return People(first_namespace=False)
    # First: one that ends between these two looks has ended in the second.
    exiting = frozenset(filter(kernel.is_exiting, pids))
    ended = frozenset(filter(kernel.has_ended, pids))
    own = frozenset(_relatives(pids)) if own_is_free else frozenset[int]()
    return People(
        own=own if first else frozenset(filter(_computes, own)),
        ended=ended,
        exiting=exiting - ended,
        me=kernel.process_id(),
        first_namespace=first,
    )


def _computes(pid: int) -> bool:
    """Whether a process has CUDA's device file open, as far as this user may see."""
    return _CUDA_OPENS in kernel.open_files(pid)


def _relatives(pids: Collection[int]) -> Iterator[int]:
    me = kernel.process_id()
    above = {me, *_ancestors(me)}
    return (pid for pid in pids if pid in above or me in _ancestors(pid))


def _ancestors(pid: int) -> set[int]:
    """A process's parent, its parent and so on, as far as they are visible."""
    found: set[int] = set()
    parent = kernel.parent_of(pid)
    while parent is not None and parent not in found:
        found.add(parent)
        parent = kernel.parent_of(parent)
    return found


def names_of(pids: Collection[int], people: People) -> dict[int, str]:
    """Descriptions of processes, for messages; those that cannot be looked up are missing.

    It takes a while (psutil), so only an error or a wait calls it.

    Args:
        pids: processes, in the driver's numbers.
        people: what is known of them: whether these numbers are valid here.
    """
    if people.me is None:
        return {}
    sure = [pid for pid in pids if people.first_namespace or _computes(pid)]
    names = {pid: describe(pid) for pid in sure}
    return {pid: name for pid, name in names.items() if name is not None}


def describe(pid: int) -> str | None:
    """``train.py (pid 42) of alice, for 3 h``, with the process's age.

    Returns:
        None when there is no such process, or it is hidden. What this user may not see of it is
        left out.
    """
    return _described(look_up(pid), lambda process: process.started)


def describe_holder(pid: int, entry: Entry | None) -> str | None:
    """As :func:`describe`, with the age of its lease, which only the registry knows."""
    return _described(look_up(pid), lambda _: None if entry is None else entry.since)


def _described(process: Process | None, since: Callable[[Process], float | None]) -> str | None:
    if process is None:
        return None
    return process_in_words(process.command, process.pid, user=process.user, since=since(process))


def describe_writer(entry: Entry, *, since: float | None = None) -> str:
    """The process of a registry entry: by /proc, else by what it has written.

    Args:
        entry: what it has written.
        since: its age is since then, in seconds since 1970; None shows none.
    """
    found = look_up(entry.pid) if living([entry]) and entry.pid is not None else None
    command, user = (found.command, found.user) if found else (entry.text("name"), None)
    if user is None and entry.uid is not None:
        user = user_name(entry.uid)
    return process_in_words(command or "an unknown program", entry.pid, user=user, since=since)


def describe_waiter(entry: Entry) -> str:
    """A waiter, and how many GPUs it requests."""
    wanted = "some" if entry.wanted is None else entry.wanted
    return f"{describe_writer(entry)}, who waits for {wanted} of them"


class Probe:
    """Finds out how devices are used, as often as needed.

    Attributes:
        readings: the last answer of the driver, for all devices of the machine.
        people: the processes in it.
    """

    def __init__(
        self,
        session: Session,
        devices: Sequence[Device],
        *,
        demand: Demand | None = None,
        own_is_free: bool = True,
        utilization: bool = False,
    ) -> None:
        """Nothing is known yet.

        Args:
            session: asks the driver.
            devices: those that are evaluated, in their order.
            demand: the requirements that each must meet.
            own_is_free: whether this process, its descendants and its ancestors are ignored.
            utilization: whether it is needed without a requirement.
        """
        self._session, self._devices, self._demand = session, devices, demand
        self._own_is_free = own_is_free
        needed = demand is not None and demand.max_utilization is not None
        self._utilization = utilization or needed
        self._holders: Mapping[str, str] = {}
        self._exiting: frozenset[str] = frozenset()
        self._all_leased = False
        self.readings: tuple[DeviceReading, ...] = ()
        self.people = People(me=0)

    @property
    def idle(self) -> frozenset[int]:
        """The indices of the whole GPUs that are free, candidates or not."""
        usages = judge(self.readings, people=self.people, leased=self._holders)
        return frozenset(
            one.device.index for one in usages if one.busy is None and not one.device.is_mig
        )

    def look(self) -> tuple[DeviceReading, ...]:
        """Ask the driver, and the kernel about the processes that it lists."""
        with interruptible():
            self.readings = self._session.look(utilization=self._utilization)
        self.people = process_info(self.readings, own_is_free=self._own_is_free)
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
        self._holders, self._exiting = _holders(entries), ending(entries)
        self._all_leased = all(device.uuid in self._holders for device in self._devices)
        if not self._all_leased:
            self.look()

    def evaluated(self, entries: Sequence[Entry]) -> tuple[Usage, ...]:
        """How the devices are used, by the driver's last answer and by the registry now.

        A lease that is not in the registry is found when this one is tried: /proc/locks has it as
        well, but reading that stops all processors, 20 ms and more on a large machine. Messages
        have the numbers of processes only: finding their names takes longer than all the rest.
        """
        if not self._all_leased:
            self._holders, self._exiting = _holders(entries), ending(entries)
        return self._judge(self._holders, {})

    def described(self, entries: Sequence[Entry]) -> tuple[Usage, ...]:
        """The last usages, with the names of processes, and with leases outside the registry."""
        by_kernel = _holders_by_kernel(self._devices, entries)
        known = {uuid: name for uuid, name in by_kernel.items() if name}
        names = names_of(listed(self.readings), self.people)
        return self._judge({**by_kernel, **self._holders, **known}, names)

    def _judge(self, holders: Mapping[str, str], names: Mapping[int, str]) -> tuple[Usage, ...]:
        if self._all_leased:
            return tuple(self._leased(device, holders[device.uuid]) for device in self._devices)
        usages = judge(
            self.readings,
            people=self.people,
            leased=holders,
            ending=self._exiting,
            names=names,
            demand=self._demand,
        )
        by_device = {usage.device: usage for usage in usages}  # two may have the same UUID
        return tuple(by_device[device] for device in self._devices)

    def _leased(self, device: Device, holder: str) -> Usage:
        exiting = device.uuid in self._exiting
        return Usage(
            device=device,
            busy=Busy.LEASED,
            message=f"{device}: {leased_by(holder, exiting=exiting)}",
            leaving=exiting,
            exiting=exiting,
        )


def _holders(entries: Sequence[Entry]) -> dict[str, str]:
    """The holders of leases by the registry, by UUID.

    A rank inside a claim holds its GPUs also when the process of that claim has died.
    """
    held = [entry for entry in entries if not entry.waits]
    inside = {uuid: who(entry) for entry in held for uuid in entry.devices}
    return {**inside, **{uuid: who(entry) for entry in held for uuid in entry.gpus}}


def _holders_by_kernel(devices: Sequence[Device], entries: Sequence[Entry]) -> dict[str, str]:
    """The holders of leases of these devices, and of the GPUs that they are part of, by UUID."""
    wholes = {
        one.parent: Device(index=one.index, uuid=one.parent, pci_bus_id=one.pci_bus_id)
        for one in devices
        if one.parent is not None
    }
    found = leases.holders([*devices, *wholes.values()])
    for uuid in wholes:  # the locks of its instances are shared
        found[uuid] = tuple(holder for holder in found[uuid] if not holder.shared)
    written = {uuid: entry for entry in entries if not entry.waits for uuid in entry.gpus}
    return {
        uuid: _describe_holders(written.get(uuid), holders)
        for uuid, holders in found.items()
        if holders
    }


def _describe_holders(entry: Entry | None, holders: Sequence[Holder]) -> str:
    """The process by the kernel, with the age of its lease by the registry."""
    pid = next((holder.pid for holder in holders if holder.pid is not None), None)
    if pid is None:
        return "" if entry is None else who(entry)
    known = describe_holder(pid, entry)
    if known is not None:
        return known
    return f"pid {pid}" if entry is None else f"{who(entry)}, which has ended; children hold it"
