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
from tests.processes import Program, run, stopped

LOCKER = """
import fcntl, os, resource, signal, subprocess, sys, time
from gpuaff.claims.locking import directory, leases, queue, registry
from gpuaff._system import descriptors, locks
from tests.programs.locking import *
"""
"""What a script may begin with that locks; imports come before another user, who may not read."""

A_USER, ANOTHER = 65534, 65533

two_users = pytest.mark.needs("two-users")


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
