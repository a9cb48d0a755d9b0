"""Processes that use the lock directory, as one user or another."""

from __future__ import annotations

import json
import os
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from gpuaff.claims.locking import registry
from gpuaff.claims.locking.registry import Entry
from gpuaff.claims.model import Device
from tests.processes import Program, run, stopped

LOCKER = """
import fcntl, os, resource, signal, subprocess, sys, time
from pathlib import Path
from gpuaff.claims.locking import directory, leases, queue, registry
from gpuaff.claims.locking.leases import Lease
from gpuaff.claims.model import Device
from gpuaff.errors import LockDirectoryError
from gpuaff._system import descriptors, locks

def become(uid):
    # Another user of the machine (root only).
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)

def gpu(number, address=None):
    return Device(index=number, uuid=f"GPU-{number}", pci_bus_id=address)

def instance(number, of=0):
    return Device(index=of, uuid=f"MIG-{number}", parent=f"GPU-{of}")

def leased(*devices):
    # A lease, or what is in the way.
    lease = Lease()
    taken = lease.take(devices)
    return lease if taken is None else str(taken)

def hear():
    return sys.stdin.readline().strip()

def refused(work):
    # What an error says.
    try:
        work()
    except LockDirectoryError as error:
        return str(error)
    return "not refused"
"""
"""What a script may begin with that locks; imports come before another user, who may not read."""

A_USER, ANOTHER = 65534, 65533

two_users = pytest.mark.needs("two-users")


def gpu(number: int, address: str | None = None) -> Device:
    """A GPU without a directory in sysfs, unless it is told."""
    return Device(index=number, uuid=f"GPU-{number}", pci_bus_id=address)


def instance(number: int, *, of: int = 0) -> Device:
    """A MIG instance."""
    return Device(index=of, uuid=f"MIG-{number}", parent=f"GPU-{of}")


def written(record: Mapping[str, Any], *, slot: int = 1, waits: bool = True, **more: Any) -> Entry:
    """The entry of a process that has written this record."""
    found = registry._parsed(json.dumps(record).encode())
    assert found is not None
    return Entry(slot=slot, waits=waits, **more, **found)


def here() -> dict[str, str]:
    """The variables of this test's lock directory, for others."""
    return {"GPUAFF_LOCK_DIR": os.environ["GPUAFF_LOCK_DIR"]}


def said(script: str, *, uid: int | None = None, prefix: Sequence[str] = ()) -> str:
    """What a script printed, run as another user."""
    change = "" if uid is None else f"become({uid})\n"
    script = f"{LOCKER}\n{change}{textwrap.dedent(script)}"
    done = run(script, env=here(), prefix=prefix)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@contextmanager
def locker(script: str, *, uid: int | None = None, prefix: Sequence[str] = ()) -> Iterator[Program]:
    """A script that talks with the test."""
    change = "" if uid is None else f"become({uid})\n"
    script = f"{LOCKER}\n{change}{textwrap.dedent(script)}"
    with stopped(script, env=here(), prefix=prefix) as process:
        yield process


def can_lease(device: str = "gpu(0)", *, prefix: Sequence[str] = ()) -> bool:
    """Whether another process could have a device now."""
    return said(f"print(isinstance(leased({device}), Lease))", prefix=prefix) == "True"


def until(happened: Callable[[], bool], *, within: float = 20) -> float:
    """Wait for something that is about to happen; how long that took."""
    start = time.monotonic()
    while not happened():
        assert time.monotonic() - start < within
        time.sleep(0.002)
    return time.monotonic() - start
