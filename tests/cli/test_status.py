"""``gpuaff status``: real claims, real waiters and the fake driver's GPUs, seen from outside."""

from __future__ import annotations

import json
import os
import pwd
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuaff._system import kernel
from gpuaff.topology.model import MigInstance
from tests.cli.calls import as_another_user
from tests.cli.machine import LIMIT, RUN, Machine, heard
from tests.exits import LARGE, exiting
from tests.fakedriver.driver import FakeDriver, MakeDriver
from tests.fakedriver.play import this_machine
from tests.fakedriver.state import NVML
from tests.processes import stopped

pytestmark = pytest.mark.fake_driver

ME = pwd.getpwuid(os.geteuid()).pw_name

needs_first_namespace = pytest.mark.skipif(
    not kernel.in_first_pid_namespace(), reason="needs the first PID namespace"
)


@pytest.fixture
def machine(driver: FakeDriver, tmp_path: Path) -> Machine:
    return Machine(driver, tmp_path)


def facts(found: dict[str, Any], **expected: object) -> None:
    """What a part of the status says of these names."""
    assert {name: found[name] for name in expected} == expected


def test_free_gpus(machine: Machine) -> None:
    found = machine.status()
    facts(found, schema_version=1, waiting=[], warnings=[])
    for index, gpu in enumerate(found["gpus"]):
        facts(gpu, index=index, free=True, lease=None)
    assert not machine.locks.exists(), "looking leaves no trace"
    lines = machine.shown().splitlines()
    assert [line.split()[0] for line in lines] == ["GPU", "0", "1"]
    assert all(line.endswith("free") for line in lines[1:])


def test_a_lease(machine: Machine) -> None:
    with machine.holding("--gpus", "1") as one:
        free, held = machine.status()["gpus"]
        shown = machine.shown()
    facts(free, free=True, lease=None)
    facts(held, free=False, busy="leased")
    command = "sh -c echo; read x"
    facts(held["lease"], pid=one.pid, user=ME, gone=False, command=command, sharers=[])
    assert abs(held["lease"]["since"] - time.time()) < LIMIT
    assert f"leased by {command} (pid {one.pid}) of {ME}, for " in shown
    assert all(gpu["free"] for gpu in machine.status()["gpus"])


def test_arguments_that_are_no_text(machine: Machine) -> None:
    """JSON has no such characters; a terminal would obey them."""
    words = ("--gpus", "1", "--", "sh", "-c", "echo a; read x", "\udcff\x1b[31m")
    with machine.running(*words) as one:
        heard(one)
        command = machine.status()["gpus"][1]["lease"]["command"]
        assert command == "sh -c echo a; read x \ufffd\x1b[31m"
        assert r"sh -c echo a; read x \udcff\x1b[31m (pid" in machine.shown()


LOOKS = """
import io, sys
from contextlib import redirect_stdout
from gpuaff.cli import main
def look():
    with redirect_stdout(io.StringIO()):
        assert main(["status"]) == 0
look()
print("looks", flush=True)
while True:
    look()
"""


def test_no_lock_is_taken_to_look(machine: Machine) -> None:
    """While a process looks all the time, others never find anything taken."""
    with stopped(LOOKS, env=machine.env) as looker:
        assert looker.heard() == "looks"
        assert all(machine.all_are_free() for _ in range(10))
        assert looker.is_running()


def test_a_claimer_that_has_ended(machine: Machine) -> None:
    script = "sleep 60 >/dev/null 2>&1 </dev/null & echo $!"
    with machine.running("--gpus", "0", "--", "sh", "-c", script) as one:
        child = int(heard(one))
        one.wait()
        lease = machine.status()["gpus"][0]["lease"]
        shown = machine.shown()
        os.kill(child, signal.SIGKILL)
    facts(lease, pid=one.pid, user=ME, gone=True)
    (sharer,) = lease["sharers"]
    facts(sharer, pid=child, command="sleep 60")
    assert f"(pid {one.pid}) of {ME}, which has ended" in shown
    assert f"held by sleep 60 (pid {child}) of {ME}, for " in shown
    machine.soon(lambda found: found["gpus"][0]["free"])


def test_a_claimer_that_is_exiting(machine: Machine) -> None:
    script = f"import gpuaff\ngpuaff.claim_gpus(gpus=[0])\n{LARGE}\nprint()\ninput()"
    with stopped(script, env=machine.env) as one:
        one.heard()
        with exiting(one.pid) as exit_:
            (gpu, _), shown = machine.status()["gpus"], machine.shown()
            assert exit_.goes_on()
    assert (gpu["busy"], gpu["message"].endswith(", which is exiting")) == ("leased", True)
    facts(gpu["lease"], pid=one.pid, exiting=True)
    (process,) = gpu["processes"]
    facts(process, pid=one.pid, exiting=True)
    assert shown.count(", which is exiting") == 2, "beside the lease, and where it computes"


