"""``gpuaff check``: real processes, looked at from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cli.calls import as_another_user, refused
from tests.fakedriver.driver import FakeDriver, MakeDriver
from tests.fakedriver.play import this_machine
from tests.processes import CPUS, SRC, THREADS, Program, stopped

Runner = Callable[..., "subprocess.CompletedProcess[str]"]

START = (
    THREADS
    + """
import os, sys, threading, time
everything = os.sched_getaffinity(0)
low, high = {min(everything)}, {max(everything)}

"""
)

END = """
print("ready", flush=True)
sys.stdin.readline()
"""


@contextmanager
def process(script: str, **env: str) -> Iterator[Program]:
    """A process that has done what the script says, and waits."""
    with stopped(START + textwrap.dedent(script) + END, env=env, fresh=bool(env)) as made:
        assert made.heard() == "ready"
        yield made


def checked(gpuaff: Runner, *args: str, code: int, env: Mapping[str, str] | None = None) -> Any:
    done = gpuaff("check", "--json", *args, env=env, fresh=True)  # it looks at its parent
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def states(found: Any) -> list[str]:
    return [thread["state"] for thread in found["processes"][0]["threads"]]


def test_a_quiet_process(gpuaff: Runner) -> None:
    with process("tid_bound_to(None)") as quiet:
        found = checked(gpuaff, "--pid", str(quiet.pid), code=0)
        shown = gpuaff("check", "--pid", str(quiet.pid))
    (one,) = found["processes"]
    assert (found["schema_version"], found["ok"], found["warnings"]) == (1, True, [])
    assert (one["pid"], one["expected"], one["gpus"]) == (quiet.pid, None, [])
    assert states(found) == ["ok", "ok"]
    assert shown.returncode == 0
    assert [line.split()[0] for line in shown.stdout.splitlines()] == ["process", str(quiet.pid)]


@pytest.mark.needs("two-cpus")
@pytest.mark.case("C1", "C2")
def test_a_narrowed_main_thread(gpuaff: Runner) -> None:
    threads = "tid_bound_to(None); tid_bound_to(None); tid_bound_to(high)"
    script = f"{threads}; os.sched_setaffinity(0, low)"
    with process(script) as narrowed:
        found = checked(gpuaff, "--pid", str(narrowed.pid), code=1)
        shown = gpuaff("check", "--pid", str(narrowed.pid))
    assert states(found) == ["narrowed", "ok", "ok", "bound"]
    assert shown.returncode == 1
    assert f"{narrowed.pid} python" in shown.stdout
    assert f"narrowed: CPUs {CPUS[0]}, most threads have " in shown.stdout
    assert "try: taskset -p -c" in shown.stdout


@pytest.mark.needs("two-cpus")
@pytest.mark.case("C4", "C5")
def test_the_variables_of_another_process_are_read(gpuaff: Runner) -> None:
    script = """
    import ctypes
    tid_bound_to(None); tid_bound_to(None)
    ctypes.CDLL("libgomp.so.1")
    """
    with process(script, GOMP_CPU_AFFINITY=str(CPUS[0])) as narrowed:
        found = checked(gpuaff, "--pid", str(narrowed.pid), code=1)
    main = found["processes"][0]["threads"][0]
    assert f"GOMP_CPU_AFFINITY={CPUS[0]}" in main["reason"]
    assert "unset GOMP_CPU_AFFINITY" in main["remedy"]


@pytest.mark.needs("two-cpus", "taskset")
def test_a_thread_that_taskset_moved(gpuaff: Runner) -> None:
    script = "os.sched_setaffinity(0, low); tid_bound_to(None); print(tid_bound_to(None))"
    with stopped(START + script + END) as moved:
        tid = moved.heard()
        moved.heard()
        command = ["taskset", "-p", "-c", str(CPUS[-1]), tid]
        subprocess.run(command, check=True, capture_output=True)
        found = checked(gpuaff, "--pid", str(moved.pid), code=1)
        of_the_thread = checked(gpuaff, "--pid", tid, code=1)
    assert states(found) == ["ok", "ok", "moved"]
    assert of_the_thread == found, "a thread's id means its process"


# A process that starts children, calls gpuaff, and prints what it said.
PARENT = """
import json, os, subprocess, sys
script = ["sh", "-c", "sleep 60 & echo $!; wait"]
shell = subprocess.Popen(script, stdout=subprocess.PIPE, text=True, start_new_session=True)
family = {os.getpid(), shell.pid, int(shell.stdout.readline())}
zombie = subprocess.Popen(["true"])
os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
done = subprocess.run([sys.executable, "-m", "gpuaff", "check", "--json"], stdout=subprocess.PIPE)
os.killpg(shell.pid, 9)
print({one["pid"] for one in json.loads(done.stdout)["processes"]} == family, done.returncode)
"""


def test_the_family_of_who_calls(gpuaff: Runner) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PARENT],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SRC)},
        check=False,
    )
    assert done.stdout.split() == ["True", "0"], done.stderr


def test_one_of_the_family_is_off(gpuaff: Runner) -> None:
    """The tests' own process is the parent here."""
    with process(
        "tid_bound_to(None); tid_bound_to(None); os.sched_setaffinity(0, low)"
    ) as narrowed:
        found = checked(gpuaff, code=1 if len(CPUS) > 1 else 0)
    by_pid = {one["pid"]: one for one in found["processes"]}
    assert os.getpid() in by_pid
    assert by_pid[narrowed.pid]["ok"] == (len(CPUS) == 1)


