"""A share is put back into force: threads of real processes, seen from inside and outside."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.fakedriver.driver import FakeDriver
from tests.openmp_region import NARROWING
from tests.processes import CPUS, THREADS, all_hold, masks, run, stopped

pytestmark = [pytest.mark.fake_driver, pytest.mark.needs("two-cpus")]


def test_what_was_not_pinned_is_not_pinned_now(driver: FakeDriver) -> None:
    script = """
affinity = gpuaff.set_affinity(0, 2)
os.sched_setaffinity(0, {max(before)})
holds(affinity.reapply() == {max(before)})
"""
    for name, value in ("CUDA_VISIBLE_DEVICES", ""), ("GPUAFF", "off"):
        all_hold(script, env={**driver.env(), name: value})


STAYS = (
    THREADS
    + """
affinity = gpuaff.set_affinity(0, 1)
print("pinned")
sys.stdin.readline()
print(json.dumps(sorted(affinity.reapply())))
sys.stdin.readline()
"""
)


@pytest.mark.needs("taskset")
@pytest.mark.case("C10")
def test_after_a_real_taskset(driver: FakeDriver) -> None:
    with stopped(STAYS, env=driver.env()) as process:
        assert process.heard() == "pinned"
        command = ["taskset", "-a", "-p", "-c", str(CPUS[0]), str(process.pid)]
        subprocess.run(command, check=True, capture_output=True)
        assert set(masks(process.pid).values()) == {frozenset(CPUS[:1])}
        process.go_on()
        assert json.loads(process.heard()) == CPUS
        assert set(masks(process.pid).values()) == {frozenset(CPUS)}


IMPORT = (
    THREADS
    + """
import ctypes
affinity = gpuaff.set_affinity(0, 1)
library = ctypes.CDLL(sys.argv[1])
print(sorted(now()) == sorted(before)[:1])
print(affinity.reapply() == before, library.sum() == 499500)
print(affinity.reapply() == now() == before)
"""
)


@pytest.mark.case("C2", "C4", "C5", "C8")
@pytest.mark.parametrize("variables", NARROWING, ids=max)
def test_after_a_library_that_has_narrowed_the_main_thread(
    driver: FakeDriver, openmp_library: Path, variables: dict[str, str]
) -> None:
    done = run(IMPORT, str(openmp_library), env={**driver.env(), **variables})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True"] * 4


STORM = """
from gpuaff.pinning.restore import reapply_share
share = frozenset({min(before)})
affinity = gpuaff.set_affinity(0, 1)
ending = False

def link():  # each thread starts the next one, and ends
    time.sleep(0.0005)
    if not ending:
        threading.Thread(target=link).start()

lost = 0
for _ in range(20):
    ending = False
    os.sched_setaffinity(0, before)
    for _ in range(3):
        threading.Thread(target=link).start()
    time.sleep(0.002)
    reapply_share(share, reserved=frozenset(), rank=0)
    for tid in os.listdir("/proc/self/task"):
        try:
            lost += os.sched_getaffinity(int(tid)) == before
        except OSError:
            pass
    ending = True
    while threading.active_count() > 1:
        time.sleep(0.001)
holds(lost == 0)
"""


@pytest.mark.case("A13")
def test_threads_that_are_born_meanwhile_come_too(driver: FakeDriver) -> None:
    all_hold(STORM, env=driver.env())
