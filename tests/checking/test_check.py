"""``gpuaff.check``: what it says of real threads that really were moved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import cpusets
from tests.fakedriver.driver import FakeDriver
from tests.openmp_region import NARROWING
from tests.processes import CPUS, THREADS, printed, run, stopped

pytestmark = [pytest.mark.fake_driver, pytest.mark.needs("two-cpus")]


def found(driver: FakeDriver, script: str, *arguments: str, **env: str) -> dict[str, Any]:
    """The last line that a script printed, which is a check."""
    text = printed(THREADS + script, *arguments, env={**driver.env(), **env})
    said: dict[str, Any] = json.loads(text.splitlines()[-1])
    return said


def test_all_is_well_after_the_call_and_nothing_is_changed(driver: FakeDriver) -> None:
    script = """
gpuaff.set_affinity(0, 2)
tid_bound_to(None)
modules = set(sys.modules)
gpuaff.check()
assert not {"pynvml", "psutil", "rich", "torch"} & (set(sys.modules) - modules)
tell()
"""
    text = printed(THREADS + script, env=driver.env(), fresh=True)
    said = json.loads(text)
    assert said["ok"]
    assert said["expected"] == said["usual"]
    assert [thread["state"] for thread in said["threads"]] == ["ok", "ok"]
    assert said["threads"][0]["tid"] == said["pid"]
    assert said["warnings"] == []
    assert said["gpus"] is None, "not asked"


def test_each_kind_of_thread(driver: FakeDriver) -> None:
    script = """
affinity = gpuaff.set_affinity(0, 2)
tids = [tid_bound_to(cpus) for cpus in (None, before - affinity, before)]
print(*(states()[tid] for tid in tids), gpuaff.check().ok)
affinity.restore()
print(gpuaff.check().expected)
gpuaff.set_affinity(0, 1)
worker = tid_bound_to({max(before)})
print(states()[worker])
os.sched_setaffinity(0, {min(before)})
heir = tid_bound_to(None)
seen = in_a_thread(states)  # another thread may ask
print(seen[os.getpid()], seen[worker], seen[heir])
"""
    assert printed(THREADS + script, env=driver.env()).splitlines() == [
        "ok moved widened False",
        "None",
        "bound",
        "narrowed bound narrowed",
    ]


@pytest.mark.case("C2", "C4", "C5")
@pytest.mark.parametrize("variables", NARROWING, ids=max)
def test_the_openmp_runtime_that_did_it(
    driver: FakeDriver, openmp_library: Path, variables: dict[str, str]
) -> None:
    script = """
import ctypes
gpuaff.set_affinity(0, 1)
library = ctypes.CDLL(sys.argv[1])
library.sum()  # its workers are bound, each to its place: on purpose
tell()
"""
    said = found(driver, script, str(openmp_library), **variables)
    main, *workers = said["threads"]
    assert (main["state"], main["cpus"]) == ("narrowed", str(CPUS[0]))
    assert "GNU's OpenMP runtime (libgomp.so.1" in main["reason"]
    name, value = next(iter(variables.items()))
    assert f"{name}={value}" in main["reason"]
    assert "reapply()" in main["remedy"]
    assert f"unset {name}" in main["remedy"]
    assert not [worker for worker in workers if worker["state"] not in ("bound", "narrowed")]


def test_what_a_terminal_would_obey_is_not_in_the_text(
    driver: FakeDriver, openmp_library: Path
) -> None:
    script = """
import ctypes
gpuaff.set_affinity(0, 1)
ctypes.CDLL(sys.argv[1])
os.environb[b"GOMP_CPU_AFFINITY"] = b"0\\x1b[31m\\n\\xff"
os.sched_setaffinity(0, {min(before)})
print(gpuaff.check())
"""
    text = printed(THREADS + script, str(openmp_library), env=driver.env())
    assert r"because of GOMP_CPU_AFFINITY=0\x1b[31m\n\udcff" in text


@pytest.mark.case("C7")
def test_a_blas_that_may_have_done_it(driver: FakeDriver, openmp_library: Path) -> None:
    script = """
