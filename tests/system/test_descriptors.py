"""No descriptor is lost, wherever Ctrl-C comes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuaff._system import descriptors

from processes import environment, unmeasured

INTERRUPTED = """
import os, sys, time
from gpuaff._system import descriptors, lock_files as locks

where, every = sys.argv[1], int(sys.argv[2])

def open_files():
    return set(os.listdir("/proc/self/fd"))

def folder():
    locks.make_folder(f"{where}/{next(names)}", mode=0o700, name="it", content=b"x")

def lock_file():
    opened = locks.open_folder(where)
    try:
        descriptors.close(locks.open_lock_file(opened, str(next(names)), size=8))
    finally:
        descriptors.close(opened)

def by_name():
    opened = locks.open_folder(where)
    try:
        locks._make_by_name(opened, str(next(names)), b"", 8, mode=0o600)
    finally:
        descriptors.close(opened)

def room():
    descriptors.make_room()

class Tracer:
    # Interrupts before a step of the interpreter, the how-manieth.
    def __init__(self, at):
        self.left, self.came = at, False
    def __call__(self, frame, event, _):
        if "gpuaff/_system/" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            self.left -= 1
            if self.left < 0:
                self.came = True
                sys.settrace(None)
                raise KeyboardInterrupt
        return self

names = iter(range(1 << 30))
lost, tried = [], 0
for work in (folder, lock_file, by_name, room):
    work()
    at, came = 0, True
    while came:
        before, marked = open_files(), descriptors.in_hand()
        tracer = Tracer(at)
        sys.settrace(tracer)
        try:
            work()
        except KeyboardInterrupt:
            pass
        sys.settrace(None)
        came = tracer.came
        descriptors.drop(marked)
        if open_files() != before:
            lost.append((work.__name__, at))
        at += every
        tried += 1
print(len(lost), *lost[:5])
print(tried)
"""


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_none_is_lost_at_any_step_of_the_interpreter(tmp_path: Path, every: int) -> None:
    """Those of system/, a Ctrl-C before each: more often than signals can come."""
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path), str(every)]
    env = unmeasured(environment())  # coverage traces, too
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    lost, tried = done.stdout.splitlines()
    assert lost == "0"
    assert int(tried) > 500 / every


def test_what_has_an_owner_stays() -> None:
    before = descriptors.in_hand()
    kept = descriptors.moved_up(descriptors.opened("/", os.O_RDONLY))
    descriptors.keep(before)
    dropped = descriptors.opened("/", os.O_RDONLY)
    descriptors.drop(before)
    descriptors.drop(before)
    assert not os.get_inheritable(kept)
    os.close(kept)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(dropped)


def test_a_number_that_was_closed_may_be_anothers() -> None:
    before = descriptors.in_hand()
    mine = descriptors.opened("/", os.O_RDONLY)
    descriptors.close(mine)
    theirs = os.open("/", os.O_RDONLY)
    assert theirs == mine
    descriptors.drop(before)
    assert os.fstat(theirs)
    os.close(theirs)
