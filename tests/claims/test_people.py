"""Which of the processes that the driver lists are our own: of real ones."""

from __future__ import annotations

import os
import pwd
import subprocess
import time

import pytest

from gpuaff._system import kernel
from gpuaff.claims.devices.probe import describe, names_of, process_info
from gpuaff.claims.locking.registry import Entry
from tests.claims.lockers import written
from tests.claims.readings import idle, used_by
from tests.processes import environment, run, stopped

WAIT = "import sys; print(); sys.stdin.readline()"

needs_first_namespace = pytest.mark.skipif(
    not kernel.in_first_pid_namespace(), reason="needs the first PID namespace"
)


@pytest.mark.case("E12")
@needs_first_namespace
class TestOwn:
    def test_what_this_process_has_started(self) -> None:
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
            people = process_info([used_by(process.pid, grandchild, os.getpid(), 1)])
            assert {process.pid, grandchild, os.getpid()} <= set(people.own)
            assert people.me == os.getpid()
            assert people.first_namespace
            process.go_on()

    def test_what_has_started_this_process(self) -> None:
        script = """
import os
from gpuaff.claims.devices.probe import process_info
from tests.claims.readings import used_by
print(os.getppid() in process_info([used_by(os.getppid())]).own)
"""
        done = run(script, env=environment())
        assert done.stdout.split() == ["True"], done.stderr

    def test_not_what_was_started_beside_it(self) -> None:
        script = """
import sys
from gpuaff.claims.devices.probe import process_info
from tests.claims.readings import used_by
print(sorted(process_info([used_by(int(sys.argv[1]))]).own))
"""
        with stopped(WAIT) as beside:
            beside.heard()
            done = run(script, str(beside.pid), env=environment())
        assert done.stdout.split() == ["[]"], done.stderr

    def test_none_counts_when_not_asked_for(self) -> None:
        assert not process_info([used_by(os.getpid())], own_is_free=False).own

    def test_one_that_draws_counts_too(self) -> None:
        assert os.getpid() in process_info([idle(graphics={os.getpid(): 1})]).own

    def test_who_has_ended(self) -> None:
        with subprocess.Popen(["true"]) as process:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            people = process_info([used_by(process.pid, os.getpid())])
        assert people.ended == {process.pid}

    def test_one_that_is_gone_tells_nothing_of_others(self) -> None:
        people = process_info([used_by(4_100_000, os.getpid())])
        assert (people.own, people.ended) == ({os.getpid()}, {4_100_000})
        assert people.first_namespace


@needs_first_namespace
def test_names() -> None:
    people = process_info([])
    names = names_of([os.getpid(), 2**22], people)
    assert set(names) == {os.getpid()}
    assert f"(pid {os.getpid()})" in names[os.getpid()]


INSIDE = """
import os, sys
from gpuaff.claims.devices.probe import names_of, process_info
from tests.claims.readings import used_by
if "uvm" in sys.argv:
    held = open("/dev/nvidia-uvm", "w")
listed = [int(pid) for pid in sys.argv[1].split(",")]
people = process_info([used_by(*listed)])
print(os.getpid(), people.first_namespace, sorted(people.own), people.me)
print(sorted(names_of(listed, people)))
"""


@pytest.mark.case("E15")
@pytest.mark.needs("mounts", "pid-namespaces")
class TestInAContainer:
    """The driver's numbers may be the host's, and happen to be those of processes here."""

    def inside(self, listed: str, *how: str) -> list[str]:
        mount = 'mount -t tmpfs none /dev && touch /dev/nvidia-uvm && exec "$0" "$@"'
        apart = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", mount]
        done = run(INSIDE, listed, *how, env=environment(), prefix=apart)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    def test_one_that_is_not_here(self) -> None:
        assert self.inside("1,4000000", "uvm") == ["1 False [] None", "[]"]

    def test_one_that_is_here_by_chance(self) -> None:
        assert self.inside("1") == ["1 False [] 1", "[]"]

    def test_one_that_computes_here(self) -> None:
        assert self.inside("1", "uvm") == ["1 False [1] 1", "[1]"]


class TestOnBoard:
    """Those that have written on the board, in words."""

    def test_a_waiter_is_named_with_its_user(self) -> None:
        with stopped(WAIT) as process:
            process.heard()
            facts = kernel.thread_facts(process.pid, process.pid)
            assert facts is not None
            record = {"pid": process.pid, "start": facts.started, "name": "x", "wanted": 4}
            said = describe(process.pid, written(record))
        assert said is not None
        assert said.startswith("python")
        me = pwd.getpwuid(os.geteuid()).pw_name
        assert said.endswith(f"(pid {process.pid}) of {me}")

    def test_a_waiter_that_is_out_of_sight_is_named_as_it_has_written(self) -> None:
        record = {"pid": 7, "uid": os.geteuid(), "name": "train\x1b[2J", "wanted": 4}
        me = pwd.getpwuid(os.geteuid()).pw_name
        assert describe(7, written(record)) == f"train\\x1b[2J (pid 7) of {me}"
        assert describe(None, written({"wanted": "x"})) == "an unknown program"

    def test_the_age_of_a_lease_is_not_its_process_s(self) -> None:
        with stopped(WAIT) as process:
            process.heard()
            held = Entry(slot=1, waits=False, pid=0, since=time.time() - 7210)
            known = describe(process.pid, held, with_age=True)
            unknown = describe(process.pid)
        assert known is not None
        assert known.endswith(", for 2 h")
        assert unknown is not None
        assert " for " not in unknown.partition("(pid")[2]
