"""What /proc tells about threads: of real ones, by a second reader where there is one."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from gpuaff._system import kernel
from tests.processes import stopped


def test_a_pipe_that_nobody_writes_into(tmp_path: Path) -> None:
    """A variable may name anything."""
    os.mkfifo(tmp_path / "pipe")
    assert kernel.Tree(str(tmp_path)).read("pipe") == ""


def test_a_thread_of_ours() -> None:
    me = kernel.thread_facts(os.getpid(), threading.get_native_id())
    assert me is not None
    assert (me.ended, me.movable) == (False, True)
    assert me.name == Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text().strip()
    since = float(Path("/proc/uptime").read_text().split()[0]) * os.sysconf("SC_CLK_TCK")
    assert 0 < me.started <= since


def test_a_thread_and_its_process() -> None:
    assert kernel.process_of(threading.get_native_id()) == os.getpid()
    assert threading.get_native_id() in kernel.threads_of(os.getpid())
    assert kernel.process_of(2**22) is None
    assert kernel.threads_of(2**22) == []
    assert kernel.thread_facts(2**22, 2**22) is None
    assert kernel.thread_facts(os.getpid(), 2**22) is None


def test_another_process() -> None:
    with stopped("import sys; print(); sys.stdin.readline()", fresh=True) as process:
        process.heard()
        assert kernel.parent_of(process.pid) == os.getpid()
        seen = os.sched_getaffinity(process.pid)
        assert kernel.affinity_or_none(process.pid) == frozenset(seen)
        assert kernel.name_of(process.pid) == Path(f"/proc/{process.pid}/comm").read_text().strip()
    assert kernel.parent_of(os.getpid()) == next(kernel.ancestors()) == os.getppid()


def test_a_process_that_is_not_there() -> None:
    assert kernel.parent_of(1) is None, "nobody has started the first one"
    assert kernel.parent_of(2**22) is None
    assert kernel.affinity_or_none(2**22) is None
    assert kernel.affinity_or_none(None) is None
    assert kernel.name_of(2**22) is None
    assert kernel.name_of(None) is None


def test_what_is_mapped_and_what_was_set() -> None:
    script = """
import os, sys
os.environ["LATER"] = "1"
print("ready")
sys.stdin.readline()
"""
    with stopped(script, env={"ASKED": "a=b", "OTHER": ""}, fresh=True) as process:
        process.heard()
        variables = kernel.variables_of(process.pid)
        assert (variables["ASKED"], variables["OTHER"]) == ("a=b", "")
        assert "LATER" not in variables, "it is what the process was started with"
        assert "libc.so.6" in kernel.mapped_files(process.pid)
    assert kernel.variables_of(2**22) == {}
    assert kernel.mapped_files(2**22) == frozenset()


def kernel_thread(name: str) -> int | None:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "comm").read_text().strip() == name:
                return int(folder.name)
        except OSError:  # it has ended
            continue
    return None


@pytest.mark.skipif(kernel_thread("migration/0") is None, reason="they are not shown")
def test_threads_of_the_kernel_that_nobody_can_move() -> None:
    for name, movable in (("migration/0", False), ("kthreadd", True)):
        tid = kernel_thread(name)
        assert tid is not None
        facts = kernel.thread_facts(tid, tid)
        assert facts is not None
        assert facts.movable is movable