import ctypes, shutil, tempfile
gpuaff.set_affinity(0, 1)
with tempfile.TemporaryDirectory() as folder:
    shutil.copy(sys.argv[1], folder + "/libopenblas.so.0")
    ctypes.CDLL(folder + "/libopenblas.so.0")
    os.sched_setaffinity(0, {min(before)})
    tell()
"""
    main = found(driver, script, str(openmp_library))["threads"][0]
    assert "OpenBLAS (libopenblas.so.0)" in main["reason"]
    assert main["remedy"].endswith("set OPENBLAS_MAIN_FREE=1")
    main = found(driver, script, str(openmp_library), OPENBLAS_MAIN_FREE="1")["threads"][0]
    assert "some import" in main["reason"]


@pytest.mark.case("C1")
def test_a_forked_child_that_was_narrowed(driver: FakeDriver) -> None:
    script = """
affinity = gpuaff.set_affinity(0, 1)
os.sched_setaffinity(0, {min(before)})  # an import, before the workers are forked
child = os.fork()
if child == 0:
    tell()
    sys.stdout.flush()
    os._exit(0)
os.waitpid(child, 0)
"""
    said = found(driver, script)
    assert not said["ok"]
    assert said["threads"][0]["state"] == "narrowed"
    assert said["expected"] != said["usual"] == str(CPUS[0])


STAYS = (
    THREADS
    + """
gpuaff.set_affinity(0, 1)
tid_bound_to(None)
print("pinned")
for line in sys.stdin:
    tell()
"""
)


@pytest.mark.needs("cpusets")
@pytest.mark.xdist_group("cpusets")
def test_a_cpuset_that_shrank(driver: FakeDriver) -> None:
    with (
        cpusets.cpuset(CPUS) as inside,
        stopped(STAYS, env=driver.env(), prefix=inside.join_command()) as process,
    ):
        process.heard()
        inside.set(CPUS[:1])
        process.go_on()
        said = json.loads(process.heard())
        assert [thread["state"] for thread in said["threads"]] == ["cut", "cut"]
        assert "cpuset" in said["threads"][0]["reason"]
        inside.set(CPUS)
        process.go_on()
        assert json.loads(process.heard())["ok"]


def test_it_reads_well(driver: FakeDriver) -> None:
    script = """
gpuaff.set_affinity(0, 1)
tid_bound_to(None)
os.sched_setaffinity(0, {min(before)})
print(os.getpid(), gpuaff.check().name)
print(gpuaff.check())
"""
    who, *lines = printed(THREADS + script, env=driver.env()).splitlines()
    pid, name = who.split()
    assert lines[0].split() == ["process", "GPU", "threads", "CPUs", "state", "names"]
    assert lines[1].split()[:2] == [pid, name]
    assert lines[1].split()[-2:] == ["ok", name]
    assert lines[2].split()[-3:] == ["narrowed", name, pid]
    assert lines[3].startswith(f"{pid} {name}: narrowed: CPUs {CPUS[0]}, gpuaff had set ")
    assert lines[4].startswith("    try: affinity.reapply()")
    assert len(lines) == 5


@pytest.mark.needs("pid-namespaces")
def test_without_proc(driver: FakeDriver) -> None:
    """Another PID namespace's /proc: its numbers mean other processes."""
    script = THREADS + "gpuaff.set_affinity(0, 1); tid_bound_to(None); tell()"
    done = run(script, env=driver.env(), prefix=["unshare", "--pid", "--fork", "--kill-child"])
    said = json.loads(done.stdout.splitlines()[-1])
    assert [warning["code"] for warning in said["warnings"]] == ["threads-unseen"]
    assert [thread["state"] for thread in said["threads"]] == ["ok"]