@needs_first_namespace
def test_others_compute(machine: Machine) -> None:
    with machine.used(1) as pid:
        free, used = machine.status()["gpus"]
        shown = machine.shown()
    assert free["processes"] == []
    facts(used, free=False, busy="processes", lease=None)
    (who,) = used["processes"]
    facts(who, pid=pid, command="sleep 60", user=ME, kind="compute", memory=500 << 20)
    assert f"computes: sleep 60 (pid {pid}) of {ME}, for " in shown
    assert "500 MiB" in shown
    # For a claim of one's own, one's own processes are free; the status says how things stand.
    machine.driver.use(0, os.getpid())
    assert machine.status()["gpus"][0]["busy"] == "processes"


def test_what_else_makes_a_gpu_busy(machine: Machine) -> None:
    machine.driver.set_memory_used(0, 9 << 30)
    machine.driver.set_compute_mode(1, 2)  # NVML_COMPUTEMODE_PROHIBITED
    first, second = machine.status()["gpus"]
    facts(first, busy="memory", processes=[])
    facts(second, busy="prohibited", compute_mode="prohibited")
    for text in (first["message"], machine.shown()):
        assert "that no visible process explains" in text


def test_waiters(machine: Machine) -> None:
    with machine.holding("-n", "1"), machine.running("-n", "2", "--wait", "--", "true") as first:
        machine.wait_until(waiting=1)
        with machine.running("--gpus", "1", "--wait", "--", "true") as second:
            machine.wait_until(waiting=2)
            one, two = machine.status()["waiting"]
            facts(one, position=1, pid=first.pid, wanted=2, user=ME, well=True)
            facts(two, position=2, pid=second.pid, wanted=1, user=ME, well=True)
            assert (len(one["gpus"]), len(two["gpus"])) == (2, 1)
            assert "gpuaff run" in one["command"]
            shown = machine.shown().splitlines()
            assert [line.split()[0] for line in shown if " of GPU " in line] == ["1.", "2."]
            assert "2 of GPU 0-1" in shown[-2]
            first.send_signal(signal.SIGSTOP)
            second.wait()  # it passes the one that is stopped
            (one,) = machine.status()["waiting"]
            facts(one, pid=first.pid, well=False)
            assert "(stopped or stuck: others pass)" in machine.shown()
            first.send_signal(signal.SIGINT)
            first.send_signal(signal.SIGCONT)
            first.wait()
        assert machine.status()["waiting"] == []


def test_a_gpu_that_is_kept_for_a_waiter_is_not_free(machine: Machine) -> None:
    """What is shown is what a claim gets: the waiter needs both GPUs, and one is idle."""
    waits = machine.running("-n", "2", "--wait", "--", "true")
    with machine.holding("--gpus", "0"), waits as waiter:
        machine.wait_until(waiting=1)
        found = machine.status()
        held, kept = found["gpus"]
        facts(held, busy="leased", kept_for=None)
        facts(kept, free=False, busy="kept", lease=None)
        facts(kept["kept_for"], pid=waiter.pid, user=ME)
        assert kept["kept_for"].items() <= found["waiting"][0].items()
        assert f"(pid {waiter.pid}) of {ME}" in kept["message"]
        first, second = machine.shown().splitlines()[1:3]
        assert "  busy   leased by " in first
        assert "  kept   kept for " in second
        for options in (["-n", "1"], ["--dry-run"]):
            told = machine.refused(*options)
            assert f"(pid {waiter.pid}) of {ME}, who waits for 2 of them" in told
        waiter.send_signal(signal.SIGSTOP)
        assert machine.soon(lambda found: found["gpus"][1]["free"])["gpus"][1]["kept_for"] is None
        assert machine.refused("-n", "1") == "", "it passes the one that is stopped"
        waiter.kill()


def test_a_waiter_for_one_gpu_keeps_no_other(machine: Machine) -> None:
    """What is shown as free is what a claim would get, and what it gets."""
    waits = machine.running("--gpus", "0", "--wait", "--", "true")
    with machine.holding("--gpus", "0"), waits as waiter:
        machine.wait_until(waiting=1)
        assert [gpu["free"] for gpu in machine.status()["gpus"]] == [False, True]
        assert machine.refused("--dry-run", "-n", "1") == ""
        assert machine.refused("-n", "1") == ""
        waiter.kill()


