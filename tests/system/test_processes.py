"""Which processes have ended: of real ones."""

from __future__ import annotations

import os
import subprocess

import pytest

from gpuaff._system import kernel
from tests.processes import run, stopped


class TestEnded:
    def test_they_run(self) -> None:
        assert not kernel.has_ended(os.getpid())
        assert not kernel.has_ended(1), "somebody else's, for most users"

    def test_a_zombie_and_what_is_gone(self) -> None:
        with subprocess.Popen(["true"]) as process:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            assert kernel.has_ended(process.pid)
        assert kernel.has_ended(process.pid)

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

    @pytest.mark.needs("mounts")
    def test_proc_does_not_show_it(self) -> None:
        """As with hidepid: other users' processes are there, and look as if they were gone."""
        script = (
            "from gpuaff._system import kernel\nprint(kernel.has_ended(1), kernel.parent_of(1))"
        )
        command = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs none /proc && exec "$0" "$@"']
        done = run(script, prefix=command)
        assert done.stdout.split() == ["False", "None"]
