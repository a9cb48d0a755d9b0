"""Looking at the devices: what the driver, the kernel and the board tell, put before the judge."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from gpuaff._system import kernel
from gpuaff.claims.devices.occupancy import People, judge, leased_by, listed
from gpuaff.claims.locking import leases
from gpuaff.claims.locking.leases import Holder
from gpuaff.claims.locking.queue import who
from gpuaff.claims.locking.registry import Entry, ending, living
from gpuaff.claims.model import Busy, Demand, Device, DeviceReading, Usage
from gpuaff.formatting import person

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuaff._system.nvml_usage import UsageSession

# Who the processes are that the driver lists: which are ours, which are leaving, their names.


_CUDA_OPENS = "/dev/nvidia-uvm"
"""What each process with a CUDA context has open, and one that only asks NVML has not."""


def people_on(readings: Sequence[DeviceReading], *, own_is_free: bool = True) -> People:
    """Who is who among the processes that the driver lists.

    Own are this process, what it has started, and what has started it: a parent that has made
    contexts and then starts ranks. Not what was started beside it: another rank of the job
    wants a GPU of its own.

    Outside of the first PID namespace the driver's numbers may be the host's, and happen to be
    those of processes here (case E15). So they count there only if each of them is here, and only
    one that has CUDA's device file open is taken for our own or named.

    Args:
        readings: what the driver lists.
        own_is_free: whether own processes count as free.
    """
    pids = listed(readings)
    first = kernel.in_first_pid_namespace()
    if not first and not _are_here(pids):
        return People(first_namespace=False)
    # First: one that ends between these two looks has ended in the second.
    exiting = frozenset(filter(kernel.is_exiting, pids))
    ended = frozenset(filter(kernel.has_ended, pids))
    own = frozenset(_relatives(pids)) if own_is_free else frozenset[int]()
    if not first:
        own = frozenset(filter(_computes, own))
    return People(
        own=own,
        ended=ended,
        exiting=exiting - ended,
        me=kernel.process_id(),
        first_namespace=first,
    )


def names_of(pids: Collection[int], people: People) -> dict[int, str]:
    """Processes in words, for messages; those that cannot be looked up are missing.

    It takes a while (psutil), so ask only when somebody is to be told.

    Args:
        pids: processes as the driver calls them.
        people: what is known of them: whether the numbers mean processes that are here.
    """
    if people.me is None:
        return {}
    sure = [pid for pid in pids if people.first_namespace or _computes(pid)]
    said = {pid: describe(pid) for pid in sure}
    return {pid: name for pid, name in said.items() if name is not None}


def describe(pid: int) -> str | None:
    """A process in words, with its own age.

    Returns:
        None when there is no such process, or it is not shown. What else it does not tell to this
        user is left out.
    """
    from gpuaff._system.processes import look_up

    found = look_up(pid)
    if found is None:
        return None
    return person(found.command, pid, user=found.user, since=found.started)


def describe_holder(pid: int, entry: Entry | None) -> str | None:
    """The holder of a lease in words, with the age of the lease where the board has that.

    Args:
        pid: the process.
        entry: what the board has of the lease; None where it has nothing.

    Returns:
        As :func:`describe`.
    """
    from gpuaff._system.processes import look_up

    found = look_up(pid)
    if found is None:
        return None
    since = None if entry is None else entry.since
    return person(found.command, pid, user=found.user, since=since)


def describe_writer(entry: Entry, *, since: float | None = None) -> str:
    """The process that has written on the board, in words: by /proc, else by what it has written.

    Args:
        entry: what it has written.
        since: when what is said of it began, in seconds since 1970; None says no age.
    """
    from gpuaff._system.processes import look_up, user_name

    alive = bool(living([entry]))
    found = look_up(entry.pid) if alive and entry.pid is not None else None
    command, user = (found.command, found.user) if found else (entry.text("name"), None)
    if user is None and entry.uid is not None:
        user = user_name(entry.uid)
    return person(command or "an unknown program", entry.pid, user=user, since=since)


def describe_waiter(entry: Entry) -> str:
    """A waiter in words, and for how many GPUs it waits."""
    wanted = "some" if entry.wanted is None else entry.wanted
    return f"{describe_writer(entry)}, who waits for {wanted} of them"


def _computes(pid: int) -> bool:
    """Whether a process has CUDA's device file open, as far as this user may see."""
    return _CUDA_OPENS in kernel.open_files(pid)


def _are_here(pids: Collection[int]) -> bool:
    return all(kernel.process_of(pid) == pid for pid in pids)


def _relatives(pids: Collection[int]) -> Iterator[int]:
    me = kernel.process_id()
    above = {me, *_ancestors(me)}
    for pid in pids:
        if pid in above or me in _ancestors(pid):
            yield pid


