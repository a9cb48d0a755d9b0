"""Whether a device fits what was asked for: its memory, and how hard it works. Pure."""

from __future__ import annotations

from gpuaff.claims.model import Busy, Demand, DeviceReading, Usage
from gpuaff.claims.words import size


def never_fits(reading: DeviceReading, demand: Demand) -> Usage | None:
    """Why a device can never be what was asked for; None when it can."""
    wanted, total = demand.min_free_memory, reading.total
    if wanted is not None and total is not None and total < wanted:
        why = f"has {size(total)} of memory in all, and {size(wanted)} are to be free"
        return _unfit(reading, Busy.SMALL, why, lasting=True)
    if demand.max_utilization is not None and reading.device.is_mig:
        why = "the driver tells of no MIG instance how hard it works (max_utilization)"
        return _unfit(reading, Busy.UNREADABLE, why, lasting=True)
    return None


def not_now(reading: DeviceReading, demand: Demand) -> Usage | None:
    """Why a device is not now what was asked for; None when it is. What is not told is not."""
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
