"""The way back, step by step, also where calls, threads and blocks are mixed."""

from __future__ import annotations

import pytest

from tests.fakedriver.driver import FakeDriver
from tests.processes import THREADS, all_hold, printed

pytestmark = [pytest.mark.fake_driver, pytest.mark.needs("two-cpus")]


@pytest.mark.needs("memory-policies")
def test_a_block_without_a_gpu_gives_the_outer_share_back(driver: FakeDriver) -> None:
    script = """
def state():
    return now(), mempolicies.of("self"), os.environ.get("OMP_NUM_THREADS")
first, other = state(), bound_to(before)
with gpuaff.set_affinity(0, 2, memory="bind", openmp=True) as outer:
    there = state()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with gpuaff.set_affinity(0, 2) as inner:
        holds(not inner.pinned, state() == first, other() == before)
    holds(state() == there, other() == outer, gpuaff.check().expected == outer)
holds(state() == first, other() == before, gpuaff.check().expected is None)
os.sched_setaffinity(0, {min(before)})
with gpuaff.set_affinity(0, 2):
    pass
holds(now() == {min(before)})
"""
    script = f"from tests import mempolicies\n{script}"
    all_hold(script, env=driver.env())


@pytest.mark.needs("memory-policies")
@pytest.mark.parametrize("memory", ["None", "'interleave'"])
@pytest.mark.parametrize("reapplied", [True, False])
def test_a_forked_child_that_leaves_blocks(
    driver: FakeDriver, memory: str, reapplied: bool
) -> None:
    """First the inner one, then the outer one."""
    script = f"""
from tests import mempolicies
def state():
    return now(), mempolicies.of("self"), os.environ.get("OMP_NUM_THREADS"), gpuaff.check().expected
first = state()
with gpuaff.set_affinity(0, 2, memory="bind", openmp=True):
    outer = state()
    with gpuaff.set_affinity(1, 2, memory={memory}) as affinity:
        child = os.fork()
        if not child and {reapplied}:
            affinity.reapply()
    fine = state() == outer
if not child:
    os._exit(0 if fine and state() == first else 1)
holds(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, fine, state() == first)
"""
    all_hold(script, env=driver.env())


@pytest.mark.parametrize("own", ["spread(0, 1)", "spread(0, 3)", "set_affinity(0, 2)"])
def test_a_child_that_has_set_something_undoes_its_parents_call(
    driver: FakeDriver, own: str
) -> None:
    """All of its threads go, as they do where the later call was made in the same process."""
    script = f"""
affinity = gpuaff.set_affinity(0, 1)
def child():
    one = {{max(before)}}
    thread, bound = bound_to(None), bound_to({{min(before)}})
    part = gpuaff.{own}
    fine = [thread() == part == now()]
    later = bound_to({{min(before)}} if part == one else one)
    then = later()
    fine += [affinity.restore() == before == thread(), bound() == {{min(before)}}]
    fine += [later() == then, gpuaff.check().expected is None]
    part = gpuaff.{own}  # all of them once more
    fine += [thread() == part == now(), gpuaff.check().expected == part]
    return all(fine) or print(fine)
if not (pid := os.fork()):
    os._exit(not child())
holds(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, now() == affinity)
"""
    all_hold(script, env=driver.env())


@pytest.mark.parametrize("own", ["spread(0, 1)", "set_affinity(0, 2)"])
def test_a_child_that_has_set_something_leaves_its_parents_blocks(
    driver: FakeDriver, own: str
) -> None:
    """The inner block has the same share as the outer one."""
    script = f"""
with gpuaff.set_affinity(0, 1) as outer:
    with gpuaff.set_affinity(0, 1):
        if not (child := os.fork()):
            thread = bound_to(None)
            gpuaff.{own}
    fine = child or thread() == outer == now() == gpuaff.check().expected
if not child:
    fine = fine and thread() == before == now()
    os._exit(not fine or gpuaff.check().expected is not None)
holds(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, now() == before)
"""
    all_hold(script, env=driver.env())


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


# The kernel refuses the share of a second call, twice: a cpuset moves away under it.
REFUSED = (
    THREADS
    + """
import json, sys
from gpuaff.pinning import pin
from gpuaff.pinning.threads import move

first = gpuaff.set_affinity(0, 2)
other = bound_to(first)

def refuse(cpus, *how):
    if cpus in (first, frozenset(before)):
        return move(cpus, *how)
    raise OSError(22, "Invalid argument")

pin.threads.move = refuse
try:
    second = gpuaff.set_affinity(1, 2, strict=sys.argv[1:] == ["strict"])
except gpuaff.GPUAffinityError as error:
    print("raised", "pin-failed" in str(error))
else:
    print(second == first, second.pinned, [w.code for w in second.warnings])
print(now() == first, other() == first)
print(first.restore() == before, other() == before)
"""
)


@pytest.mark.parametrize("strict", [True, False])
def test_a_second_call_that_is_refused_leaves_the_first_in_force(
    driver: FakeDriver, strict: bool
) -> None:
    arguments = ["strict"] if strict else []
    lines = printed(REFUSED, *arguments, env=driver.env()).splitlines()
    assert lines[0] == ("raised True" if strict else "True False ['pin-failed']")
    assert lines[1:] == ["True True", "True True"]
