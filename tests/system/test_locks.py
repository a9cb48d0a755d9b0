"""The kernel's locks, by real processes, and the descriptors that hold them."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from gpuaff._system import locks
from tests.claims.lockers import until
from tests.processes import printed, stopped


def test_the_kernel_lists_who_has_a_lock_and_who_waits(tmp_path: Path) -> None:
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


def test_lines_of_proc_locks() -> None:
    lines = (
        "1: POSIX *NOINODE* WRITE 12 <none>:0 0 EOF",
        "42: POSIX  ADVISORY  WRITE -1 00:1f:9 0 0",
        "42: -> FLOCK  ADVISORY  READ  77 fe:01:4711 0 EOF",
        "43: -> FLOCK ADVISORY WRITE",
    )
    holder, waiter = locks.held_locks("\n".join(lines))
    assert waiter == locks.FileLock(
        kind="FLOCK", is_write=False, pid=77, file=(os.makedev(0xFE, 1), 4711), is_waiting=True
    )
    assert (holder.pid, holder.is_write, holder.is_waiting) == (-1, True, False)


@given(st.sets(st.integers(0, 40)), st.integers(0, 40), st.integers(0, 40), st.booleans())
def test_locked_bytes_are_those_that_others_lock(
    taken: set[int], start: int, end: int, to_the_end: bool
) -> None:
    one = os.memfd_create("locks")
    other = os.open(f"/proc/self/fd/{one}", os.O_RDWR)
    try:
        for byte in taken:
            assert locks.try_range(one, byte)
        if to_the_end:  # no endless search
            assert locks.try_range(one, 30, length=locks.WHOLE)
            taken = taken | set(range(30, 41))
        expected = sorted(byte for byte in taken if start <= byte < end)
        assert locks.locked_bytes(other, start, end) == expected
        assert locks.locked_bytes(one, start, end) == []
        for byte in range(41):
            assert locks.try_range(other, byte) == (byte not in taken)
    finally:
        os.close(one)
        os.close(other)


def test_a_low_limit_of_open_files_is_no_failure(tmp_path: Path) -> None:
    """Descriptors are above what job scripts use, where there is room."""
    script = f"""
import os, resource
from gpuaff._system import locks
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
handle = locks.open_directory({str(tmp_path)!r})
print(handle < 64, locks.try_flock(handle), os.get_inheritable(handle))
"""
    assert printed(script) == "True True False"
