"""Which of the processes that the driver lists are own, and how processes are named: real ones."""

from __future__ import annotations

import json
import os
import pwd
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gpuaff._system import kernel
from gpuaff.claims.devices.probe import describe, names_of, process_info
from gpuaff.claims.locking.registry import Entry
from tests.claims.lockers import written
from tests.claims.readings import idle, used_by
from tests.processes import environment, run, stopped

WAIT = "import sys; print(); sys.stdin.readline()"
ME = pwd.getpwuid(os.getuid()).pw_name

LISTED = """
import json, os, sys
from gpuaff.claims.devices.probe import names_of, process_info
from tests.claims.readings import used_by
if "uvm" in sys.argv:
    held = open("/dev/nvidia-uvm", "w")
listed = [int(pid) for pid in sys.argv[1].split(",")]
found = process_info([used_by(*listed)])
named = sorted(names_of(listed, found))
print(json.dumps({"own": sorted(found.own), "me": found.me, "named": named}))
"""
"""What a process makes of what the driver lists."""


def seen(listed: object, *how: str, prefix: list[str] | None = None) -> Any:
    done = run(LISTED, str(listed), *how, env=environment(), prefix=prefix or [])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.case("E12")
@pytest.mark.skipif(not kernel.in_first_pid_namespace(), reason="needs the first PID namespace")
class TestOwn:
    def test_descendants_and_this_process(self) -> None:
        script = f"""
            import subprocess, sys
            pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
            child = subprocess.Popen([sys.executable, "-c", {WAIT!r}], **pipes)
            print(child.pid)
            sys.stdin.readline()
            child.kill()
        """
        with stopped(script) as process:
            grandchild = int(process.heard())
            found = process_info([used_by(process.pid, grandchild, os.getpid(), 1)])
            process.go_on()
        assert {process.pid, grandchild, os.getpid()} <= set(found.own)
        assert found.me == os.getpid()
        assert set(names_of([os.getpid(), 2**22], found)) == {os.getpid()}

    def test_ancestors_and_no_process_that_was_started_beside_it(self) -> None:
        with stopped(WAIT) as beside:
            beside.heard()
            assert seen(f"{beside.pid},{os.getpid()}")["own"] == [os.getpid()]

    def test_none_where_own_ones_count_as_others(self) -> None:
        assert not process_info([used_by(os.getpid())], own_is_free=False).own

    def test_one_that_draws_counts_too(self) -> None:
        assert os.getpid() in process_info([idle(graphics={os.getpid(): 1})]).own

    def test_one_that_has_ended_or_is_gone_says_nothing_of_others(self) -> None:
        with subprocess.Popen(["true"]) as process:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            found = process_info([used_by(process.pid, 4_100_000, os.getpid())])
        assert found.ended == {process.pid, 4_100_000}
        assert os.getpid() in found.own
        assert found.first_namespace


@pytest.mark.case("E15")
@pytest.mark.needs("mounts", "pid-namespaces")
@pytest.mark.parametrize(
    ("listed", "how", "expected"),
    [
        ("1,4000000", ["uvm"], {"own": [], "me": None, "named": []}),  # one is not here
        ("1", [], {"own": [], "me": 1, "named": []}),  # it is here by chance
        ("1", ["uvm"], {"own": [1], "me": 1, "named": [1]}),  # it computes here
    ],
)
def test_in_a_container_a_number_may_be_the_hosts(
    listed: str, how: list[str], expected: object
) -> None:
    mount = 'mount -t tmpfs none /dev && touch /dev/nvidia-uvm && exec "$0" "$@"'
    apart = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", mount]
    assert seen(listed, *how, prefix=apart) == expected


class TestInWords:
    def test_its_command_number_user_and_age(self, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text(WAIT)
        command, pipe = [sys.executable, "train.py", "--lr", "3"], subprocess.PIPE
        with subprocess.Popen(command, cwd=tmp_path, stdin=pipe, stdout=pipe) as process:
            assert process.stdout is not None
            process.stdout.readline()
            said = describe(process.pid, with_age=True)
            process.kill()
        program = re.escape(sys.executable.rpartition("/")[2])
        pattern = rf"{program} train\.py --lr 3 \(pid {process.pid}\) of {ME}, for \d+ s"
        assert re.fullmatch(pattern, str(said))

    def test_it_is_short_and_a_terminal_obeys_nothing_of_it(self) -> None:
        command = ["bash", "-c", 'exec -a "$0" sleep 60', "evil\n\x1b[2J\xad" + "x" * 500]
        with subprocess.Popen(command) as process:
            while not Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(b"evil"):
                pass
            said = str(describe(process.pid, with_age=True))
            process.kill()
        assert said.startswith(r"evil \x1b[2J\xadxxx")
        assert len(said.partition(" (pid")[0]) == 40

    @pytest.mark.parametrize("pid", [2**22, -1, 2**40])
    def test_none_that_is_no_process(self, pid: int) -> None:
        assert describe(pid) is None

    def test_a_zombie_and_what_is_gone(self) -> None:
        with subprocess.Popen(["true"]) as process:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            said = str(describe(process.pid, with_age=True))
            assert said.startswith(f"true (pid {process.pid}) of {ME}")
        assert describe(process.pid, with_age=True) is None

    def test_the_writer_of_an_entry(self) -> None:
        """A visible one as it is, with the age of its lease; another one as it has written."""
        with stopped(WAIT) as process:
            process.heard()
            facts = kernel.thread_facts(process.pid, process.pid)
            assert facts is not None
            record = {"pid": process.pid, "start": facts.started, "name": "x", "wanted": 4}
            said = str(describe(process.pid, written(record)))
            held = Entry(slot=1, waits=False, pid=0, since=time.time() - 7210)
            aged = str(describe(process.pid, held, with_age=True))
        assert said.startswith("python")
        assert said.endswith(f"(pid {process.pid}) of {ME}")
        assert aged.endswith(", for 2 h")
        record = {"pid": 7, "uid": os.geteuid(), "name": "train\x1b[2J", "wanted": 4}
        assert describe(7, written(record)) == rf"train\x1b[2J (pid 7) of {ME}"
        assert describe(None, written({"wanted": "x"})) == "an unknown program"
