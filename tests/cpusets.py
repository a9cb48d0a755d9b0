"""Real cgroups (version 1 or 2) for a test's processes: cpusets, quotas of CPU time; need root."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")

V1 = os.access(_ROOT / "cpuset/cgroup.procs", os.W_OK)
"""Whether cpusets are of version 1 here."""

_PERIOD = 100_000
"""Of a quota, in microseconds."""


def _top(controller: str) -> Path:
    old = _ROOT / controller
    return old if os.access(old / "cgroup.procs", os.W_OK) else _ROOT


def available(controller: str = "cpuset") -> bool:
    """Whether this machine lets us make one."""
    if _top(controller) != _ROOT:
        return True
    try:
        (_ROOT / "cgroup.subtree_control").write_text(f"+{controller}")
        return controller in (_ROOT / "cgroup.controllers").read_text().split()
    except OSError:
        return False


class Cpuset:
    """A cpuset cgroup. Processes join it, and its CPUs can be changed under them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def set(self, cpus: Iterable[int]) -> None:
        """Grant these CPUs only."""
        (self.folder / "cpuset.cpus").write_text(",".join(map(str, sorted(cpus))))

    def join_command(self) -> list[str]:
        """A prefix that makes a command start inside."""
        return _prefix(self.folder)


def _prefix(folder: Path) -> list[str]:
    return ["sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$0" "$@"']


@contextmanager
def cpuset(cpus: Iterable[int]) -> Iterator[Cpuset]:
    """Make one that grants these CPUs, and remove it at the end."""
    with _cgroup("cpuset") as folder:
        if V1:
            (folder / "cpuset.mems").write_text((folder.parent / "cpuset.mems").read_text().strip())
        made = Cpuset(folder)
        made.set(cpus)
        yield made


@contextmanager
def quota(cpus: float) -> Iterator[list[str]]:
    """A prefix that makes a command have so many CPUs' time."""
    granted = round(cpus * _PERIOD)
    with _cgroup("cpu") as folder:
        if folder.parent == _ROOT:
            (folder / "cpu.max").write_text(f"{granted} {_PERIOD}")
        else:
            (folder / "cpu.cfs_period_us").write_text(str(_PERIOD))
            (folder / "cpu.cfs_quota_us").write_text(str(granted))
        yield _prefix(folder)


@contextmanager
def _cgroup(controller: str) -> Iterator[Path]:
    folder = _top(controller) / f"gpuaff-test-{os.getpid()}-{time.monotonic_ns()}"
    folder.mkdir()
    try:
        yield folder
    finally:
        for pid in (folder / "cgroup.procs").read_text().split():
            with suppress(OSError):  # it has ended
                (folder.parent / "cgroup.procs").write_text(pid)
        for _ in range(100):  # the kernel lets go of the dead a little later
            with suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.02)
