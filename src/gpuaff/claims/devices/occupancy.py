"""Whether a device is free, and what uses it if not. Pure: it knows only its arguments.

The first rule that applies gives the reason:

1. It can never be claimed: it is lost, or denied to this process; its compute mode allows no
   process; it is smaller than requested.
2. Another claim holds its lease; for a MIG instance, the lease of its GPU counts as well.
3. Its compute mode allows one process, and one is there (cases E13, E16). Our processes count too,
   since CUDA would refuse a second one of ours as well: only this very process may go on. A
   process that also does graphics has a context, and counts.
4. Other processes compute on it (cases E4, E11). One that also does graphics serves a display, and
   does not count.
5. More than ``UNEXPLAINED`` bytes are in use that no listed process has (case E15: the driver does
   not list a process of another container).
6. It has too little free memory, or too high a utilization, for the request.

Rule 5 covers what the lists do not show. It does not apply where a display is active and no other
process computes: the lists show only part of a display's memory, and a machine's only GPU must be
claimable. Where the driver does not list compute processes, little memory in use is proof enough: a
context needs more. Where the memory in use is unknown, or that of some listed process, the lists
decide if they are complete, as in the first PID namespace; elsewhere the state is unknown.

The driver lists an exiting or ended process with what it still holds, so rule 4 finds it and
reports it as leaving; so does rule 2 where the lease's holder is exiting. Memory of a process that
is no longer listed is unexplained.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from gpuaff.claims.model import Busy, ComputeMode, Demand, Device, DeviceReading, Usage
from gpuaff.formatting import enumeration, printable, size

# Whether a device meets the requirements: its memory and its utilization. Pure.


def never_fits(reading: DeviceReading, demand: Demand) -> Usage | None:
    """Why a device can never meet the requirements; None when it can."""
    wanted, total = demand.min_free_memory, reading.total
    if wanted is not None and total is not None and total < wanted:
        why = f"has {size(total)} of memory in all, and {size(wanted)} are to be free"
        return _unfit(reading, Busy.SMALL, why, lasting=True)
    if demand.max_utilization is not None and reading.device.is_mig:
        why = "the driver tells of no MIG instance how hard it works (max_utilization)"
        return _unfit(reading, Busy.UNREADABLE, why, lasting=True)
    return None


def not_now(reading: DeviceReading, demand: Demand) -> Usage | None:
    """Why a device does not meet the requirements now; else None. An unknown value does not."""
    wanted, most = demand.min_free_memory, demand.max_utilization
    if wanted is not None and reading.free is None:
        why = "the driver does not tell how much memory is free (min_free_memory)"
        return _unfit(reading, Busy.UNREADABLE, why)
    if wanted is not None and reading.free is not None and reading.free < wanted:
        why = f"only {size(reading.free)} of memory are free, and {size(wanted)} are to be"
        return _unfit(reading, Busy.MEMORY_LOW, why)
    if most is not None and reading.utilization is None:
        why = "the driver does not tell how hard it works (max_utilization)"
        return _unfit(reading, Busy.UNREADABLE, why)
    if most is not None and reading.utilization is not None and reading.utilization > most:
        why = f"it works at {reading.utilization} %, and at most {most} % was asked for"
        return _unfit(reading, Busy.WORKING, why)
    return None


def _unfit(reading: DeviceReading, busy: Busy, why: str, *, lasting: bool = False) -> Usage:
    message = f"{reading.device}: {why}"
    return Usage(device=reading.device, busy=busy, message=message, lasting=lasting)


UNEXPLAINED = 64 << 20
"""Bytes in use that need no explanation. An idle H100 has 3 MiB in use, and a context 518 MiB."""

EXCLUSIVE = {
    ComputeMode.EXCLUSIVE_PROCESS: "exclusive process",
    ComputeMode.EXCLUSIVE_THREAD: "exclusive thread",
}
"""The compute modes that allow one process, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class People:
    """What is known of the processes that the driver lists.

    Attributes:
        own: those that leave a GPU free.
        ended: those that have ended, and are still listed.
        exiting: those that are exiting, and have not ended yet.
        me: this process, in the driver's numbers; None when unknown.
        first_namespace: whether the driver lists all processes, as in the first PID namespace.
            Elsewhere its lists may be empty, or their numbers mean other processes (case E15).
    """

    own: Collection[int] = frozenset()
    ended: Collection[int] = frozenset()
    exiting: Collection[int] = frozenset()
    me: int | None = None
    first_namespace: bool = True

    @property
    def leaving(self) -> frozenset[int]:
        """Those that will free what they hold on a GPU in a moment."""
        return frozenset(self.ended) | frozenset(self.exiting)


