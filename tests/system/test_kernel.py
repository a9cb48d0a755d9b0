"""What /proc says about threads and processes: of real ones, by a second reader."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest

from gpuaff._system import kernel
from tests.processes import printed, run, stopped

ABSENT = 2**22
"""The id of no process: Linux gives none above it."""


def test_a_pipe_without_a_writer_is_not_waited_for(tmp_path: Path) -> None:
    """A variable may name anything."""
    os.mkfifo(tmp_path / "pipe")
    assert kernel.Tree(str(tmp_path)).read("pipe") == ""


def test_ctrl_c_while_a_file_is_read_loses_no_descriptor() -> None:
    """At each step of the interpreter in turn, in a window of a block."""
    script = """
import os, signal, sys
from gpuaff._system.interrupts import interruptible, uninterrupted
from gpuaff._system.kernel import Tree

def trace(frame, event, _):
    global left
    if frame.f_code is not Tree.read.__code__:
        return None
    frame.f_trace_opcodes = True
    if event == "opcode":
        left -= 1
        if left == 0:
            signal.raise_signal(signal.SIGINT)
    return trace

before, steps, is_interrupted = os.listdir("/proc/self/fd"), 0, True
while is_interrupted:
    steps += 1
    left, is_interrupted = steps, False
    try:
        with uninterrupted(), interruptible():
            sys.settrace(trace)
            Tree().read("proc/self/stat")
    except KeyboardInterrupt:
        is_interrupted = True
    finally:
        sys.settrace(None)
    assert os.listdir("/proc/self/fd") == before, steps
print(steps)
"""
    assert int(printed(script, fresh=True)) > 50


def test_a_thread_of_ours() -> None:
    tid = threading.get_native_id()
    me = kernel.thread_facts(os.getpid(), tid)
    assert me is not None
    assert (me.ended, me.movable) == (False, True)
    assert me.name == Path(f"/proc/self/task/{tid}/comm").read_text().strip()
    since = float(Path("/proc/uptime").read_text().split()[0]) * os.sysconf("SC_CLK_TCK")
    assert 0 < me.started <= since
    assert kernel.process_of(tid) == os.getpid()
    assert tid in kernel.threads_of(os.getpid())


def test_another_process() -> None:
    script = """
import os, sys
os.environ["LATER"] = "1"
print("ready")
sys.stdin.readline()
"""
    with stopped(script, env={"ASKED": "a=b", "OTHER": ""}, fresh=True) as process:
        process.heard()
        pid = process.pid
        assert next(kernel.ancestors(pid)) == os.getpid()
        assert kernel.affinity_or_none(pid) == frozenset(os.sched_getaffinity(pid))
        assert kernel.name_of(pid) == Path(f"/proc/{pid}/comm").read_text().strip()
        assert "libc.so.6" in kernel.mapped_files(pid)
        variables = kernel.variables_of(pid)
        assert (variables["ASKED"], variables["OTHER"]) == ("a=b", "")
        assert "LATER" not in variables, "it is what the process was started with"
    assert next(kernel.ancestors()) == os.getppid()


def test_nothing_is_known_of_a_process_that_is_not_there() -> None:
    assert list(kernel.ancestors(ABSENT)) == []
    assert kernel.process_of(ABSENT) is None
    assert kernel.threads_of(ABSENT) == []
    assert kernel.thread_facts(ABSENT, ABSENT) is None
    assert kernel.thread_facts(os.getpid(), ABSENT) is None
    assert kernel.affinity_or_none(ABSENT) is None
    assert kernel.name_of(ABSENT) is None
    assert kernel.variables_of(ABSENT) == {}
    assert kernel.mapped_files(ABSENT) == frozenset()


def kernel_thread(name: str) -> int | None:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "comm").read_text().strip() == name:
                return int(folder.name)
        except OSError:  # it has ended
            continue
    return None


@pytest.mark.skipif(kernel_thread("migration/0") is None, reason="they are not shown")
@pytest.mark.parametrize(("name", "movable"), [("migration/0", False), ("kthreadd", True)])
def test_some_threads_of_the_kernel_cannot_be_moved(name: str, movable: bool) -> None:
    tid = kernel_thread(name)
    assert tid is not None
    facts = kernel.thread_facts(tid, tid)
    assert facts is not None
    assert facts.movable is movable


class TestEnded:
    def test_a_zombie_has_ended(self) -> None:
        with subprocess.Popen(["true"]) as process:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            assert kernel.has_ended(process.pid)
        assert kernel.has_ended(process.pid)

    def test_a_process_goes_on_without_its_main_thread(self) -> None:
        script = """
import ctypes, platform, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print(flush=True)
exit_thread = {"x86_64": 60, "aarch64": 93}[platform.machine()]  # exit(2), not exit_group(2)
ctypes.CDLL(None).syscall(exit_thread, 0)
"""
        with stopped(script) as process:
            process.heard()
            while (facts := kernel.thread_facts(process.pid, process.pid)) and not facts.ended:
                pass
            assert facts is not None
            assert not kernel.has_ended(process.pid)

    @pytest.mark.parametrize("pid", [1, 0, -1, -4, 2**32 - 1, 2**40])
    def test_what_runs_or_cannot_be_a_process_has_not(self, pid: int) -> None:
        assert not kernel.has_ended(pid)
        assert not kernel.has_ended(os.getpid())

    @pytest.mark.needs("mounts")
    def test_a_process_that_proc_hides_has_not(self) -> None:
        """As with hidepid: other users' processes are there, and look as if they were gone."""
        script = (
            "from gpuaff._system import kernel\nprint(kernel.has_ended(1), kernel.parent_of(1))"
        )
        command = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs none /proc && exec "$0" "$@"']
        assert run(script, prefix=command).stdout.split() == ["False", "None"]