# Which GPUs a process is on.


@pytest.fixture
def driver(fake_driver: MakeDriver) -> FakeDriver:
    """GPU 0 is near the first CPU of this machine only, GPU 1 near the last, GPU 2 unknown."""
    made = fake_driver(this_machine(3))
    made.set_cpus(0, node=CPUS[:1], socket=CPUS[:1])
    made.set_cpus(1, node=CPUS[-1:], socket=CPUS)
    made.set_cpus(2)
    return made


NEAR: dict[str, tuple[str, list[int], dict[str, object]]] = {
    "far from it": ("", [0], {"gpus": [0], "near": str(CPUS[0]), "ok": False}),
    "near it": ("os.sched_setaffinity(0, low)", [0], {"far": "", "ok": True}),
    "in its socket": ("", [1], {"gpus": [1], "near": str(CPUS[-1]), "far": "", "ok": True}),
    "near one of two": ("", [0, 1], {"gpus": [0, 1], "ok": True}),
    "near an unknown one": ("", [2], {"gpus": [2], "near": None, "far": "", "ok": True}),
}


@pytest.mark.fake_driver
@pytest.mark.needs("two-cpus")
class TestNear:
    @pytest.mark.parametrize("case", NEAR)
    def test_where_a_process_is(self, case: str, gpuaff: Runner, driver: FakeDriver) -> None:
        script, gpus, expected = NEAR[case]
        driver.set_memory(2, None)
        with process(script) as user:
            for gpu in gpus:
                driver.use(gpu, user.pid)
            code = 0 if expected["ok"] else 1
            found = checked(gpuaff, "--pid", str(user.pid), code=code, env=driver.env())
            shown = gpuaff("check", "--pid", str(user.pid), env=driver.env()).stdout
        (one,) = found["processes"]
        assert {name: one[name] for name in expected} == expected
        assert states(found) == ["ok"], "its threads are fine among each other"
        assert ("outside of the socket of GPU 0; near are" in shown) is not expected["ok"]

    def test_processes_that_are_not_told(self, gpuaff: Runner, driver: FakeDriver) -> None:
        driver.fail("nvmlDeviceGetComputeRunningProcesses_v3")
        with process("") as untold:
            driver.use(0, untold.pid)
            found = checked(gpuaff, "--pid", str(untold.pid), code=0, env=driver.env())
        assert found["processes"][0]["gpus"] == []

    @pytest.mark.case("E15")
    @pytest.mark.needs("pid-namespaces")
    @pytest.mark.parametrize("present", [True, False])
    def test_inside_a_container(self, driver: FakeDriver, present: bool) -> None:
        """The driver's numbers are not those of another PID namespace, where one is missing."""
        driver.use(0, 1)
        if not present:
            driver.use(1, 4_000_000)
        command = [
            *("unshare", "--pid", "--fork", "--mount-proc", "--kill-child"),
            *(sys.executable, "-c", INSIDE),
        ]
        env = {**os.environ, "PYTHONPATH": str(SRC), **driver.env()}
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
        found = json.loads(done.stdout)
        assert found["processes"][0]["gpus"] == ([0] if present else [])
        codes = [warning["code"] for warning in found["warnings"]]
        assert codes == ([] if present else ["pids-foreign"])


