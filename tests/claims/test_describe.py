"""What is said of processes: of real ones."""

from __future__ import annotations

import os
import pwd
import re
import subprocess
import sys

import pytest

from gpuaff._system import kernel
from gpuaff.claims.devices.probe import describe
from tests.processes import stopped

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
        said = describe(process.pid, with_age=True)
        process.kill()
    program = sys.executable.rpartition("/")[2]
    pattern = rf"{re.escape(program)} train\.py --lr 3 \(pid {process.pid}\) of {ME}, for \d+ s"
    assert said is not None
    assert re.fullmatch(pattern, said)


def test_it_is_short_and_on_one_line() -> None:
    with stopped("'" + "x" * 500 + "'\n" + WAIT) as process:
        process.heard()
        said = describe(process.pid, with_age=True)
    assert said is not None
    assert len(said.partition(" (pid")[0]) == 40
    assert "… (pid" in said


def test_a_terminal_obeys_nothing_of_it() -> None:
    command = ["bash", "-c", 'exec -a "$0" sleep 60', "evil\n\x1b[2J\xad"]
    with subprocess.Popen(command) as process:
        while kernel.name_of(process.pid) != "sleep":
            pass
        said = describe(process.pid, with_age=True)
        process.kill()
    assert said is not None
    assert said.startswith(r"evil \x1b[2J\xad 60 (pid ")


def test_nobody() -> None:
    assert describe(2**22) is None
    assert describe(-1) is None
    assert describe(2**40) is None


def test_a_zombie_and_what_is_gone() -> None:
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        said = describe(process.pid, with_age=True)
        assert said is not None
        assert said.startswith(f"true (pid {process.pid}) of {ME}")
    assert describe(process.pid, with_age=True) is None
