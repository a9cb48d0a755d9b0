"""The kernel's locks, by real processes; and being woken by it."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import signal
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuaff.system import locks
from gpuaff.system.watch import Watch

import seccomp
from claims.lockers import until, watching
from processes import printed, run, stopped

_NUMBERS = {"x86_64": (294, 254, 434), "aarch64": (26, 27, 434)}
INIT, ADD, PIDFD = _NUMBERS.get(platform.machine(), (0, 0, 0))
"""``inotify_init1``, ``inotify_add_watch``, ``pidfd_open``."""


def test_the_kernel_tells_who_has_a_lock_and_who_waits(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    taker = f"""
import fcntl, os, sys
handle = os.open({str(path)!r}, os.O_RDONLY)
print("here")
fcntl.flock(handle, fcntl.LOCK_EX)
print("has it")
sys.stdin.readline()
"""
    file = locks.identity(str(path))
    with stopped(taker) as one:
        assert [one.heard(), one.heard()] == ["here", "has it"]
        with stopped(taker) as other:
            other.heard()
            expected = {(one.pid, False), (other.pid, True)}
            until(
                lambda: (
                    {(a.pid, a.is_waiting) for a in locks.held_locks() if a.file == file}
                    == expected
                )
            )


@pytest.mark.parametrize(
    "line", ["", "1:", "1: POSIX *NOINODE* WRITE 12 <none>:0 0 EOF", "1: -> FLOCK ADVISORY WRITE"]
)
def test_a_line_about_nothing_is_passed_over(line: str) -> None:
    assert locks._lock_of(line) is None


def test_a_line_of_a_waiter_in_the_second_row() -> None:
    found = locks._lock_of("42:   -> FLOCK  ADVISORY  READ  77 fe:01:4711 0 EOF")
    assert found == locks.FileLock(
        kind="FLOCK", is_write=False, pid=77, file=(os.makedev(0xFE, 1), 4711), is_waiting=True
    )


@given(st.sets(st.integers(0, 40)), st.integers(0, 40), st.integers(0, 40))
def test_locked_bytes_are_those_that_others_lock(taken: set[int], start: int, end: int) -> None:
    one = os.memfd_create("locks")
    other = os.open(f"/proc/self/fd/{one}", os.O_RDWR)
    try:
        for byte in taken:
            assert locks.try_range(one, byte)
        expected = sorted(byte for byte in taken if start <= byte < end)
        assert locks.locked_bytes(other, start, end) == expected
        assert locks.locked_bytes(one, start, end) == []
        for byte in range(41):
            assert locks.try_range(other, byte) == (byte not in taken)
    finally:
        os.close(one)
        os.close(other)


def test_a_lock_to_the_end_of_the_file_is_no_endless_search() -> None:
    one = os.memfd_create("locks")
    other = os.open(f"/proc/self/fd/{one}", os.O_RDWR)
    locks.try_range(one, 3, length=0)
    assert locks.locked_bytes(other, 0, 8) == [3, 4, 5, 6, 7]
    os.close(one)
    os.close(other)


def test_descriptors_are_out_of_the_way_of_scripts(tmp_path: Path) -> None:
    handle = locks.open_directory(str(tmp_path))
    assert handle >= 200
    assert not os.get_inheritable(handle)
    os.close(handle)


def test_a_low_limit_of_open_files_is_no_failure(tmp_path: Path) -> None:
    script = f"""
import os, resource
from gpuaff.system import locks
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
handle = locks.open_directory({str(tmp_path)!r})
print(handle < 64, locks.try_flock(handle), os.get_inheritable(handle))
"""
    assert printed(script) == "True True False"


def test_the_program_that_a_process_becomes_keeps_what_it_may_inherit(tmp_path: Path) -> None:
    script = f"""
import os, sys
from gpuaff.system import locks
handle = locks.open_directory({str(tmp_path)!r})
assert locks.try_flock(handle)
if sys.stdin.readline().strip() == "keep":
    os.set_inheritable(handle, True)
os.execvp("sh", ["sh", "-c", "echo there; read line"])
"""
    mine = locks.open_directory(str(tmp_path))
    for word in "keep", "drop":
        with stopped(script) as process:
            process.go_on(word)
            assert process.heard() == "there"
            assert locks.try_flock(mine) == (word == "drop")
            locks.unlock(mine)
    os.close(mine)


# ---- being woken -----------------------------------------------------------------------------


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


@pytest.mark.skipif(not INIT, reason="not here: the calls' numbers are not known")
@pytest.mark.parametrize(
    ("call", "error"), [(INIT, errno.EMFILE), (ADD, errno.ENOSPC), (PIDFD, errno.ENOSYS)]
)
def test_where_there_is_no_more_of_it_time_wakes(tmp_path: Path, call: int, error: int) -> None:
    """A user has 128 instances of inotify, and so many watches; old kernels lack pidfds."""
    script = f"""
import os
from gpuaff.system.watch import Watch
with Watch() as watch:
    watch.begin([{str(tmp_path)!r}, "/not/there"])
    watch.follow([os.getppid()])
    print(watch.sees_files, watch.wait(0.01))
"""
    done = run(script, prefix=seccomp.refusing(error, call))
    assert done.stdout.split() == [str(call == PIDFD), "False"], done.stderr


def test_the_classic_lock_is_another_one(tmp_path: Path) -> None:
    """Bytes of the board may not hang on whoever else closes the file."""
    path = tmp_path / "file"
    path.touch()
    one, other = (os.open(path, os.O_RDWR) for _ in range(2))
    assert locks.try_range(one, 0)
    os.close(os.open(path, os.O_RDWR))
    assert not locks.try_range(other, 0)
    with pytest.raises(BlockingIOError):
        fcntl.lockf(other, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
    os.close(one)
    os.close(other)