def judge(
    readings: Sequence[DeviceReading],
    *,
    people: People,
    leased: Mapping[str, str],
    ending: Collection[str] = (),
    names: Mapping[int, str] | None = None,
    demand: Demand | None = None,
) -> tuple[Usage, ...]:
    """Evaluate whether each device is free.

    Args:
        readings: what the driver reports of all devices of the machine.
        people: the processes that it lists.
        leased: the holders of leases, by UUID, each in one line (``train.py (pid 42) of alice
            since 10:32``; empty: unknown). Our own leases are missing. A partitioned (MIG) GPU is
            in it only when the lease of the whole GPU is held.
        ending: the leases whose holders are exiting, by UUID.
        names: processes in words; the message has the numbers of others.
        demand: the requirements of each device. Which ones are allowed is not checked here.

    Returns:
        In the order of the readings.
    """
    judging = _Judging(readings, people, leased, ending, {} if names is None else names, demand)
    return tuple(judging.of(reading) for reading in readings)


def listed(readings: Sequence[DeviceReading]) -> frozenset[int]:
    """All processes that the driver lists."""
    lists = [told for r in readings for told in (r.compute, r.graphics) if told is not None]
    return frozenset(pid for told in lists for pid in told)


def memory_of_listed(
    readings: Sequence[DeviceReading], device: Device
) -> tuple[int, frozenset[int]]:
    """The bytes of a device that listed processes have, and those whose amount is unknown.

    Parts of one GPU instance share its memory, so processes on any of them have some of it.

    Args:
        readings: what the driver reports of all devices of the machine.
        device: which one.
    """
    sharing = [r for r in readings if same_memory(r.device, device)]
    held = [part for reading in sharing for part in _memory_by_process(reading).items()]
    untold = frozenset(pid for pid, bytes_ in held if bytes_ is None)
    return sum(bytes_ or 0 for _, bytes_ in held), untold


class _Judging:
    """One call of :func:`judge`. A rule that does not apply returns None."""

    def __init__(
        self,
        readings: Sequence[DeviceReading],
        people: People,
        leased: Mapping[str, str],
        ending: Collection[str],
        names: Mapping[int, str],
        demand: Demand | None,
    ) -> None:
        self.readings = readings
        self.people = people
        self.own = frozenset(people.own)
        self.leased = leased
        self.ending = ending
        self.names = names
        self.demand = demand

    def of(self, reading: DeviceReading) -> Usage:
        demand = self.demand
        return (
            _never(reading)
            or (demand and never_fits(reading, demand))
            or self._lease(reading)
            or self._exclusive(reading)
            or self._processes(reading)
            or self._memory(reading)
            or (demand and not_now(reading, demand))
            or Usage(device=reading.device)
        )

    def _lease(self, reading: DeviceReading) -> Usage | None:
        device = reading.device
        whole = device.parent is not None and device.parent in self.leased
        if not whole and device.uuid not in self.leased:
            return None
        uuid = str(device.parent) if whole else device.uuid
        exiting = uuid in self.ending
        why = leased_by(self.leased[uuid], exiting=exiting)
        if whole:
            why = f"its GPU {device.index} is {why}"
        pids = _computing(reading) - self.own
        return _busy(reading, Busy.LEASED, why, pids=pids, leaving=exiting, exiting=exiting)

    def _exclusive(self, reading: DeviceReading) -> Usage | None:
        mode = reading.compute_mode
        there = frozenset(reading.compute or ()) - (self.own & {self.people.me})
        if mode not in EXCLUSIVE or not there:
            return None
        why = f"its compute mode ({EXCLUSIVE[mode]}) lets one process in, and has"
        return self._held(reading, Busy.EXCLUSIVE, why, there)

    def _processes(self, reading: DeviceReading) -> Usage | None:
        others = _computing(reading) - self.own
        return self._held(reading, Busy.PROCESSES, "in use by", others) if others else None

    def _held(self, reading: DeviceReading, busy: Busy, why: str, pids: frozenset[int]) -> Usage:
        leaving = pids <= self.people.leaving
        exiting = leaving and not pids <= frozenset(self.people.ended)
        if leaving:
            state = "exiting" if exiting else "ended"
            why = f"still listed by the driver, though {state}:"
        message = f"{why} {self._who(pids)}"
        return _busy(reading, busy, message, pids=pids, leaving=leaving, exiting=exiting)

    def _memory(self, reading: DeviceReading) -> Usage | None:
        dark = reading.compute is None
        if reading.display and not dark:
            return None
        if reading.used is None:
            return self._without_memory(reading)
        told, untold = memory_of_listed(self.readings, reading.device)
        rest = reading.used - told
        if rest <= UNEXPLAINED:
            return None
        if dark:
            why = f"{size(rest)} are in use, and the driver does not tell by whom"
            return _busy(reading, Busy.UNREADABLE if reading.display else Busy.MEMORY, why)
        if untold:
            if self.people.first_namespace:
                return None
            who = self._who(untold)
            why = f"{size(rest)} are in use, and the driver does not tell how much of it {who} has"
            return _busy(reading, Busy.UNREADABLE, why)
        hint = "a process that is ending?" if self.people.first_namespace else "another container?"
        why = f"{size(rest)} are in use that no visible process explains ({hint})"
        return _busy(reading, Busy.MEMORY, why)

    def _without_memory(self, reading: DeviceReading) -> Usage | None:
        """Where the memory in use is unknown: the lists decide, if they are complete."""
        if reading.compute is None:
            why = "the driver tells neither who computes on it nor how much memory is in use"
        elif self.people.first_namespace:
            return None
        else:
            why = (
                "the driver does not tell how much memory is in use, nor who computes on it from "
                "outside of this container"
            )
        return _busy(reading, Busy.UNREADABLE, why, because=reading.problems)

    def _who(self, pids: frozenset[int]) -> str:
        """Processes in words, those that still run first."""
        order = sorted(pids, key=lambda pid: (pid in self.people.leaving, pid))
        return enumeration([self.names.get(pid) or self._number(pid) for pid in order])

    def _number(self, pid: int) -> str:
        return f"pid {pid}" if self.people.first_namespace else f"what the driver calls pid {pid}"


