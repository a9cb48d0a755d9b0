"""What is said of processes: of real ones."""

from __future__ import annotations

import os
import pwd
import re
import subprocess
import sys

import pytest

from gpuaff.system import kernel
from gpuaff.system.processes import describe

from processes import run, stopped

WAIT = "import sys; print(); sys.stdin.readline()"
ME = pwd.getpwuid(os.getuid()).pw_name


def test_a_process_in_words(tmp_path_factory: pytest.TempPathFactory) -> None:
    script = tmp_path_factory.mktemp("job") / "train.py"
    script.write_text(WAIT)
    command = [sys.executable, "train.py", "--lr", "3"]
    with subprocess.Popen(
        command, cwd=script.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        said = describe(process.pid)
        process.kill()
    program = sys.executable.rpartition("/")[2]
    pattern = rf"{re.escape(program)} train\.py --lr 3 \(pid {process.pid}\) of {ME}, for \d+ s"
    assert said is not None
    assert re.fullmatch(pattern, said)


def test_it_is_short_and_on_one_line() -> None:
    with stopped("'" + "x" * 500 + "'\n" + WAIT) as process:
        process.heard()
        said = describe(process.pid)
    assert said is not None
    assert len(said.partition(" (pid")[0]) == 40
    assert "… (pid" in said


def test_a_terminal_obeys_nothing_of_it() -> None:
    command = ["bash", "-c", 'exec -a "$0" sleep 60', "evil\n\x1b[2J\xad"]
    with subprocess.Popen(command) as process:
        while kernel.name_of(process.pid) != "sleep":
            pass
        said = describe(process.pid)
        process.kill()
    assert said is not None
    assert said.startswith(r"evil \x1b[2J\xad 60 (pid ")


def test_nobody() -> None:
    assert describe(2**22) is None
    assert describe(-1) is None
    assert describe(2**40) is None


class TestEnded:
    def test_they_run(self) -> None:
        assert not kernel.has_ended(os.getpid())
        assert not kernel.has_ended(1), "somebody else's, for most users"

    def test_a_zombie_and_what_is_gone(self) -> None:
        with subprocess.Popen(["true"]) as process:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            assert kernel.has_ended(process.pid)
            said = describe(process.pid)
            assert said is not None
            assert said.startswith(f"true (pid {process.pid}) of {ME}")
        assert kernel.has_ended(process.pid)
        assert describe(process.pid) is None

    def test_only_the_main_thread_has_ended(self) -> None:
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

    @pytest.mark.parametrize("pid", [0, -1, -4, 2**32 - 1, 2**40])
    def test_what_no_process_can_be(self, pid: int) -> None:
        assert not kernel.has_ended(pid)

    def test_proc_does_not_show_it(self) -> None:
        """As with hidepid: other users' processes are there, and look as if they were gone."""
        script = "from gpuaff.system import kernel\nprint(kernel.has_ended(1), kernel.parent_of(1))"
        command = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs none /proc && exec "$0" "$@"']
        done = run(script, prefix=command)
        if done.returncode:
            pytest.skip("needs root and namespaces")
        assert done.stdout.split() == ["False", "None"]
