"""Processes that use safe_gpu's lock file as safe_gpu does, and as we do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.processes import Program, stopped

THEIRS = """
import fcntl, os, sys, time

def opened(path):
    os.makedirs(os.path.dirname(path), mode=0o777, exist_ok=True)
    before = os.umask(0)
    handle = os.open(path, os.O_CREAT | os.O_WRONLY, 0o666)
    os.umask(before)
    return handle

def locked(path):
    # The lock, by a descriptor; closing it gives it back.
    handle = opened(path)
    fcntl.lockf(handle, fcntl.LOCK_EX)
    return handle

def is_free(path):
    # Whether it can be had now.
    handle = opened(path)
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True

def become_nobody():
    # Another user of the machine (root only).
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
"""
"""What a script may begin with that uses safe_gpu, told in the calls that it makes."""

OURS = """
import os, sys, time
from contextlib import ExitStack
from gpuaff._system import descriptors
from gpuaff.claims.locking import safe_gpu
from gpuaff.claims.locking.safe_gpu import holding
"""
"""What a script may begin with that claims with gpuaff."""


@contextmanager
def their_user(path: Path) -> Iterator[Program]:
    """A safe_gpu user who waits for the lock when told to, has it, and gives it back when told."""
    script = f"""
{THEIRS}
while True:
    sys.stdin.readline()
    print("waits")
    handle = locked({str(path)!r})
    print("has it")
    sys.stdin.readline()
    os.close(handle)
    print("gave it back")
"""
    with stopped(script) as user:
        yield user


@contextmanager
def our_user(path: Path, *, call: str = "holding()") -> Iterator[Program]:
    """A claimer of ours, likewise."""
    script = f"""
{OURS}
while True:
    sys.stdin.readline()
    print("waits")
    with {call} as said:
        print("has it")
        sys.stdin.readline()
    print("gave it back")
"""
    with stopped(script, env={"GPUAFF_SAFE_GPU": str(path)}) as user:
        yield user


def begin(user: Program) -> Program:
    """Let a user wait for the lock."""
    user.go_on()
    assert user.heard() == "waits"
    return user


def get(user: Program) -> Program:
    """Let a user have the lock."""
    assert begin(user).heard() == "has it"
    return user


def end(user: Program) -> None:
    """Let a user give it back."""
    user.go_on()
    assert user.heard() == "gave it back"
