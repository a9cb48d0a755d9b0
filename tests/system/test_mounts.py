"""What /proc/locks calls a file."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from gpuaff._system import locks
from gpuaff._system.locks import device_of, locked_name

# Taken down on Linux: a btrfs that is mounted at /mnt/m, where stat(2) told device 0:40, and
# /proc/locks "FLOCK ADVISORY WRITE 9931 00:27:258 0 EOF" (0x27 is 39).
FDINFO = """\
pos:\t0
flags:\t02100001
mnt_id:\t43
ino:\t258
lock:\t1: FLOCK  ADVISORY  WRITE 9931 00:27:258 0 EOF
"""
MOUNTINFO = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
43 27 0:39 / /mnt/m rw,relatime - btrfs /dev/loop0 rw,discard=async,subvolid=5,subvol=/
143 27 0:41 / /mnt/143 rw,relatime - tmpfs none rw
"""


def test_on_btrfs() -> None:
    assert device_of(FDINFO, MOUNTINFO) == os.makedev(0, 0x27)


def test_a_mount_that_is_not_listed_has_no_device() -> None:
    assert device_of("pos:\t0\nmnt_id:\n", MOUNTINFO) is None
    assert device_of("mnt_id:\t4\n", MOUNTINFO) is None
    assert device_of(FDINFO, "") is None


@pytest.mark.parametrize("folder", ["tmp", "/dev/shm"])
def test_is_what_the_kernel_lists(folder: str, tmp_path: Path) -> None:
    path = (tmp_path if folder == "tmp" else Path(folder)) / f"gpuaff-test-{os.getpid()}"
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            name = locked_name(file.fileno())
            assert locked_name(str(path)) == name
            listed = [lock.file for lock in locks.held_locks() if lock.pid == os.getpid()]
            assert name in listed
        finally:
            path.unlink()
    assert locked_name(str(path)) is None
