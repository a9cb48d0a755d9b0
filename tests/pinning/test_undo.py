"""The way back, step by step, also where calls, threads and blocks are mixed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.fakedriver.driver import FakeDriver
from tests.processes import CPUS, THREADS, all_hold, masks, stopped

pytestmark = [pytest.mark.fake_driver, pytest.mark.needs("two-cpus")]


@pytest.mark.parametrize("fails", [True, False])
def test_a_call_that_had_to_wait_for_another(driver: FakeDriver, fails: bool) -> None:
    """While it waits, the other one moves its thread."""
    demand = ", min_physical_cores=5000" if fails else ""
    script = f"""
from gpuaff.pinning.state import this_process
second = gpuaff.plan(gpuaff.Topology.observe(), 2).shares[1].cpus
def work():
    try:
        gpuaff.set_affinity(1, 2{demand})
    except gpuaff.GPUAffinityError:
        pass
    there.append(now())
    while not done:
        time.sleep(0.01)
    there.append(now())
there, done = [], []
with this_process().lock:
    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.3)  # it waits for the lock by now
    affinity = gpuaff.set_affinity(1, 2)
while not there:
    time.sleep(0.01)
affinity.restore()
done.append(1)
thread.join()
holds(there[0] == second, there[1] == before)
"""
    all_hold(script, env=driver.env())


@pytest.mark.parametrize("undo", ["first.restore()", "second.__exit__(None, None, None)"])
def test_what_the_program_has_widened_since_stays(driver: FakeDriver, undo: str) -> None:
    script = f"""
first = gpuaff.set_affinity(0, 2)
os.sched_setaffinity(0, before - first)
second = gpuaff.set_affinity(0, 2)
os.sched_setaffinity(0, before)
{undo}
holds(now() == before)
"""
    all_hold(script, env=driver.env())


# What CPUs that go and come back do to a thread while a call is under way, done by hand.
LOOKED_BOUND = """
tid, first, last = tid_bound_to(None), {min(before)}, {max(before)}
gpuaff.set_affinity(0, len(before))
os.sched_setaffinity(tid, last)  # as a CPU that has gone leaves it
affinity = gpuaff.set_affinity(0, 1)
os.sched_setaffinity(tid, first)  # as the CPU that is back leaves it
NEXT
holds(os.sched_getaffinity(tid) == now() != first)
"""


@pytest.mark.case("A17")
@pytest.mark.parametrize("call", ["gpuaff.set_affinity(1, len(before))", "affinity.restore()"])
def test_a_thread_that_looked_bound_during_a_call(driver: FakeDriver, call: str) -> None:
    all_hold(LOOKED_BOUND.replace("NEXT", call), env=driver.env())


def test_a_thread_that_calls_reapply_goes_back_where_it_was(driver: FakeDriver) -> None:
    script = """
def work():
    own = threading.get_native_id()
    begin.wait()
    affinity.reapply()
    seen.append(os.sched_getaffinity(own))
    affinity.restore()
    seen.append(os.sched_getaffinity(own))
seen, begin = [], threading.Event()
thread = threading.Thread(target=work)
thread.start()
os.sched_setaffinity(0, {min(before)})
affinity = gpuaff.set_affinity(0, 1)
begin.set()
thread.join()
holds(seen == [{min(before)}, before])
"""
    all_hold(script, env=driver.env())


def test_a_thread_goes_back_to_where_spread_has_found_it(driver: FakeDriver) -> None:
    script = """
def work():
    os.sched_setaffinity(0, {min(before)})
    ids.append(threading.get_native_id())
    ends.wait()
ids, ends = [], threading.Event()
thread = threading.Thread(target=work, daemon=True)
thread.start()
while not ids:
    time.sleep(0.01)
with gpuaff.spread(0, 1):
    pass
holds(os.sched_getaffinity(ids[0]) == {min(before)})
"""
    all_hold(script, env=driver.env())


def test_a_forked_child_that_the_program_has_bound_stays_there(driver: FakeDriver) -> None:
    script = """
share = gpuaff.set_affinity(0, 2)
if os.fork() == 0:
    os.sched_setaffinity(0, before - share)
    os._exit(gpuaff.set_affinity(0, 2) != before - share)
holds(os.wait()[1] == 0)
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
        # It fails where a thread ends meanwhile, as the one that has woken the driver may.
        while subprocess.run(command, check=False, capture_output=True).returncode:
            assert (Path("/proc") / str(process.pid)).exists()
        assert set(masks(process.pid).values()) == {frozenset(CPUS[:1])}
        process.go_on()
        assert json.loads(process.heard()) == CPUS
        assert set(masks(process.pid).values()) == {frozenset(CPUS)}
