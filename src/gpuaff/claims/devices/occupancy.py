"""Whether a device is free, and what uses it if not. Pure: it knows only its arguments.

The first rule that applies gives the reason: it can never be claimed; another claim holds its
lease; its compute mode allows one process, and one is there; other processes compute on it; memory
is in use that no listed process has; it does not meet the requirements now.

The driver lists exiting and ended processes with what they still hold: those make a device busy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import NamedTuple

from gpuaff.claims.model import Busy, ComputeMode, Demand, Device, DeviceReading, Usage
from gpuaff.formatting import enumeration, printable, size

# Bytes in use that need no explanation. An idle H100 has 3 MiB in use, and a context 518 MiB.
UNEXPLAINED = 64 << 20

# The compute modes that allow one process, in words.
EXCLUSIVE = {
    ComputeMode.EXCLUSIVE_PROCESS: "exclusive process",
    ComputeMode.EXCLUSIVE_THREAD: "exclusive thread",
}


class ListedProcesses(NamedTuple):
    """What is known of the processes that the driver lists."""

    own: AbstractSet[int] = frozenset()  # those that leave a GPU free
    ended: AbstractSet[int] = frozenset()
    exiting: AbstractSet[int] = frozenset()  # those that have not ended yet
    me: int | None = None  # this process, in the driver's numbers; None when unknown
    # Whether it lists all processes, as in the first PID namespace. Elsewhere its lists may be
    # empty, or their numbers mean other processes (case E15).
    first_namespace: bool = True
    names: Mapping[int, str] = MappingProxyType({})  # in words, as far as they were looked up

    @property
    def leaving(self) -> AbstractSet[int]:
        """Those that will free what they hold on a GPU in a moment."""
        return self.ended | self.exiting

    def in_words(self, pids: Iterable[int]) -> str:
        """Some of them in words, those that still run first."""
        number = "pid {}" if self.first_namespace else "what the driver calls pid {}"
        order = sorted(pids, key=lambda pid: (pid in self.leaving, pid))
        return enumeration([self.names.get(pid) or number.format(pid) for pid in order])


def evaluate(
    readings: Sequence[DeviceReading],
    *,
    processes: ListedProcesses,
    leased: Mapping[str, str],
    ending: Collection[str] = (),
    demand: Demand | None = None,
) -> tuple[Usage, ...]:
    """Evaluate whether each device of the machine is free.

    ``leased`` has the holders of others' leases by UUID, in a line each (empty: unknown), a MIG
    GPU only when it is leased whole; ``ending`` those whose holders are exiting.
    """
    demand = demand or Demand()
    return tuple(
        _never(reading, demand)
        or _lease(reading, leased, ending, processes)
        or _in_use(reading, processes)
        or _memory(reading, readings, processes)
        or _not_now(reading, demand)
        or Usage(device=reading.device)
        for reading in readings
    )


def listed(readings: Iterable[DeviceReading]) -> frozenset[int]:
    """All processes that the driver lists."""
    return frozenset().union(*((*(r.compute or ()), *(r.graphics or ())) for r in readings))


def memory_of_listed(readings: Sequence[DeviceReading], device: Device) -> tuple[int, set[int]]:
    """The bytes of a device that listed processes have, and those whose amount is unknown."""
    known, unknown = 0, set[int]()
    for reading in readings:
        if not same_memory(reading.device, device):
            continue
        compute, graphics = reading.compute or {}, reading.graphics or {}
        for pid in {*compute, *graphics}:  # one that is in both has the same memory in both
            held = {compute.get(pid), graphics.get(pid)} - {None}
            known += max(filter(None, held), default=0)
            unknown |= set() if held else {pid}
    return known, unknown


def same_memory(one: Device, other: Device) -> bool:
    """Whether they are one device, or parts of one GPU instance, which share its memory."""
    if one.uuid == other.uuid:
        return True
    where = (other.parent, other.gpu_instance)
    return None not in where and (one.parent, one.gpu_instance) == where


def _never(reading: DeviceReading, demand: Demand) -> Usage | None:
    wanted, total = demand.min_free_memory, reading.total
    if reading.lost:
        busy, why = Busy.LOST, ": ".join(["the driver has lost it", *reading.problems[:1]])
    elif reading.compute_mode is ComputeMode.PROHIBITED:
        busy, why = Busy.PROHIBITED, "its compute mode (prohibited) allows no process"
    elif wanted is not None and total is not None and total < wanted:
        busy, why = Busy.SMALL, f"has {size(total)} in total; {size(wanted)} free were requested"
    elif demand.max_utilization is not None and reading.device.is_mig:
        why = "the driver does not report the utilization of MIG instances (max_utilization)"
        busy = Busy.UNREADABLE
    else:
        return None
    return _busy(reading, busy, why, lasting=True)


def _lease(
    reading: DeviceReading,
    leased: Mapping[str, str],
    ending: Collection[str],
    processes: ListedProcesses,
) -> Usage | None:
    device = reading.device
    of_whole, uuid = "", device.uuid
    if device.parent is not None and device.parent in leased:
        of_whole, uuid = f"its GPU {device.index} is ", device.parent
    if uuid not in leased:
        return None
    why = f"{of_whole}leased by {printable(leased[uuid]) or 'an unknown process'}"
    usage = Usage.leased(device, why, exiting=uuid in ending)
    return usage._replace(pids=tuple(sorted(_computing(reading) - processes.own)))


def _in_use(reading: DeviceReading, processes: ListedProcesses) -> Usage | None:
    mode = reading.compute_mode
    there, busy, why = _computing(reading) - processes.own, Busy.PROCESSES, "in use by"
    if mode in EXCLUSIVE:
        # CUDA would refuse a second process of ours as well: only this very one may go on. One that
        # also does graphics has a context, and counts (cases E13, E16).
        there = frozenset(reading.compute or ()) - (processes.own & {processes.me})
        busy, why = Busy.EXCLUSIVE, f"in {EXCLUSIVE[mode]} mode and used by"
    if not there:
        return None
    leaving = there <= processes.leaving
    exiting = leaving and not there <= processes.ended
    if leaving:
        why = f"still listed by the driver, though {'exiting' if exiting else 'ended'}:"
    message = f"{why} {processes.in_words(there)}"
    return _busy(reading, busy, message, there, leaving=leaving, exiting=exiting)


def _computing(reading: DeviceReading) -> frozenset[int]:
    """The processes that compute on it. One that also does graphics serves a display."""
    return frozenset(reading.compute or ()) - frozenset(reading.graphics or ())


def _memory(
    reading: DeviceReading, readings: Sequence[DeviceReading], processes: ListedProcesses
) -> Usage | None:
    """What the lists do not show (case E15), as far as they or the memory in use are complete."""
    has_list, is_complete = reading.compute is not None, processes.first_namespace
    if reading.display and has_list:
        return None  # they show only part of its memory, and an only GPU must be claimable
    if reading.used is None:
        if has_list and is_complete:
            return None
        missing = "processes outside of this container" if has_list else "compute processes"
        why = f"the driver reports neither the memory in use nor the {missing}"
        return _busy(reading, Busy.UNREADABLE, ": ".join([why, *reading.problems[:1]]))
    known, unknown = memory_of_listed(readings, reading.device)
    rest = reading.used - known
    if rest <= UNEXPLAINED or (has_list and unknown and is_complete):
        return None
    busy = Busy.MEMORY
    if not has_list:
        why = ", and the driver does not list compute processes"
        busy = Busy.UNREADABLE if reading.display else Busy.MEMORY
    elif unknown:
        why = f", and the driver does not report how much {processes.in_words(unknown)} uses of it"
        busy = Busy.UNREADABLE
    else:
        hint = "a process that is ending?" if is_complete else "another container?"
        why = f" that no visible process explains ({hint})"
    return _busy(reading, busy, f"{size(rest)} are in use{why}")


def _not_now(reading: DeviceReading, demand: Demand) -> Usage | None:
    wanted, most = demand.min_free_memory, demand.max_utilization
    if wanted is not None:
        if reading.free is None:
            why = "the driver does not report the free memory (min_free_memory)"
            return _busy(reading, Busy.UNREADABLE, why)
        if reading.free < wanted:
            why = f"only {size(reading.free)} are free; {size(wanted)} were requested"
            return _busy(reading, Busy.MEMORY_LOW, why)
    if most is not None:
        if reading.utilization is None:
            why = "the driver does not report the utilization (max_utilization)"
            return _busy(reading, Busy.UNREADABLE, why)
        if reading.utilization > most:
            why = f"its utilization, {reading.utilization} %, exceeds max_utilization ({most} %)"
            return _busy(reading, Busy.WORKING, why)
    return None


def _busy(
    reading: DeviceReading, busy: Busy, why: str, pids: Collection[int] = (), **state: bool
) -> Usage:
    message, pids = f"{reading.device}: {why}", tuple(sorted(pids))
    return Usage(device=reading.device, busy=busy, pids=pids, message=message, **state)


# In seconds. The driver lists ended processes, and their memory, for another 0.10 to 0.15 s.
SETTLES = 1.0
# While a process is still exiting. It takes 0.1 to 0.5 s on four H200, and for each 16 GiB of the
# host's memory that it has in small pages about a second more. One that takes longer hangs, in the
# driver or on a file system, and may do so for ever.
EXITS = 10.0
STEP = 0.03  # between two looks


class Settling:
    """Decides how long to look again at GPUs whose processes are about to end. Pure."""

    # The kernel ends a process in steps: it gives back memory, then files and with them locks and
    # contexts, and only then is it a zombie. The driver lists it for ``settles`` seconds longer.
    def __init__(self, settles: float = SETTLES) -> None:
        self._settles = settles
        self._since: float | None = None
        self._exited = 0.0
        self._has_exiting = False

    # It goes on once more when a process was exiting at the last look, and what is left is not
    # leaving: it may have ended between two readings of that look.
    def goes_on(self, now: float, *, leaving: bool, exiting: bool) -> bool:
        """Whether to look again, by what was seen ``now``, in seconds of a monotonic clock."""
        had_exiting, self._has_exiting = self._has_exiting, leaving and exiting
        if not leaving:
            self._since = None
            return had_exiting
        if self._since is None:
            self._since = self._exited = now
        if exiting:
            self._exited = now
            return now < self._since + EXITS
        return now < self._exited + self._settles

    def is_short(self, now: float) -> bool:
        """Whether it has not lasted longer yet than the rest of an ended process."""
        return self._since is not None and now < self._since + self._settles