def test_an_age_is_the_lease_s_wherever_it_is_shown(machine: Machine) -> None:
    """The process is some seconds old, and has held the GPU for two hours; then for three."""
    with machine.holding("--gpus", "0") as one:
        who = f"leased by sh -c echo; read x (pid {one.pid}) of {ME}, for"
        for hours in (2, 3):
            machine.since(one.pid, time.time() - 3600 * hours - 10)
            assert machine.status()["gpus"][0]["message"] == f"{who} {hours} h"
        assert f"{who} 3 h\n" in machine.shown()
        assert f"GPU 0: {who} 3 h\n" in machine.refused("--gpus", "0")


def test_a_claim_inside_a_claim(machine: Machine) -> None:
    inner = f"{' '.join(RUN)} --no-pin -- sh -c 'echo $$; read x'"
    with machine.running("-n", "2", "--", "sh", "-c", f"{inner}; true") as outer:
        rank = int(heard(outer))
        first, second = (gpu["lease"] for gpu in machine.status()["gpus"])
        shown = machine.shown()
    assert first["pid"] == second["pid"] == outer.pid
    assert [who["pid"] for who in first["inside"]] == [rank]
    assert second["inside"] == []
    assert f"claimed inside by sh -c echo $$; read x (pid {rank})" in shown


def test_mig_instances(fake_driver: MakeDriver, tmp_path: Path) -> None:
    plain = this_machine(2)
    uuids = [f"MIG-00000000-0000-4000-8000-00000000000{number}" for number in (1, 2)]
    mig = tuple(
        MigInstance(uuid=uuid, gpu_instance=number, compute_instance=0)
        for number, uuid in enumerate(uuids, 1)
    )
    topology = replace(plain, gpus=(replace(plain.gpus[0], mig=mig), plain.gpus[1]))
    machine = Machine(fake_driver(topology), tmp_path)
    with machine.holding("--gpus", uuids[1]) as one:
        first, second, whole = machine.status()["gpus"]
        assert uuids[0] in machine.shown()
    facts(first, uuid=uuids[0], index=0, free=True, parent=second["parent"])
    facts(second, uuid=uuids[1], index=0, free=False)
    assert (whole["free"], whole["uuid"] != first["parent"]) == (True, True)
    assert second["lease"]["pid"] == one.pid


# What cannot be looked at.


def test_no_driver(machine: Machine) -> None:
    machine.driver.refuse(NVML.DRIVER_NOT_LOADED)
    found = json.loads(machine.call("status", "--json").stdout)
    assert found["gpus"] == []
    assert [warning["code"] for warning in found["warnings"]] == ["no-driver"]
    done = machine.call("status")
    assert (done.returncode, done.stdout) == (0, "")
    assert "[no-driver]" in done.stderr


def test_gpus_that_cannot_be_told_apart(machine: Machine) -> None:
    """Each is judged by its own processes, and none is free, as no claim takes them."""
    machine.driver.state.gpus[1].uuid = machine.driver.state.gpus[0].uuid
    with machine.used(0):
        found = json.loads(machine.call("status", "--json").stdout)
    assert [gpu["busy"] for gpu in found["gpus"]] == ["processes", "unreadable"]
    assert found["gpus"][1]["message"].endswith("so it cannot be claimed")
    first, second = found["warnings"]
    assert first["code"] == second["code"] == "unclaimable"
    assert first["message"].startswith("GPU 0: its UUID, ")
    assert second["message"].endswith(" is another one's as well, so it cannot be claimed")


@pytest.mark.parametrize("where", ["", "/dev/null", "/dev/null/x", "/nonexistent/x"])
def test_a_lock_directory_that_cannot_be_used(machine: Machine, where: str) -> None:
    (machine.locks / "registry").mkdir(parents=True)
    done = machine.call("status", GPUAFF_LOCK_DIR=where or str(machine.locks))
    assert done.returncode == 0
    assert done.stdout.count("free") == 2
    assert "[board-unread]" in done.stderr


@pytest.mark.needs("two-users")
def test_as_another_user(shared_driver: MakeDriver) -> None:
    """Who holds is told to everyone; what other users' processes have open is not."""
    driver = shared_driver(this_machine(2))
    machine = Machine(driver, driver.path.parents[1])
    with machine.holding("--gpus", "0") as one:
        found = as_another_user("status", env=machine.env)
    expected = {"pid": one.pid, "user": ME, "gone": False, "command": "sh -c echo; read x"}
    facts(found["gpus"][0]["lease"], **expected)


def test_another_machine(machine: Machine, tree: Path) -> None:
    done = machine.call("status", GPUAFF_FSROOT=str(tree))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("gpuaff: GPUAFF_FSROOT describes another machine")
