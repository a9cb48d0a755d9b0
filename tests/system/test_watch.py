"""Being woken by the kernel, by real processes."""

from __future__ import annotations

import errno
import os
import platform
import signal
import subprocess
from pathlib import Path

import pytest

from gpuaff._system import locks
from gpuaff._system.watch import Watch

import seccomp
from claims.lockers import watching
from processes import run, stopped

_NUMBERS = {"x86_64": (294, 254, 434), "aarch64": (26, 27, 434)}
INIT, ADD, PIDFD = _NUMBERS.get(platform.machine(), (0, 0, 0))
"""``inotify_init1``, ``inotify_add_watch``, ``pidfd_open``."""


def test_closing_a_file_wakes_and_so_does_the_death_of_who_has_it_open(tmp_path: Path) -> None:
    script = f"""
import os, sys
handle = os.open({str(tmp_path)!r}, os.O_RDONLY)
print("open")
sys.stdin.readline()
"""
    with watching(tmp_path) as watch, stopped(script) as process:
        process.heard()
        assert not watch.wait(0.01)
        process.process.kill()
        assert watch.wait(10)
        assert not watch.wait(0.01)  # it counts once


def test_touching_wakes_though_a_child_has_the_file_open_still(tmp_path: Path) -> None:
    handle = locks.open_directory(str(tmp_path))
    child = subprocess.Popen(["sleep", "60"], pass_fds=[handle])
    try:
        with watching(tmp_path) as watch:
            os.close(os.dup(handle))
            assert not watch.wait(0.01)
            locks.touch(handle)
            assert watch.wait(10)
    finally:
        child.kill()
        child.wait()
        os.close(handle)


def test_a_process_that_has_ended_wakes_once_however_long_it_is_listed() -> None:
    with subprocess.Popen(["sleep", "60"]) as child, Watch() as watch:
        watch.follow([child.pid])
        assert not watch.wait(0.01)
        child.send_signal(signal.SIGKILL)
        assert watch.wait(10)
        for _ in range(3):  # a zombie until somebody asks for it: a driver may go on listing it
            watch.follow([child.pid])
            assert not watch.wait(0.01)


def test_who_is_gone_or_nobody_is_not_followed() -> None:
    with Watch() as watch:
        watch.follow([1 << 22, 0, -1])
        assert not watch.wait(0.01)


@pytest.mark.skipif(not INIT, reason="the calls' numbers are not known")
@pytest.mark.parametrize(
    ("call", "error"), [(INIT, errno.EMFILE), (ADD, errno.ENOSPC), (PIDFD, errno.ENOSYS)]
)
def test_where_there_is_no_more_of_it_time_wakes(tmp_path: Path, call: int, error: int) -> None:
    """A user has 128 instances of inotify, and so many watches; old kernels lack pidfds."""
    script = f"""
import os
from gpuaff._system.watch import Watch
with Watch() as watch:
    watch.begin([{str(tmp_path)!r}, "/not/there"])
    watch.follow([os.getppid()])
    print(watch.sees_files, watch.wait(0.01))
"""
    done = run(script, prefix=seccomp.refusing(error, call))
    assert done.stdout.split() == [str(call == PIDFD), "False"], done.stderr
