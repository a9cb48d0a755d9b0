"""Files as /proc/locks calls them.

That names the device of the file system (``s_dev`` of its superblock), and so does
/proc/self/mountinfo (``proc_pid_mountinfo(5)``). ``stat(2)`` mostly tells the same, but on btrfs
each subvolume has a device number of its own there.
"""

from __future__ import annotations

import os

from gpuaff.system import descriptors
from gpuaff.system.kernel import Tree


def locked_name(handle: int) -> tuple[int, int]:
    """The device number and inode of an open file, as /proc/locks has them.

    Those of ``stat(2)`` where /proc does not tell.
    """
    found = os.fstat(handle)
    mount = mount_of(Tree().read(f"proc/self/fdinfo/{handle}") or "")
    device = None if mount is None else device_of(mount, Tree().read("proc/self/mountinfo") or "")
    return (found.st_dev if device is None else device), found.st_ino


def locked_name_of(path: str) -> tuple[int, int] | None:
    """The same of a file that is not opened for it: nobody who watches it is woken (``O_PATH``).

    None when there is none.
    """
    try:
        handle = descriptors.opened(path, os.O_PATH)
    except OSError:
        return None
    try:
        return locked_name(handle)
    finally:
        descriptors.close(handle)


def mount_of(fdinfo: str) -> int | None:
    """The number of the mount that an open file is on, by its lines in /proc/self/fdinfo."""
    for line in fdinfo.splitlines():
        key, _, value = line.partition(":")
        if key == "mnt_id" and value.strip().isdecimal():
            return int(value)
    return None


def device_of(mount: int, mountinfo: str) -> int | None:
    """The device number of a mount; None when it is not listed."""
    for line in mountinfo.splitlines():
        fields = line.split(maxsplit=3)
        if len(fields) > 2 and fields[0] == str(mount):
            major, _, minor = fields[2].partition(":")
            return os.makedev(int(major), int(minor))
    return None
