"""The way back, step by step, also where calls, threads and blocks are mixed."""

from __future__ import annotations

import json

import pytest

from tests import cpusets
from tests.fakedriver.driver import FakeDriver
from tests.processes import CPUS, THREADS, all_hold, masks, printed, stopped

pytestmark = [pytest.mark.fake_driver, pytest.mark.needs("two-cpus")]


def test_a_block_leaves_a_bound_thread_where_its_share_was(driver: FakeDriver) -> None:
    script = """
second = gpuaff.plan(gpuaff.Topology.observe(), 2).shares[1].cpus
mask = bound_to(second)
with gpuaff.set_affinity(0, 2) as outer:
    with gpuaff.set_affinity(1, 2):
        pass
    holds(mask() == second, now() == outer)
holds(mask() == second, now() == before)
"""
    all_hold(script, env=driver.env())


def test_a_block_undoes_calls_inside_it(driver: FakeDriver) -> None:
    script = """
with gpuaff.set_affinity(0, 2) as outer:
    with gpuaff.set_affinity(1, 2):
        gpuaff.set_affinity(0, 1)
    holds(now() == outer)
    with gpuaff.set_affinity(1, 2):
        outer.restore()
    holds(now() == before)
holds(now() == before)
"""
    all_hold(script, env=driver.env())


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


def test_a_worker_bound_inside_the_share_stays_when_it_restores(driver: FakeDriver) -> None:
    script = """
affinity = gpuaff.set_affinity(0, 1)
one = {max(before)}
def work():
    os.sched_setaffinity(0, one)
    affinity.restore()
    return now() == one
holds(in_a_thread(work), now() == before)
"""
    all_hold(script, env=driver.env())


def test_a_forked_child_that_called_gpuaff_itself(driver: FakeDriver) -> None:
    script = """
affinity = gpuaff.set_affinity(0, 2)
child = os.fork()
if child == 0:
    gpuaff.set_affinity(0, 1).restore()
    os._exit(affinity.restore() != before)
holds(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0)
"""
    all_hold(script, env=driver.env())


def test_a_forked_child_keeps_its_own_border(driver: FakeDriver) -> None:
    script = """
affinity = gpuaff.set_affinity(0, 2)
child = os.fork()
if child == 0:
    thread = bound_to(None)
    gpuaff.set_affinity(0, 1)
    fine = affinity.restore() == before == thread()
    own = gpuaff.set_affinity(0, 1)
    fine = fine and own <= affinity and thread() == own  # nobody has bound it
    os._exit(not fine or own.restore() != affinity or thread() != affinity)
holds(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0)
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


def test_a_bound_caller_without_a_gpu_stays_bound(driver: FakeDriver) -> None:
    script = """
gpuaff.set_affinity(0, 2)
one = {max(before)}
def work():
    os.sched_setaffinity(0, one)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    affinity = gpuaff.set_affinity(0, 2)
    return affinity == one == now() and not affinity.pinned
holds(in_a_thread(work), now() == before)
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


def test_a_second_call_without_sysfs_from_another_thread(driver: FakeDriver) -> None:
    """The border is that of the first call, not the main thread's mask of the moment."""
    script = """
import gpuaff.topology.live as live
live.read_cpus = lambda tree: gpuaff.Topology()
first = gpuaff.set_affinity(0, 2)
holds(in_a_thread(lambda: gpuaff.set_affinity(1, 2).isdisjoint(first)))
holds(in_a_thread(lambda: gpuaff.set_affinity(0, 1) == before))
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


SHRUNK = (
    THREADS
    + """
import json, sys
affinity = gpuaff.set_affinity(0, 2)
print(json.dumps(sorted(affinity)))
sys.stdin.readline()
affinity.restore()
print("restored")
sys.stdin.readline()
"""
)


@pytest.mark.needs("cpusets")
@pytest.mark.xdist_group("cpusets")
def test_restore_inside_a_cpuset_that_shrank_to_the_share(driver: FakeDriver) -> None:
    with (
        cpusets.cpuset(CPUS) as inside,
        stopped(SHRUNK, env=driver.env(), prefix=inside.join_command()) as process,
    ):
        inside.set(json.loads(process.heard()))
        process.go_on()
        assert process.heard() == "restored"
        inside.set(CPUS)
        assert set(masks(process.pid).values()) == {frozenset(CPUS)}
        process.kill()
        assert "would not move" not in process.errors()


@pytest.mark.case("C4")
def test_a_main_thread_that_a_runtime_has_narrowed_between_two_calls(driver: FakeDriver) -> None:
    """That is undone by the second call, and not kept as somebody's wish for restore()."""
    script = """
gpuaff.set_affinity(0, 1)
os.sched_setaffinity(0, {min(before)})
second = gpuaff.set_affinity(0, 1)
holds(second == before, second.restore() == before)
"""
    all_hold(script, env=driver.env())


@pytest.mark.case("B4")
def test_the_parent_is_left_alone(driver: FakeDriver) -> None:
    """A launcher's own threads stay where they are, whatever its ranks do."""
    script = """
import subprocess, sys
rank = "import gpuaff; a = gpuaff.set_affinity(0, 2); print(len(a)); a.restore()"
mask = bound_to({min(before)})
done = subprocess.run([sys.executable, "-c", rank], capture_output=True, text=True, check=True)
holds(int(done.stdout) < len(before), now() == before, mask() == {min(before)})
"""
    all_hold(script, env=driver.env())
