"""Whether a device is free, and what uses it if not. Pure: it knows only its arguments.

The first rule that applies gives the reason:

1. It can never be claimed: it is lost; its compute mode allows no process; it is smaller than
   requested.
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

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gpuaff.claims.model import Busy, ComputeMode, Demand, Device, DeviceReading, Usage
from gpuaff.formatting import enumeration, size
from gpuaff.notices import printable

UNEXPLAINED = 64 << 20
"""Bytes in use that need no explanation. An idle H100 has 3 MiB in use, and a context 518 MiB."""

EXCLUSIVE = {
    ComputeMode.EXCLUSIVE_PROCESS: "exclusive process",
    ComputeMode.EXCLUSIVE_THREAD: "exclusive thread",
}
"""The compute modes that allow one process, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedProcesses:
    """What is known of the processes that the driver lists.

    Attributes:
        own: those that leave a GPU free.
        ended: those that have ended, and are still listed.
        exiting: those that are exiting, and have not ended yet.
        me: this process, in the driver's numbers; None when unknown.
        first_namespace: whether the driver lists all processes, as in the first PID namespace.
            Elsewhere its lists may be empty, or their numbers mean other processes (case E15).
        names: processes in words, as far as they were looked up.
    """

    own: Collection[int] = frozenset()
    ended: Collection[int] = frozenset()
    exiting: Collection[int] = frozenset()
    me: int | None = None
    first_namespace: bool = True
    names: Mapping[int, str] = field(default_factory=dict)

    @property
    def leaving(self) -> frozenset[int]:
        """Those that will free what they hold on a GPU in a moment."""
        return frozenset(self.ended) | frozenset(self.exiting)

    def in_words(self, pids: Iterable[int]) -> str:
        """Some of them in words, those that still run first."""
        leaving = self.leaving
        number = "pid {}" if self.first_namespace else "what the driver calls pid {}"
        order = sorted(pids, key=lambda pid: (pid in leaving, pid))
        return enumeration([self.names.get(pid) or number.format(pid) for pid in order])


def evaluate(
    readings: Sequence[DeviceReading],
    *,
    processes: ListedProcesses,
    leased: Mapping[str, str],
    ending: Collection[str] = (),
    demand: Demand | None = None,
) -> tuple[Usage, ...]:
    """Evaluate whether each device is free.

    Args:
        readings: what the driver reports of all devices of the machine.
        processes: the processes that it lists.
        leased: the holders of leases, by UUID, each in one line (``train.py (pid 42) of alice, for
            3 h``; empty: unknown). Our own leases are missing. A partitioned (MIG) GPU is in it
            only when the lease of the whole GPU is held.
        ending: the leases whose holders are exiting, by UUID.
        demand: the requirements of each device. Which ones are allowed is not checked here.

    Returns:
        In the order of the readings.
    """
    demand = demand or Demand()
    return tuple(
        _never(reading, demand)
        or _lease(reading, leased, ending, processes)
        or _exclusive(reading, processes)
        or _processes(reading, processes)
        or _memory(reading, readings, processes)
        or _not_now(reading, demand)
        or Usage(device=reading.device)
        for reading in readings
    )


def listed(readings: Iterable[DeviceReading]) -> frozenset[int]:
    """All processes that the driver lists."""
    return frozenset().union(*((*(r.compute or ()), *(r.graphics or ())) for r in readings))


def memory_of_listed(
    readings: Sequence[DeviceReading], device: Device
) -> tuple[int, frozenset[int]]:
    """The bytes of a device that listed processes have, and those whose amount is unknown.

    Parts of one GPU instance share its memory, so processes on any of them have some of it.

    Args:
        readings: what the driver reports of all devices of the machine.
        device: which one.
    """
    known, unknown = 0, set()
    for reading in readings:
        if not same_memory(reading.device, device):
            continue
        compute, graphics = reading.compute or {}, reading.graphics or {}
        for pid in {*compute, *graphics}:  # one that is in both has the same memory in both
            held = [
                bytes_ for bytes_ in (compute.get(pid), graphics.get(pid)) if bytes_ is not None
            ]
            known += max(held, default=0)
            unknown |= set() if held else {pid}
    return known, frozenset(unknown)


def same_memory(one: Device, other: Device) -> bool:
    """Whether they are one device, or parts of one GPU instance, which share its memory."""
    if one.uuid == other.uuid:
        return True
    where = (other.parent, other.gpu_instance)
    return None not in where and (one.parent, one.gpu_instance) == where


def leased_by(who: str, *, exiting: bool) -> str:
    """The holder of a lease, for one line."""
    ends = ", which is exiting" if exiting else ""
    return f"leased by {printable(who) or 'an unknown process'}{ends}"