INSIDE = """
import os, subprocess, sys
subprocess.run([sys.executable, "-m", "gpuaff", "check", "--json", "--pid", str(os.getpid())])
"""


def test_another_machine_is_described(gpuaff: Runner, tree: Path) -> None:
    with process("") as quiet:
        done = gpuaff("check", "--pid", str(quiet.pid), env={"GPUAFF_FSROOT": str(tree)})
    assert done.returncode == 0
    assert "[other-machine]" in done.stderr
    assert str(quiet.pid) in done.stdout


# What cannot be looked at.


@pytest.mark.parametrize("value", ["0", "-1", "x", "1.5", "", "99999999999"])
def test_what_is_no_pid(value: str) -> None:
    assert "argument --pid" in refused("check", f"--pid={value}", code=2)


def test_no_such_process() -> None:
    line = refused("check", "--pid", "4194304")  # just above the highest that Linux gives
    assert line.startswith("gpuaff: --pid 4194304: no such process")
    with subprocess.Popen(["true"]) as zombie:
        os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
        line = refused("check", "--pid", str(zombie.pid))
    assert line.startswith(f"gpuaff: --pid {zombie.pid}: no such process: it has ended")


STORM = """
import threading, time
def link():
    time.sleep(0.0005)
    threading.Thread(target=link).start()
for _ in range(3):
    threading.Thread(target=link).start()
time.sleep(0.05)
print("going", flush=True)
"""


def test_threads_that_come_and_go(gpuaff: Runner) -> None:
    with stopped(STORM) as script:
        assert script.heard() == "going"
        found = checked(gpuaff, "--pid", str(script.pid), code=0)
    assert set(states(found)) == {"ok"}


def test_a_main_thread_that_has_ended(gpuaff: Runner) -> None:
    """Its other threads go on; it is a zombie until they have ended."""
    script = """
    import ctypes
    tid_bound_to(None)
    print("ready", flush=True)
    ctypes.CDLL(None).syscall(60 if os.uname().machine == "x86_64" else 93, 0)
    """
    with stopped(START + textwrap.dedent(script)) as headless:
        headless.heard()
        stat = Path(f"/proc/{headless.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        found = checked(gpuaff, "--pid", str(headless.pid), code=0)
    assert len(states(found)) == 1


@pytest.mark.needs("two-cpus", "two-users")
def test_another_user_looks_at_ours() -> None:
    """Masks are for everyone to see; libraries, variables and open files are not."""
    script = "tid_bound_to(None); tid_bound_to(None); os.sched_setaffinity(0, low)"
    with process(script, GOMP_CPU_AFFINITY="0") as narrowed:
        found = as_another_user("check", "--pid", str(narrowed.pid), env={}, code=1)
    assert states(found) == ["narrowed", "ok", "ok"]
    assert "some import" in found["processes"][0]["threads"][0]["reason"]
