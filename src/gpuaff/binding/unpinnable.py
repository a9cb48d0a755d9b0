"""Why nobody is pinned here, before anything is looked at."""

from __future__ import annotations

from gpuaff.notices import Notice
from gpuaff.settings import pinning_is_off
from gpuaff.system import kernel

_OFF = Notice("off", "GPUAFF=off: the mask stays")

_OTHER_MACHINE = Notice(
    "other-machine",
    "GPUAFF_FSROOT describes another machine, by which this process cannot be pinned: unset it",
)

_NOT_LINUX = Notice(
    "not-linux", "this system has no sched_setaffinity (Linux has): the CPUs stay as they are"
)


def reason() -> Notice | None:
    """What is to be said; None where a process can be pinned.

    Raises:
        InvalidOptionError: the variable GPUAFF is neither a yes nor a no.
    """
    if pinning_is_off():
        return _OFF
    if not kernel.can_pin():
        return _NOT_LINUX
    return None if kernel.machine_tree().is_live else _OTHER_MACHINE
