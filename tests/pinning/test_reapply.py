"""A share is put back into force: threads of real processes, seen from inside and outside."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests import cpusets
from tests.fakedriver.driver import FakeDriver
from tests.openmp_region import NARROWING
from tests.processes import CPUS, THREADS, all_hold, masks, run, stopped

pytestmark = [pytest.mark.fake_driver, pytest.mark.needs("two-cpus")]


def test_threads_that_were_moved_come_back_and_the_bound_one_stays(driver: FakeDriver) -> None:
    script = """
affinity = gpuaff.set_affinity(0, 1)   # all CPUs of this machine
low, high = {min(before)}, {max(before)}
bound, idle = bound_to(high), bound_to(None)
os.sched_setaffinity(0, low)           # the main thread, narrowed
holds(affinity.reapply() == affinity == now())
holds(bound() == high, idle() == affinity)
"""
    all_hold(script, env=driver.env())


def test_a_thread_outside_of_the_share_comes_back(driver: FakeDriver) -> None:
    script = """
affinity = gpuaff.set_affinity(0, 2)
outside = before - affinity
moved, wide = bound_to(outside), bound_to(before)
holds(in_a_thread(affinity.reapply) == affinity)
holds(moved() == affinity, wide() == affinity, gpuaff.check().ok)
affinity.restore()
holds(moved() == outside, wide() == before)
"""
    all_hold(script, env=driver.env())


@pytest.mark.case("C1")
def test_those_who_inherited_a_narrowed_mask_come_back(driver: FakeDriver) -> None:
    script = """
affinity = gpuaff.set_affinity(0, 1)
os.sched_setaffinity(0, {min(before)})
heir = bound_to(None)
holds(heir() == {min(before)}, affinity.reapply() == heir() == before, gpuaff.check().ok)
"""
    all_hold(script, env=driver.env())


def test_twice_and_after_restore(driver: FakeDriver) -> None:
    script = """
affinity = gpuaff.set_affinity(0, 2)
other = bound_to(None)
holds(affinity.reapply() == affinity.reapply() == affinity)
for _ in range(2):
    holds(affinity.restore() == before == other(), gpuaff.check().expected is None)
    holds(affinity.reapply() == affinity == other(), gpuaff.check().expected == affinity)
holds(affinity.restore() == before == other())
"""
    all_hold(script, env=driver.env())


def test_a_caller_that_is_bound_gets_its_own_back_in_the_end(driver: FakeDriver) -> None:
    script = """
affinity = gpuaff.set_affinity(0, 1)
one = {max(before)}
def work():
    os.sched_setaffinity(0, one)
    return affinity.reapply() == affinity and affinity.restore() == one
holds(in_a_thread(work), now() == before)
"""
    all_hold(script, env=driver.env())


def test_a_thread_that_somebody_had_bound_to_the_share_itself(driver: FakeDriver) -> None:
    script = """
affinity = gpuaff.set_affinity(0, 2)
affinity.restore()
bound = bound_to(affinity)
affinity.reapply()
affinity.restore()
holds(bound() == affinity, now() == before)
"""
    all_hold(script, env=driver.env())


def test_an_earlier_share_takes_the_place_of_a_later_one(driver: FakeDriver) -> None:
    script = """
first = gpuaff.set_affinity(0, 2)
other = bound_to(None)
second = gpuaff.set_affinity(1, 2)
holds(first.reapply() == first == other(), gpuaff.check().ok)
holds(second.restore() == before == other())
"""
    all_hold(script, env=driver.env())


def test_a_larger_share_takes_those_of_a_smaller_one(driver: FakeDriver) -> None:
    script = """
large = gpuaff.set_affinity(0, 1)
other = bound_to(None)
small = gpuaff.set_affinity(0, 2)
holds(other() == small, large.reapply() == large == other())
"""
    all_hold(script, env=driver.env())


def test_a_thread_with_a_smaller_share_comes_though_the_main_one_was_moved(
    driver: FakeDriver,
) -> None:
    script = """
large = gpuaff.set_affinity(0, 1)
other = bound_to(None)
small = gpuaff.set_affinity(0, 2)
os.sched_setaffinity(0, {max(before)})
holds(other() == small, large.reapply() == large == other())
"""
    all_hold(script, env=driver.env())


def test_a_bound_thread_that_called_first_gets_its_own_back_in_the_end(driver: FakeDriver) -> None:
    script = """
one = {max(before)}
def work():
    os.sched_setaffinity(0, one)
    affinity = gpuaff.set_affinity(0, 2)
    affinity.reapply()
    return now() == affinity != one and affinity.restore() == one
holds(in_a_thread(work), now() == before)
"""
    all_hold(script, env=driver.env())


def test_what_was_not_pinned_is_not_pinned_now(driver: FakeDriver) -> None:
    script = """
