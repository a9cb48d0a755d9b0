"""A real cpuset (cgroup version 1 or 2) for a test's processes; needs root."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_OLD = Path("/sys/fs/cgroup/cpuset")
_NEW = Path("/sys/fs/cgroup")

V1 = os.access(_OLD / "cgroup.procs", os.W_OK)
"""Whether it is version 1 that is used here."""

_TOP = _OLD if V1 else _NEW


class Cpuset:
    """A cpuset cgroup. Processes join it, and its CPUs can be changed under them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def set(self, cpus: Iterable[int]) -> None:
        """Grant these CPUs only."""
        (self.folder / "cpuset.cpus").write_text(",".join(map(str, sorted(cpus))))

    def join_command(self) -> list[str]:
        """A prefix that makes a command start inside."""
        procs = self.folder / "cgroup.procs"
        return ["sh", "-c", f'echo $$ > {procs} && exec "$0" "$@"']


def available() -> bool:
    """Whether this machine lets us make one."""
    if V1:
        return True
    try:
        if "cpuset" not in (_NEW / "cgroup.controllers").read_text().split():
            return False
        (_NEW / "cgroup.subtree_control").write_text("+cpuset")
    except OSError:
        return False
    return True


@contextmanager
def cpuset(cpus: Iterable[int]) -> Iterator[Cpuset]:
    """Make one that grants these CPUs, and remove it at the end."""
    folder = _TOP / f"gpuaff-test-{os.getpid()}-{time.monotonic_ns()}"
    folder.mkdir()
    try:
        if V1:
            (folder / "cpuset.mems").write_text((_TOP / "cpuset.mems").read_text().strip())
        made = Cpuset(folder)
        made.set(cpus)
        yield made
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    for pid in (folder / "cgroup.procs").read_text().split():
        with suppress(OSError):  # it has ended
            (_TOP / "cgroup.procs").write_text(pid)
    for _ in range(50):  # the kernel lets go of the dead a little later
        try:
            folder.rmdir()
        except OSError:
            time.sleep(0.02)
        else:
            return
