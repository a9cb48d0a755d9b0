"""What a test may do to this machine: be several users, mount, change the kernel's settings."""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

PROTECTED = Path("/proc/sys/fs/protected_regular")


@cache
def two_users() -> bool:
    """Whether we may become another user: root may, but for some containers' roots."""
    try:
        return subprocess.run(["true"], user=65533, group=65533, check=False).returncode == 0
    except OSError:
        return False


@cache
def mounts() -> bool:
    """Whether a file system can be mounted for one command alone."""
    try:
        return subprocess.run([*mounted("size=64k", "/mnt"), "true"], check=False).returncode == 0
    except OSError:
        return False


@cache
def pid_namespaces() -> bool:
    """Whether a command can have process ids, and a /proc, of its own."""
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "true"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def mounted(options: str, at: Path | str) -> Sequence[str]:
    """A prefix that makes a command, and nobody else, see a new file system in memory somewhere."""
    script = f'mount -t tmpfs -o {options} tmpfs "$0" && exec "$@"'
    return ["unshare", "-m", "sh", "-c", script, str(at)]


def protected_regular() -> bool:
    """Whether ``fs.protected_regular`` can be set here."""
    return os.access(PROTECTED, os.W_OK)


_of_all_tests: list[int] = []
"""A file that every test has locked: shared, or alone while it changes the system."""


@contextmanager
def beside_others(file: Path) -> Iterator[None]:
    """Let no test that runs at the same time change the system meanwhile."""
    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    _of_all_tests.append(handle)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH)
        yield
    finally:
        _of_all_tests.remove(handle)
        os.close(handle)


@contextmanager
def protected(level: int) -> Iterator[None]:
    """Set ``fs.protected_regular`` for a while; other tests wait."""
    for handle in _of_all_tests:
        fcntl.flock(handle, fcntl.LOCK_EX)
    before = PROTECTED.read_text()
    PROTECTED.write_text(str(level))
    try:
        yield
    finally:
        PROTECTED.write_text(before)
        for handle in _of_all_tests:
            fcntl.flock(handle, fcntl.LOCK_SH)
