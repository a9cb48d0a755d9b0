"""``gpuaff status``: real claims, real waiters and the fake driver's GPUs, seen from outside."""

from __future__ import annotations

import json
import os
import pwd
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuaff._system import kernel
from gpuaff.claims.locking import registry
from gpuaff.claims.locking.registry import Entry
from gpuaff.topology.model import MigInstance
from tests.exits import LARGE, exiting
from tests.fakedriver.driver import FakeDriver, MakeDriver
from tests.fakedriver.play import this_machine
from tests.fakedriver.state import NVML
from tests.processes import as_text, command_line, environment, printed, stopped, unmeasured

pytestmark = pytest.mark.fake_driver

STATUS = (sys.executable, "-m", "gpuaff", "status")
RUN = (sys.executable, "-m", "gpuaff", "run", "--no-pin")
ME = pwd.getpwuid(os.geteuid()).pw_name
LIMIT = 20.0

needs_first_namespace = pytest.mark.skipif(
    not kernel.in_first_pid_namespace(), reason="needs the first PID namespace"
)


class Machine:
    """Two GPUs."""

    def __init__(self, driver: FakeDriver, folder: Path) -> None:
        self.driver = driver
        self.locks = folder / "locks"
        self.env = {"GPUAFF_LOCK_DIR": str(self.locks), "GPUAFF_SAFE_GPU": "off"}

    def told(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        env = environment({**self.driver.env(), **self.env, **variables})
        return as_text(command_line("status", *words, env=env))

    def status(self) -> Any:
        done = self.told("--json")
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(done.stdout)

    def wait_until(self, waiting: int) -> None:
        """Until so many stand on the board: what costs a process each time is asked afterwards."""
        end = time.monotonic() + LIMIT
        while sum(entry.waits for entry in self._entries()) != waiting:
            assert time.monotonic() < end, self.status()
            time.sleep(0.01)

    def _entries(self) -> Sequence[Entry]:
        try:
            handle = os.open(self.locks / "registry", os.O_RDONLY)
        except FileNotFoundError:
            return ()
        try:
            return registry.read(handle)
        finally:
            os.close(handle)

    def soon(self, holds: Callable[[Any], bool]) -> Any:
        """The status, as soon as something holds for it."""
        end = time.monotonic() + LIMIT
        while True:
            found = self.status()
            if holds(found):
                return found
            assert time.monotonic() < end, found

    def refused(self, *words: str) -> str:
        """What ``gpuaff run`` says that ends at once; nothing when it has its GPUs."""
        env = environment({**self.driver.env(), **self.env})
        done = as_text(command_line("run", "--no-pin", *words, "--", "true", env=env))
        assert done.returncode == (75 if done.stderr else 0)
        return done.stderr

    def since(self, pid: int, time: float) -> None:
        """Let the record of a holder say that it has held its GPUs since another time."""
        (entry,) = (one for one in self._entries() if one.pid == pid)
        at = registry.RECORDS + entry.slot * registry.SLOT_SIZE
        with (self.locks / "registry").open("r+b") as file:
            file.seek(at)
            record = {**json.loads(file.read(registry.SLOT_SIZE)), "since": time}
            file.seek(at)
            file.write(json.dumps(record).encode().ljust(registry.SLOT_SIZE))

    @contextmanager
    def running(
        self, *words: str, env: Mapping[str, str] | None = None
    ) -> Iterator[subprocess.Popen[str]]:
        """``gpuaff run``, killed at the end."""
        variables = environment({**self.driver.env(), **self.env, **(env or {})})
        with subprocess.Popen(
            [*RUN, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=variables,
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    @contextmanager
    def holding(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        """A command that has its GPUs by now."""
        with self.running(*words, "--", "sh", "-c", "echo; read x") as process:
            assert process.stdout is not None
            process.stdout.readline()
            yield process


@pytest.fixture
def machine(driver: FakeDriver, tmp_path: Path) -> Machine:
    return Machine(driver, tmp_path)


@contextmanager
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            yield process
        finally:
            process.kill()


def test_nobody_is_there(machine: Machine) -> None:
    found = machine.status()
    assert found["schema_version"] == 1
    assert [(gpu["index"], gpu["free"], gpu["lease"]) for gpu in found["gpus"]] == [
        (0, True, None),
        (1, True, None),
    ]
    assert (found["waiting"], found["warnings"]) == ([], [])
    assert not machine.locks.exists(), "looking leaves no trace"
    lines = machine.told().stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["GPU", "0", "1"]
    assert all(line.endswith("free") for line in lines[1:])


def test_a_lease(machine: Machine) -> None:
    with machine.holding("--gpus", "1") as one:
        free, held = machine.status()["gpus"]
        shown = machine.told().stdout
    assert (free["free"], free["lease"]) == (True, None)
    assert (held["free"], held["busy"]) == (False, "leased")
    lease = held["lease"]
    assert (lease["pid"], lease["user"], lease["gone"]) == (one.pid, ME, False)
    assert lease["command"] == "sh -c echo; read x"
    assert abs(lease["since"] - time.time()) < LIMIT
    assert lease["sharers"] == []
    assert f"leased by sh -c echo; read x (pid {one.pid}) of {ME}, for " in shown
    assert all(gpu["free"] for gpu in machine.status()["gpus"])


@pytest.mark.parametrize("since", ["NaN", "1e999", "-1e308", "1" + "0" * 400])
def test_a_record_that_somebody_has_forged(machine: Machine, since: str) -> None:
    wanted = "1" + "0" * 400
    with machine.running("--gpus", "1", "--", "sh", "-c", "echo $GPUAFF_CLAIM; read x") as one:
        assert one.stdout is not None
        _, slot, _, _, uuid = one.stdout.readline().strip().split(":")
        record = f'{{"since": {since}, "wanted": {wanted}, "gpus": ["{uuid}"]}}'
        with (machine.locks / "registry").open("r+b") as file:
            file.seek(registry.RECORDS + int(slot) * registry.SLOT_SIZE)
            file.write(record.encode().ljust(4096))
        held = machine.status()["gpus"][1]
        assert (held["lease"]["pid"], held["lease"]["since"]) == (None, None)
        assert machine.told().returncode == 0


def test_arguments_that_are_no_text(machine: Machine) -> None:
    """JSON has no such characters; a terminal would obey them."""
    with machine.running("--gpus", "1", "--", "sh", "-c", "echo; read x", "\udcff\x1b[31m") as one:
        assert one.stdout is not None
        one.stdout.readline()
        command = machine.status()["gpus"][1]["lease"]["command"]
        assert command == "sh -c echo; read x \ufffd\x1b[31m"
        assert r"sh -c echo; read x \udcff\x1b[31m (pid" in machine.told().stdout


# One process each, that looks or claims again and again: so neither is away to start.
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

CLAIMS = """
import gpuaff
for _ in range(40):
    gpuaff.claim_gpus(2, placeholder=None).release()
print("had them")
"""


def test_no_lock_is_taken_to_look(machine: Machine) -> None:
    """While somebody looks all the time, others claim, and never find anything taken."""
    env = {**machine.driver.env(), **machine.env}
    with stopped(LOOKS, env=env) as looker:
        assert looker.heard() == "looks"
        assert printed(CLAIMS, env=env) == "had them"
        assert looker.is_running()


def test_a_claimer_that_has_ended(machine: Machine) -> None:
    script = "sleep 60 >/dev/null 2>&1 </dev/null & echo $!"
    with machine.running("--gpus", "0", "--", "sh", "-c", script) as one:
        assert one.stdout is not None
        child = int(one.stdout.readline())
        one.wait()
        lease = machine.status()["gpus"][0]["lease"]
        shown = machine.told().stdout
        os.kill(child, signal.SIGKILL)
    assert (lease["pid"], lease["user"], lease["gone"]) == (one.pid, ME, True)
    assert [(who["pid"], who["command"]) for who in lease["sharers"]] == [(child, "sleep 60")]
    assert f"(pid {one.pid}) of {ME}, which has ended" in shown
    assert f"held by sleep 60 (pid {child}) of {ME}, for " in shown
    machine.soon(lambda found: found["gpus"][0]["free"])


def test_a_claimer_that_is_exiting(machine: Machine) -> None:
    script = f"import gpuaff\ngpuaff.claim_gpus(gpus=[0])\n{LARGE}\nprint()\ninput()"
    with stopped(script, env={**machine.driver.env(), **machine.env}) as one:
        one.heard()
        with exiting(one.pid) as exit_:
            (gpu, _), shown = machine.status()["gpus"], machine.told().stdout
            assert exit_.goes_on()
    assert (gpu["busy"], gpu["message"].endswith(", which is exiting")) == ("leased", True)
    assert (gpu["lease"]["pid"], gpu["lease"]["exiting"]) == (one.pid, True)
    assert [(who["pid"], who["exiting"]) for who in gpu["processes"]] == [(one.pid, True)]
    assert shown.count(", which is exiting") == 2, "beside the lease, and where it computes"


def test_children_that_share_it(machine: Machine) -> None:
    with machine.running("--gpus", "0", "--", "sh", "-c", "sleep 60 & echo $!; read x") as one:
        assert one.stdout is not None
        child = int(one.stdout.readline())
        lease = machine.status()["gpus"][0]["lease"]
        os.kill(child, signal.SIGKILL)
    assert lease["gone"] is False
    assert [who["pid"] for who in lease["sharers"]] == [child]


@needs_first_namespace
def test_others_compute(machine: Machine) -> None:
    with stranger() as other:
        machine.driver.use(1, other.pid, memory=500 << 20)
        free, used = machine.status()["gpus"]
        shown = machine.told().stdout
    assert free["processes"] == []
    assert (used["free"], used["busy"], used["lease"]) == (False, "processes", None)
    (who,) = used["processes"]
    assert (who["pid"], who["command"], who["user"]) == (other.pid, "sleep 60", ME)
    assert (who["kind"], who["memory"]) == ("compute", 500 << 20)
    assert f"computes: sleep 60 (pid {other.pid}) of {ME}, for " in shown
    assert "500 MiB" in shown


@needs_first_namespace
def test_what_this_user_computes_is_no_exception(machine: Machine) -> None:
    """For a claim of one's own, one's own are free; here is told how things stand."""
    machine.driver.use(0, os.getpid())
    assert machine.status()["gpus"][0]["busy"] == "processes"


def test_memory_that_nobody_explains(machine: Machine) -> None:
    machine.driver.set_memory_used(0, 9 << 30)
    found = machine.status()["gpus"][0]
    assert (found["busy"], found["processes"]) == ("memory", [])
    assert "that no visible process explains" in found["message"]
    assert "that no visible process explains" in machine.told().stdout


def test_a_compute_mode(machine: Machine) -> None:
    machine.driver.set_compute_mode(0, 2)  # NVML_COMPUTEMODE_PROHIBITED
    found = machine.status()["gpus"][0]
    assert (found["busy"], found["compute_mode"]) == ("prohibited", "prohibited")


def test_who_waits(machine: Machine) -> None:
    with machine.holding("-n", "1"), machine.running("-n", "2", "--wait", "--", "true") as first:
        machine.wait_until(waiting=1)
        with machine.running("--gpus", "1", "--wait", "--", "true") as second:
            machine.wait_until(waiting=2)
            found = machine.status()["waiting"]
            assert [(who["position"], who["pid"]) for who in found] == [
                (1, first.pid),
                (2, second.pid),
            ]
            assert [(who["wanted"], len(who["gpus"])) for who in found] == [(2, 2), (1, 1)]
            assert {who["user"] for who in found} == {ME}
            assert all(who["well"] and "gpuaff run" in who["command"] for who in found)
            shown = machine.told().stdout.splitlines()
            assert [line.split()[0] for line in shown if " of GPU " in line] == ["1.", "2."]
            assert "2 of GPU 0-1" in shown[-2]
            first.send_signal(signal.SIGSTOP)
            second.wait()  # it passes the one that is stopped
            (one,) = machine.status()["waiting"]
            assert (one["pid"], one["well"]) == (first.pid, False)
            assert "(stopped or stuck: others pass)" in machine.told().stdout
            first.send_signal(signal.SIGINT)
            first.send_signal(signal.SIGCONT)
            first.wait()
        assert machine.status()["waiting"] == []


def test_a_gpu_that_is_kept_for_a_waiter_is_not_free(machine: Machine) -> None:
    """What is shown is what a claim gets: the waiter needs both GPUs, and one is idle."""
    with (
        machine.holding("--gpus", "0"),
        machine.running("-n", "2", "--wait", "--", "true") as waiter,
    ):
        machine.wait_until(waiting=1)
        held, kept = machine.status()["gpus"]
        shown = machine.told().stdout
        refused = machine.refused("-n", "1")
        assert (held["busy"], held["kept_for"]) == ("leased", None)
        assert (kept["free"], kept["busy"], kept["lease"]) == (False, "kept", None)
        who = kept["kept_for"]
        assert (who["pid"], who["user"]) == (waiter.pid, ME)
        assert "gpuaff run" in who["command"]
        assert who == {key: machine.status()["waiting"][0][key] for key in who}
        assert f"(pid {waiter.pid}) of {ME}" in kept["message"]
        first, second = shown.splitlines()[1:3]
        assert "  busy   leased by " in first
        assert "  kept   kept for " in second
        assert f"(pid {waiter.pid}) of {ME}, who waits for 2 of them" in refused
        waiter.send_signal(signal.SIGSTOP)
        assert machine.soon(lambda found: found["gpus"][1]["free"])["gpus"][1]["kept_for"] is None
        assert machine.refused("-n", "1") == "", "it passes the one that is stopped"
        waiter.kill()


def test_a_waiter_for_one_gpu_keeps_no_other(machine: Machine) -> None:
    """What is shown as free is what a claim would get, and what it gets."""
    with (
        machine.holding("--gpus", "0"),
        machine.running("--gpus", "0", "--wait", "--", "true") as waiter,
    ):
        machine.wait_until(waiting=1)
        assert [gpu["free"] for gpu in machine.status()["gpus"]] == [False, True]
        assert machine.refused("--dry-run", "-n", "1") == ""
        assert machine.refused("-n", "1") == ""
        waiter.kill()


def test_an_age_is_the_lease_s_wherever_it_is_shown(machine: Machine) -> None:
    """The process is some seconds old, and has held the GPU for two hours; then for three."""
    with machine.holding("--gpus", "0") as one:
        machine.since(one.pid, time.time() - 7210)
        held = machine.status()["gpus"][0]
        shown = machine.told().stdout
        who = f"leased by sh -c echo; read x (pid {one.pid}) of {ME}, for"
        assert held["message"] == f"{who} 2 h"
        assert f"{who} 2 h\n" in shown
        assert f"GPU 0: {who} 2 h\n" in machine.refused("--gpus", "0")
        machine.since(one.pid, time.time() - 10810)
        assert machine.status()["gpus"][0]["message"] == f"{who} 3 h"


def test_a_claim_inside_a_claim(machine: Machine) -> None:
    inner = f"{' '.join(RUN)} -- sh -c 'echo $$; read x'"
    with machine.running("-n", "2", "--", "sh", "-c", f"{inner}; true") as outer:
        assert outer.stdout is not None
        rank = int(outer.stdout.readline())
        first, second = (gpu["lease"] for gpu in machine.status()["gpus"])
        shown = machine.told().stdout
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
        shown = machine.told().stdout
    assert [first["uuid"], second["uuid"]] == uuids
    assert first["index"] == second["index"] == 0
    assert first["parent"] == second["parent"] != whole["uuid"]
    assert (first["free"], second["free"], whole["free"]) == (True, False, True)
    assert second["lease"]["pid"] == one.pid
    assert uuids[0] in shown


# What cannot be looked at.


def test_no_driver(machine: Machine) -> None:
    machine.driver.refuse(NVML.DRIVER_NOT_LOADED)
    done = machine.told("--json")
    assert done.returncode == 0
    found = json.loads(done.stdout)
    assert found["gpus"] == []
    assert [warning["code"] for warning in found["warnings"]] == ["no-driver"]
    done = machine.told()
    assert (done.returncode, done.stdout) == (0, "")
    assert "[no-driver]" in done.stderr


def test_a_lost_gpu(machine: Machine) -> None:
    machine.driver.lose_gpu(1)
    done = machine.told()
    assert done.returncode == 0
    assert "0" in done.stdout.split()


def test_gpus_that_cannot_be_told_apart(machine: Machine) -> None:
    """Each is judged by its own processes, and none is free, as no claim takes them."""
    machine.driver.state.gpus[1].uuid = machine.driver.state.gpus[0].uuid
    with subprocess.Popen(["sleep", "60"]) as stranger:
        machine.driver.use(0, stranger.pid)
        found = json.loads(machine.told("--json").stdout)
        stranger.kill()
    assert [gpu["busy"] for gpu in found["gpus"]] == ["processes", "unreadable"]
    assert found["gpus"][1]["message"].endswith("so it cannot be claimed")
    first, second = found["warnings"]
    assert first["code"] == second["code"] == "unclaimable"
    assert first["message"].startswith("GPU 0: its UUID, ")
    assert second["message"].endswith(" is another one's as well, so it cannot be claimed")


def test_a_lock_directory_that_cannot_be(machine: Machine) -> None:
    machine.locks.mkdir()
    (machine.locks / "registry").mkdir()
    done = machine.told()
    assert done.returncode == 0
    assert done.stdout.count("free") == 2
    assert "[board-unread]" in done.stderr


@pytest.mark.parametrize("where", ["/dev/null", "/dev/null/x", "/nonexistent/x"])
def test_a_lock_directory_that_cannot_be_made(machine: Machine, where: str) -> None:
    done = machine.told(GPUAFF_LOCK_DIR=where)
    assert done.returncode == 0
    assert "[board-unread]" in done.stderr


@pytest.mark.needs("two-users")
def test_as_another_user(shared_driver: MakeDriver) -> None:
    """Who holds is told to everyone; what other users' processes have open is not."""
    script = """
import io, os, sys
from contextlib import redirect_stdout
from gpuaff.cli import main
with redirect_stdout(io.StringIO()):  # all is imported: that user may not read this checkout
    main(["status", "--json"])
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sys.exit(main(["status", "--json"]))
"""
    driver = shared_driver(this_machine(2))
    machine = Machine(driver, driver.path.parents[1])
    with machine.holding("--gpus", "0") as one:
        env = unmeasured(environment({**driver.env(), **machine.env}))
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    lease = json.loads(done.stdout)["gpus"][0]["lease"]
    assert (lease["pid"], lease["user"], lease["gone"]) == (one.pid, ME, False)
    assert lease["command"] == "sh -c echo; read x"


def test_another_machine(machine: Machine, tree: Path) -> None:
    done = machine.told(GPUAFF_FSROOT=str(tree))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("gpuaff: GPUAFF_FSROOT describes another machine")