def leased_by(who: str, *, exiting: bool) -> str:
    """The holder of a lease, for one line."""
    ends = ", which is exiting" if exiting else ""
    return f"leased by {printable(who) or 'somebody who has left no word'}{ends}"


def _never(reading: DeviceReading) -> Usage | None:
    """Why waiting does not help, whatever the requirements; None when it may."""
    why: tuple[Busy, str]
    if reading.lost:
        why = Busy.LOST, "the driver has lost it"
    elif reading.denied:
        why = Busy.DENIED, "this process may not use it"
    elif reading.compute_mode is ComputeMode.PROHIBITED:
        why = Busy.PROHIBITED, "its compute mode (prohibited) lets nobody in"
    else:
        return None
    because = reading.problems if reading.lost or reading.denied else ()
    return _busy(reading, *why, because=because, lasting=True)


def _busy(
    reading: DeviceReading,
    busy: Busy,
    why: str,
    *,
    pids: Collection[int] = (),
    leaving: bool = False,
    exiting: bool = False,
    lasting: bool = False,
    because: Sequence[str] = (),
) -> Usage:
    reason = f": {because[0]}" if because else ""
    return Usage(
        device=reading.device,
        busy=busy,
        pids=tuple(sorted(pids)),
        message=f"{reading.device}: {why}{reason}",
        leaving=leaving,
        exiting=exiting,
        lasting=lasting,
    )


def _computing(reading: DeviceReading) -> frozenset[int]:
    """The processes that compute on it, and do no graphics."""
    return frozenset(reading.compute or ()) - frozenset(reading.graphics or ())


def _memory_by_process(reading: DeviceReading) -> dict[int, int | None]:
    """The memory of each listed process; the same in both lists for one that is in both."""
    held = dict(reading.graphics or {})
    for pid, bytes_ in (reading.compute or {}).items():
        told = [value for value in (bytes_, held.get(pid)) if value is not None]
        held[pid] = max(told, default=None)
    return held


def same_memory(one: Device, other: Device) -> bool:
    """Whether they are one device, or parts of one GPU instance, which share its memory."""
    if one.uuid == other.uuid:
        return True
    where = (other.parent, other.gpu_instance)
    return None not in where and (one.parent, one.gpu_instance) == where
