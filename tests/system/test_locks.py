"""The kernel's locks, by real processes."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuaff._system import locks
from tests.claims.lockers import until
from tests.processes import stopped


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
    assert locks.parse_locks(line) == []


def test_a_line_of_a_waiter_in_the_second_row() -> None:
    lines = (
        "42: POSIX  ADVISORY  WRITE -1 00:1f:9 0 0",
        "42: -> FLOCK  ADVISORY  READ  77 fe:01:4711 0 EOF",
    )
    holder, waiter = locks.parse_locks("\n".join(lines))
    assert waiter == locks.FileLock(
        kind="FLOCK", is_write=False, pid=77, file=(os.makedev(0xFE, 1), 4711), is_waiting=True
    )
    assert (holder.pid, holder.is_write, holder.is_waiting) == (-1, True, False)


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
