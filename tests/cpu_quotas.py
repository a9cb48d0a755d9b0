"""A real quota of CPU time (cgroup version 1 or 2) for a test's processes; needs root."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_OLD, _NEW = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")

_PERIOD = 100_000
"""Microseconds."""


def available() -> bool:
    """Whether this machine lets us make one."""
    if os.access(_OLD / "cgroup.procs", os.W_OK):
        return True
    try:
        if "cpu" not in (_NEW / "cgroup.controllers").read_text().split():
            return False
        (_NEW / "cgroup.subtree_control").write_text("+cpu")
    except OSError:
        return False
    return True


@contextmanager
def quota(cpus: float) -> Iterator[list[str]]:
    """Make one that grants so many CPUs' time.

    Gives a prefix that makes a command start inside.
    """
    is_old = os.access(_OLD / "cgroup.procs", os.W_OK)
    folder = (_OLD if is_old else _NEW) / f"gpuaff-test-{os.getpid()}-{time.monotonic_ns()}"
    folder.mkdir()
    try:
        time_granted = round(cpus * _PERIOD)
        if is_old:
            (folder / "cpu.cfs_period_us").write_text(str(_PERIOD))
            (folder / "cpu.cfs_quota_us").write_text(str(time_granted))
        else:
            (folder / "cpu.max").write_text(f"{time_granted} {_PERIOD}")
        procs = folder / "cgroup.procs"
        yield ["sh", "-c", f'echo $$ > {procs} && exec "$0" "$@"']
    finally:
        for _ in range(100):  # it is empty soon after its last process has ended
            with suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.05)