affinity = gpuaff.set_affinity(0, 2)
os.sched_setaffinity(0, {max(before)})
holds(affinity.reapply() == {max(before)})
"""
    for name, value in ("CUDA_VISIBLE_DEVICES", ""), ("GPUAFF", "off"):
        all_hold(script, env={**driver.env(), name: value})


@pytest.mark.case("C10")
def test_in_a_forked_child(driver: FakeDriver) -> None:
    """A child is pinned by itself; it knows what its parent had set, and can undo that."""
    script = """
affinity = gpuaff.set_affinity(0, 2)
def work():
    steps = [gpuaff.check().ok, gpuaff.check().expected == affinity]
    os.sched_setaffinity(0, before)
    other = bound_to(None)
    steps += [not gpuaff.check().ok, affinity.reapply() == affinity == other()]
    steps += [gpuaff.check().ok, gpuaff.check().expected == affinity]
    steps += [affinity.restore() == before == other(), gpuaff.check().expected is None]
    steps += [affinity.reapply() == affinity == other(), gpuaff.check().ok]
    return all(steps) or print(steps)
holds(child(work) == 0, in_a_thread(lambda: child(work)) == 0)
holds(child(lambda: child(work) == 0) == 0)
holds(now() == affinity)
"""
    all_hold(script, env=driver.env())


def test_a_child_that_only_restores(driver: FakeDriver) -> None:
    script = """
affinity = gpuaff.set_affinity(0, 2)
def work():
    return affinity.restore() == before and gpuaff.check().expected is None and gpuaff.check().ok
holds(child(work) == 0)
affinity.restore()
holds(child(lambda: gpuaff.check().expected is None) == 0)
"""
    all_hold(script, env=driver.env())


def test_the_border_of_a_child_is_what_it_started_with(driver: FakeDriver) -> None:
    script = """
affinity = gpuaff.set_affinity(0, 1)
def work():
    os.sched_setaffinity(0, {min(before)})   # narrowed by an import
    affinity.reapply()
    return gpuaff.set_affinity(0, 1) == before
holds(child(work) == 0)
"""
    all_hold(script, env=driver.env())


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


@pytest.mark.needs("cpusets")
@pytest.mark.xdist_group("cpusets")
@pytest.mark.case("C10", "G4")
def test_inside_a_cpuset_that_shrank(driver: FakeDriver) -> None:
    with (
        cpusets.cpuset(CPUS) as inside,
        stopped(STAYS, env=driver.env(), prefix=inside.join_command()) as process,
    ):
        process.heard()
        inside.set(CPUS[:1])
        process.go_on()
        assert json.loads(process.heard()) == CPUS[:1]
        process.kill()
        assert "mask-cut" in process.errors()


ELSEWHERE = (
    THREADS
    + """
affinity = gpuaff.set_affinity(0, 2)
print(json.dumps(sorted(affinity)))
sys.stdin.readline()
print(json.dumps(sorted(affinity.reapply())))
sys.stdin.readline()
print(json.dumps(sorted(affinity.reapply())))
sys.stdin.readline()
"""
)


@pytest.mark.needs("cpusets")
@pytest.mark.xdist_group("cpusets")
def test_inside_a_cpuset_that_has_none_of_it_left(driver: FakeDriver) -> None:
    with (
        cpusets.cpuset(CPUS) as inside,
        stopped(ELSEWHERE, env=driver.env(), prefix=inside.join_command()) as process,
    ):
        share = json.loads(process.heard())
        left = sorted(set(CPUS) - set(share))
        inside.set(left)
        process.go_on()
        assert json.loads(process.heard()) == left, "it stays where the kernel has put it"
        inside.set(CPUS)
        process.go_on()
        assert json.loads(process.heard()) == share
        process.kill()
        assert "pin-failed" in process.errors()


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


@pytest.mark.case("B10")
def test_a_helper_on_reserved_cpus_stays(driver: FakeDriver) -> None:
    script = """
affinity = gpuaff.set_affinity(0, 1, reserve=1)
helper = bound_to(affinity.reserved)
holds(len(affinity.reserved) > 0, affinity.isdisjoint(affinity.reserved), gpuaff.check().ok)
affinity.reapply()
gpuaff.set_affinity(0, 1, reserve=1)
holds(helper() == affinity.reserved)
"""
    all_hold(script, env=driver.env())


def test_a_thread_that_was_bound_before_stays(driver: FakeDriver) -> None:
    """An OpenMP runtime was loaded first: it has narrowed the main thread and bound its worker."""
    script = """
worker = bound_to({max(before)})
os.sched_setaffinity(0, {min(before)})
affinity = gpuaff.set_affinity(0, 1)
checked = gpuaff.check()
holds([str(thread.state) for thread in checked.threads] == ["ok", "bound"], checked.ok)
affinity.reapply()
holds(worker() == {max(before)}, affinity == {min(before)})
"""
    all_hold(script, env=driver.env())
