"""The guard: one at a time, and never kept by somebody who does not look."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpuaff._system import descriptors
from gpuaff._system.kernel import open_files
from gpuaff.claims.locking import directory
from gpuaff.errors import LockDirectoryError
from tests.claims.lockers import locker, until

HOLD = """
with directory.guarded():
    print("has it")
    hear()
print("over")
hear()
"""


def free() -> bool:
    try:
        with directory.guarded(limit=0):
            return True
    except LockDirectoryError:
        return False


def test_one_at_a_time(lock_folder: Path) -> None:
    with locker(HOLD) as one:
        one.heard()
        assert not free()
        one.go_on()
        one.heard()
        assert free()
    assert not descriptors.private


def test_one_that_was_removed_is_no_guard_any_more(lock_folder: Path) -> None:
    """Else two would have one each, and each could take half of what both want."""
    with locker(HOLD) as one, locker('print("there")\nhear()' + HOLD) as late:
        assert [one.heard(), late.heard()] == ["has it", "there"]
        late.go_on()
        until(lambda: str(lock_folder / "guard") in open_files(late.pid).values())
        (lock_folder / "guard").unlink()
        with locker(HOLD) as other:
            assert other.heard() == "has it"
            one.go_on()
            assert one.heard() == "over"
            assert not select.select([late.out], [], [], 0.2)[0]
            other.go_on()
            assert late.heard() == "has it"


@pytest.mark.parametrize("how", ["killed", "given back"])
def test_a_forked_child_does_not_keep_it(lock_folder: Path, how: str) -> None:
    script = """
        with directory.guarded():
            child = os.fork()
            if child == 0:
                os.close(1)
                signal.pause()
            print(child, descriptors.private != set())
            hear()
        print("over")
        hear()
    """
    with locker(script) as one:
        child = int(one.heard().split()[0])
        try:
            assert not free()
            if how == "killed":
                one.kill()
            else:
                one.go_on()
                one.heard()
            until(free)  # as soon as the child has begun to run
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("what", ["hangs", "is stopped"])
def test_when_time_is_up_the_holder_is_named(lock_folder: Path, what: str) -> None:
    with locker(HOLD) as one:
        one.heard()
        if what == "is stopped":
            os.kill(one.pid, signal.SIGSTOP)
        with pytest.raises(LockDirectoryError) as caught, directory.guarded(limit=0.05):
            pass
        assert f"(pid {one.pid}) has locked it for more than 0 s" in str(caught.value)
        assert caught.value.path == f"{lock_folder}/guard"
        assert "end it" in str(caught.value)
        os.kill(one.pid, signal.SIGCONT)
        one.go_on()
        one.heard()
        assert free()


def test_who_waits_is_interrupted_by_ctrl_c(lock_folder: Path) -> None:
    script = """
        try:
            print("there")
            with directory.guarded():
                print("has it")
        except KeyboardInterrupt:
            print("interrupted", len(descriptors.private))
    """
    with locker(HOLD) as one:
        one.heard()
        with locker(script) as other:
            other.heard()
            os.kill(other.pid, signal.SIGINT)
            assert other.heard() == "interrupted 0"


# ---- programs that are not gpuaff ------------------------------------------------------------

FOREIGN = {
    "flock(1)": ["flock", "{guard}", "sh", "-c", "echo has it; read word"],
    "FileLock": [
        sys.executable,
        "-c",
        (
            "from filelock import FileLock\n"
            "with FileLock('{guard}', preserve_lock_file=True, mode=0o666):\n"
            "    print('has it', flush=True)\n"
            "    input()"
        ),
    ],
}


@contextmanager
def foreign(program: str, guard_file: Path) -> Iterator[subprocess.Popen[str]]:
    """Another program that takes the guard, as docs/lease-protocol.md says."""
    command = [word.replace("{guard}", str(guard_file)) for word in FOREIGN[program]]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.needs("flock")
@pytest.mark.parametrize("program", FOREIGN)
def test_another_program_and_a_claim_exclude_each_other(lock_folder: Path, program: str) -> None:
    assert free()
    mine = (lock_folder / "guard").stat()
    with directory.guarded(), foreign(program, lock_folder / "guard") as other:
        assert other.stdout is not None
        assert not select.select([other.stdout], [], [], 0.5)[0], "it waits for the claim"
    with foreign(program, lock_folder / "guard") as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "has it\n"
        assert not free()
        other.communicate("go on\n")
    assert free()
    now = (lock_folder / "guard").stat()
    assert (now.st_ino, now.st_size) == (mine.st_ino, 0)
    assert now.st_mode & 0o777 == mine.st_mode & 0o777  # on Python 3.10 filelock sets the mode