# ---- the rules: each returns None where it does not apply ----------------------------------------


def _never(reading: DeviceReading, demand: Demand) -> Usage | None:
    wanted, total = demand.min_free_memory, reading.total
    if reading.lost:
        busy, why = Busy.LOST, ": ".join(["the driver has lost it", *reading.problems[:1]])
    elif reading.compute_mode is ComputeMode.PROHIBITED:
        busy, why = Busy.PROHIBITED, "its compute mode (prohibited) allows no process"
    elif wanted is not None and total is not None and total < wanted:
        busy, why = Busy.SMALL, f"has {size(total)} in total; {size(wanted)} free were requested"
    elif demand.max_utilization is not None and reading.device.is_mig:
        busy = Busy.UNREADABLE
        why = "the driver does not report the utilization of MIG instances (max_utilization)"
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
    whole = device.parent is not None and device.parent in leased
    uuid = str(device.parent) if whole else device.uuid
    if uuid not in leased:
        return None
    exiting = uuid in ending
    of_whole = f"its GPU {device.index} is " if whole else ""
    why = f"{of_whole}{leased_by(leased[uuid], exiting=exiting)}"
    pids = _computing(reading).difference(processes.own)
    return _busy(reading, Busy.LEASED, why, pids, leaving=exiting, exiting=exiting)


def _exclusive(reading: DeviceReading, processes: ListedProcesses) -> Usage | None:
    mode = reading.compute_mode
    there = frozenset(reading.compute or ())
    if processes.me in processes.own:
        there -= {processes.me}
    if mode not in EXCLUSIVE or not there:
        return None
    return _used(
        reading, Busy.EXCLUSIVE, f"in {EXCLUSIVE[mode]} mode and used by", there, processes
    )


def _processes(reading: DeviceReading, processes: ListedProcesses) -> Usage | None:
    others = _computing(reading).difference(processes.own)
    return _used(reading, Busy.PROCESSES, "in use by", others, processes) if others else None


def _used(
    reading: DeviceReading, busy: Busy, why: str, pids: frozenset[int], processes: ListedProcesses
) -> Usage:
    leaving = pids <= processes.leaving
    exiting = leaving and not pids <= frozenset(processes.ended)
    if leaving:
        why = f"still listed by the driver, though {'exiting' if exiting else 'ended'}:"
    message = f"{why} {processes.in_words(pids)}"
    return _busy(reading, busy, message, pids, leaving=leaving, exiting=exiting)


def _memory(
    reading: DeviceReading, readings: Sequence[DeviceReading], processes: ListedProcesses
) -> Usage | None:
    has_list, is_complete = reading.compute is not None, processes.first_namespace
    if reading.display and has_list:
        return None
    if reading.used is None:
        return None if has_list and is_complete else _no_memory(reading)
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


def _no_memory(reading: DeviceReading) -> Usage:
    missing = "the processes outside of this container"
    if reading.compute is None:
        missing = "the compute processes"
    why = f"the driver reports neither the memory in use nor {missing}"
    return _busy(reading, Busy.UNREADABLE, ": ".join([why, *reading.problems[:1]]))


def _not_now(reading: DeviceReading, demand: Demand) -> Usage | None:
    """An unknown value does not meet a requirement."""
    wanted, most = demand.min_free_memory, demand.max_utilization
    busy = Busy.UNREADABLE
    if wanted is not None and reading.free is None:
        why = "the driver does not report the free memory (min_free_memory)"
    elif wanted is not None and reading.free is not None and reading.free < wanted:
        busy, why = (
            Busy.MEMORY_LOW,
            f"only {size(reading.free)} are free; {size(wanted)} were requested",
        )
    elif most is not None and reading.utilization is None:
        why = "the driver does not report the utilization (max_utilization)"
    elif most is not None and reading.utilization is not None and reading.utilization > most:
        busy, why = (
            Busy.WORKING,
            f"its utilization, {reading.utilization} %, exceeds max_utilization ({most} %)",
        )
    else:
        return None
    return _busy(reading, busy, why)


def _busy(
    reading: DeviceReading,
    busy: Busy,
    why: str,
    pids: Collection[int] = (),
    *,
    leaving: bool = False,
    exiting: bool = False,
    lasting: bool = False,
) -> Usage:
    return Usage(
        device=reading.device,
        busy=busy,
        pids=tuple(sorted(pids)),
        message=f"{reading.device}: {why}",
        leaving=leaving,
        exiting=exiting,
        lasting=lasting,
    )


def _computing(reading: DeviceReading) -> frozenset[int]:
    """The processes that compute on it, and do no graphics."""
    return frozenset(reading.compute or ()) - frozenset(reading.graphics or ())