def _ancestors(pid: int) -> set[int]:
    """Who has started a process, and who has started that one; what is not shown ends it."""
    found: set[int] = set()
    parent = kernel.parent_of(pid)
    while parent is not None and parent not in found:
        found.add(parent)
        parent = kernel.parent_of(parent)
    return found


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
        self._people = HERE
        self._held: Mapping[str, str] = {}
        self._ending: frozenset[str] = frozenset()
        self._nothing_left = False
        self.readings: tuple[DeviceReading, ...] = ()

    @property
    def idle(self) -> frozenset[int]:
        """The whole GPUs that were free for anybody, by index, in question here or not."""
        judged = judge(self.readings, people=self._people, leased=self._held)
        return frozenset(
            one.device.index for one in judged if one.busy is None and not one.device.is_mig
        )

    def look(self) -> tuple[DeviceReading, ...]:
        """Ask the driver, and the kernel about the processes that it lists."""
        asks = self._demand is not None and self._demand.max_utilization is not None
        self.readings = self._session.look(utilization=asks)
        self._people = people_on(self.readings, own_is_free=self._own_is_free)
        return self.readings

    def usages(self, entries: Sequence[Entry]) -> tuple[Usage, ...]:
        """Look, and tell how the devices are used now, in words.

        Args:
            entries: what stands on the board.
        """
        self.prepare(entries)
        self.judged(entries)
        return self.in_words(entries)

    def prepare(self, entries: Sequence[Entry]) -> None:
        """Look for :meth:`judged`.

        Where all devices are leased the driver need not be asked: it answers slowly while others
        start CUDA.

        Args:
            entries: what stands on the board.
        """
        self._held, self._ending = _on_board(entries), ending(entries)
        self._nothing_left = all(device.uuid in self._held for device in self._devices)
        if not self._nothing_left:
            self.look()

    def judged(self, entries: Sequence[Entry]) -> tuple[Usage, ...]:
        """How the devices are used: as the driver told last, and as the board says now.

        Who holds a lease and is not on the board is found when the lease is tried: /proc/locks
        tells as well, but to read it stops all processors, 20 ms and more on a large machine.
        Processes are called by their numbers: to find their names takes longer than all the rest.

        Args:
            entries: what stands on the board.
        """
        if not self._nothing_left:
            self._held, self._ending = _on_board(entries), ending(entries)
        return self._judge(self._held, {})

    def in_words(self, entries: Sequence[Entry]) -> tuple[Usage, ...]:
        """What was judged last, with the processes' names: for those who are to be told.

        Args:
            entries: what stood on the board.
        """
        told = _told(_holders(self._devices), entries)
        held = {**self._held, **{uuid: words for uuid, words in told.items() if words}}
        return self._judge({**told, **held}, Names(self._people))

    def _judge(self, held: Mapping[str, str], names: Mapping[int, str]) -> tuple[Usage, ...]:
        if self._nothing_left:
            return tuple(
                _leased(device, held[device.uuid], exiting=device.uuid in self._ending)
                for device in self._devices
            )
        judged = judge(
            self.readings,
            people=self._people,
            leased=held,
            ending=self._ending,
            names=names,
            demand=self._demand,
        )
        by_device = {usage.device: usage for usage in judged}  # two may tell the same UUID
        return tuple(by_device[device] for device in self._devices)


def _on_board(entries: Sequence[Entry]) -> dict[str, str]:
    """Who says on the board that it holds a device, by UUID, in one line.

    A rank inside a claim holds what it has when that claim's process has died as well.
    """
    held = [entry for entry in entries if not entry.waits]
    inside = {uuid: who(entry) for entry in held for uuid in entry.devices}
    return {**inside, **{uuid: who(entry) for entry in held for uuid in entry.gpus}}


def _leased(device: Device, who_has_it: str, *, exiting: bool) -> Usage:
    message = f"{device}: {leased_by(who_has_it, exiting=exiting)}"
    return Usage(device=device, busy=Busy.LEASED, message=message, leaving=exiting, exiting=exiting)


def _holders(devices: Iterable[Device]) -> Mapping[str, tuple[Holder, ...]]:
    """Who has a lease of these devices, and of the GPUs that they are part of.

    No lock is taken to look.
    """
    asked = {device.uuid: device for device in devices}
    whole = {device.parent: whole_of(device) for device in asked.values() if device.parent}
    found = leases.holders([*asked.values(), *whole.values()])
    for uuid in whole:  # shared are the locks of its instances
        found[uuid] = tuple(holder for holder in found[uuid] if not holder.shared)
    return found


def _told(found: Mapping[str, Sequence[Holder]], entries: Sequence[Entry]) -> dict[str, str]:
    """Who holds a lease, by UUID, in one line."""
    on_board = {uuid: entry for entry in entries if not entry.waits for uuid in entry.gpus}
    return {
        uuid: _in_words(on_board.get(uuid), holders) for uuid, holders in found.items() if holders
    }


def whole_of(instance: Device) -> Device:
    """The GPU that a MIG instance is part of."""
    return Device(index=instance.index, uuid=str(instance.parent), pci_bus_id=instance.pci_bus_id)


def _in_words(entry: Entry | None, holders: Sequence[Holder]) -> str:
    """Who holds a lease: as the kernel tells, and since when, as the board does."""
    pid = next((holder.pid for holder in holders if holder.pid is not None), None)
    if pid is None:
        return "" if entry is None else who(entry)
    known = describe_holder(pid, entry)
    if known is not None:
        return known
    return f"pid {pid}" if entry is None else f"{who(entry)}, which has ended; children hold it"
