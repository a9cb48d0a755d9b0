"""Real cpusets: the border that the kernel draws, also when it moves."""

from __future__ import annotations

import json

import pytest

from tests import cpusets
from tests.fakedriver.driver import FakeDriver
from tests.processes import CPUS, masks, printed, run, stopped

pytestmark = [
    pytest.mark.fake_driver,
    pytest.mark.needs("cpusets", "two-cpus"),
    pytest.mark.xdist_group("cpusets"),
]


@pytest.mark.case("A5", "A6", "A16", "A18")
def test_a_cpuset_is_a_border(driver: FakeDriver) -> None:
    script = """
        import json, os, gpuaff
        affinity = gpuaff.set_affinity(0, 1)
        seen = gpuaff.Topology.observe()
        print(json.dumps([sorted(affinity), sorted(seen.allowed), sorted(seen.cpus)]))
    """
    with cpusets.cpuset(CPUS[1:]) as inside:
        done = run(script, env=driver.env(), prefix=inside.join_command())
    share, allowed, online = json.loads(done.stdout)
    assert share == allowed == CPUS[1:]
    assert set(CPUS) <= set(online)


TWICE = """
    import sys, gpuaff
    first = gpuaff.set_affinity(0, 1)
    print(sorted(first))
    sys.stdin.readline()
    second = gpuaff.set_affinity(0, 1)
    print(sorted(second))
    sys.stdin.readline()
    print(sorted(second.restore()))
    sys.stdin.readline()
"""


@pytest.mark.case("A17")
def test_a_cpuset_that_shrinks_and_grows_under_the_process(driver: FakeDriver) -> None:
    with (
        cpusets.cpuset(CPUS) as inside,
        stopped(TWICE, env=driver.env(), prefix=inside.join_command()) as process,
    ):
        assert json.loads(process.heard()) == CPUS
        inside.set(CPUS[1:])
        process.go_on()
        assert json.loads(process.heard()) == CPUS[1:], "planned from what is still granted"
        inside.set(CPUS)
        process.go_on()
        assert json.loads(process.heard()) == CPUS, "the original mask is back"
        assert set(masks(process.pid).values()) == {frozenset(CPUS)}


GROWS = """
    import sys, threading, time, gpuaff
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    gpuaff.set_affinity(0, 2)
    print("first")
    sys.stdin.readline()
    second = gpuaff.set_affinity(0, 1)
    print("second")
    sys.stdin.readline()
    second.restore()
    print("restored")
    sys.stdin.readline()
"""


def test_threads_that_a_cpuset_has_moved_meanwhile(driver: FakeDriver) -> None:
    with (
        cpusets.cpuset(CPUS) as inside,
        stopped(GROWS, env=driver.env(), prefix=inside.join_command()) as process,
    ):
        assert process.heard() == "first"
        inside.set(CPUS[-1:])  # the kernel moves all threads there
        process.go_on()
        assert process.heard() == "second"
        inside.set(CPUS)  # and gives them back what they asked for last
        process.go_on()
        assert process.heard() == "restored"
        assert set(masks(process.pid).values()) == {frozenset(CPUS)}


# What CPUs that go and come back do to a thread while a call is under way, done by hand.
LOOKED_BOUND = """
    import os, threading, time, gpuaff
    thread = threading.Thread(target=time.sleep, args=(60,), daemon=True)
    thread.start()
    before = sorted(os.sched_getaffinity(0))
    first, last = {before[0]}, {before[1]}
    gpuaff.set_affinity(0, len(before))
    os.sched_setaffinity(thread.native_id, last)  # as a CPU that has gone leaves it
    affinity = gpuaff.set_affinity(0, 1)
    os.sched_setaffinity(thread.native_id, first)  # as the CPU that is back leaves it
    %s
    print(os.sched_getaffinity(thread.native_id) == os.sched_getaffinity(0) != first)
"""


@pytest.mark.case("A17")
@pytest.mark.parametrize("next_call", ["gpuaff.set_affinity(1, len(before))", "affinity.restore()"])
def test_a_thread_that_looked_bound_during_a_call(driver: FakeDriver, next_call: str) -> None:
    assert printed(LOOKED_BOUND % next_call, env=driver.env()) == "True"


# The cpuset changes after the machine was read and before the mask is set.
BETWEEN = """
    import json, sys
    import gpuaff
    from gpuaff.pinning import pin

    def observe(*, observed=pin.observe, **asked):
        seen = observed(**asked)
        if changes:
            with open(sys.argv[1] + "/cpuset.cpus", "w") as file:
                file.write(changes.pop())
        return seen

    pin.observe = observe
    changes = sys.argv[2].split(";")
    affinity = gpuaff.set_affinity(0, 2)
    codes = [warning.code for warning in affinity.warnings]
    print(json.dumps([sorted(affinity), affinity.pinned, codes]))
"""


@pytest.mark.case("A17")
def test_refused_once_it_plans_again(driver: FakeDriver) -> None:
    with cpusets.cpuset(CPUS) as inside:
        last = ",".join(map(str, CPUS[-1:]))
        done = run(
            BETWEEN, str(inside.folder), last, env=driver.env(), prefix=inside.join_command()
        )
    assert done.returncode == 0, done.stderr
    cpus, pinned, codes = json.loads(done.stdout)
    assert cpus == CPUS[-1:]
    assert pinned
    assert "pin-failed" not in codes


@pytest.mark.case("G4")
def test_a_share_that_is_cut_is_told_as_it_is(driver: FakeDriver) -> None:
    script = BETWEEN.replace("set_affinity(0, 2)", "set_affinity(0, 1)")
    last = str(CPUS[-1])
    with cpusets.cpuset(CPUS) as inside:
        done = run(script, str(inside.folder), last, env=driver.env(), prefix=inside.join_command())
    assert done.returncode == 0, done.stderr
    cpus, pinned, codes = json.loads(done.stdout)
    assert (cpus, pinned) == ([CPUS[-1]], True)
    assert "mask-cut" in codes


REFUSED = """
    import json, sys, threading, time, gpuaff
    thread = threading.Thread(target=time.sleep, args=(60,), daemon=True)
    thread.start()
    first = gpuaff.set_affinity(0, 2)
    print(json.dumps([thread.native_id, sorted(first)]))
    sys.stdin.readline()
    second = gpuaff.set_affinity(1, 2)
    print(json.dumps([sorted(second), [warning.code for warning in second.warnings]]))
    sys.stdin.readline()
"""


SWAPPED = """
    import os, sys, threading, time, gpuaff
    from gpuaff.pinning import pin
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    affinity = gpuaff.set_affinity(1, 2)
    print(sorted(affinity))
    for line in sys.stdin:
        try:
            exec(line)
        except (gpuaff.GPUAffinityError, ZeroDivisionError):
            pass
        print("done")
"""

FAILS = [
    "pin.threads.move = lambda *_: os.sched_setaffinity(0, [5000]); gpuaff.set_affinity(0, 2)",
    "gpuaff.set_affinity(0, 2, min_physical_cores=5000)",
    "gpuaff.set_affinity(0, 2, memory='bind:900')",
    "pin.plan_for_rank = lambda *_: 1 / 0; gpuaff.set_affinity(0, 2, strict=True)",
]


@pytest.mark.parametrize("order", FAILS)
@pytest.mark.case("A17", "G4")
def test_a_call_that_fails_while_a_cpuset_has_taken_the_share_away(
    driver: FakeDriver, order: str
) -> None:
    """Every thread has then asked for what it had asked for before."""
    with (
        cpusets.cpuset(CPUS) as inside,
        stopped(SWAPPED, env=driver.env(), prefix=inside.join_command()) as process,
    ):
        share = json.loads(process.heard())
        inside.set(sorted(set(CPUS) - set(share)))
        process.go_on(order)
        assert process.heard() == "done"
        inside.set(CPUS)
        assert set(masks(process.pid).values()) == {frozenset(share)}


@pytest.mark.parametrize("grown", [True, False], ids=["grown", "still away"])
@pytest.mark.parametrize("order", ["affinity.restore()", "affinity.__exit__(None, None, None)"])
@pytest.mark.case("A17", "G4")
def test_restore_while_a_cpuset_has_taken_the_share_away(
    driver: FakeDriver, order: str, grown: bool
) -> None:
    with (
        cpusets.cpuset(CPUS) as inside,
        stopped(SWAPPED, env=driver.env(), prefix=inside.join_command()) as process,
    ):
        share = json.loads(process.heard())
        inside.set(sorted(set(CPUS) - set(share)))
        if grown:
            inside.set(CPUS)
        process.go_on(order)
        assert process.heard() == "done"
        inside.set(CPUS)
        assert set(masks(process.pid).values()) == {frozenset(CPUS)}


def test_restore_that_has_to_wait_for_the_cpuset(driver: FakeDriver) -> None:
    """While not one CPU of the original mask can be had it is not undone, and can be later."""
    with (
        cpusets.cpuset(CPUS[-1:]) as inside,
        stopped(SWAPPED, env=driver.env(), prefix=inside.join_command()) as process,
    ):
        process.heard()
        inside.set(CPUS[:1])
        process.go_on("affinity.restore(); assert gpuaff.check().expected == affinity")
        assert process.heard() == "done"
        inside.set(CPUS[-1:])
        process.go_on("affinity.restore(); assert gpuaff.check().expected is None")
        assert process.heard() == "done"
        assert set(masks(process.pid).values()) == {frozenset(CPUS[-1:])}


@pytest.mark.skipif(not cpusets.V1, reason="not here: threads have cpusets in version 1 alone")
def test_a_thread_that_a_cpuset_of_its_own_holds_is_told(driver: FakeDriver) -> None:
    with stopped(REFUSED, env=driver.env()) as process:
        tid, first = json.loads(process.heard())
        with cpusets.cpuset(first) as inside:
            (inside.folder / "tasks").write_text(str(tid))
            process.go_on()
            second, codes = json.loads(process.heard())
            assert masks(process.pid)[tid] == frozenset(first)
        assert not set(first) & set(second)
        assert codes == ["threads-refused"]


def test_refused_twice_the_mask_stays(driver: FakeDriver) -> None:
    first, last = str(CPUS[0]), str(CPUS[-1])
    with cpusets.cpuset(CPUS) as inside:
        # popped from the end: the last CPU only, then the first only
        done = run(
            BETWEEN,
            str(inside.folder),
            f"{first};{last}",
            env=driver.env(),
            prefix=inside.join_command(),
        )
    assert done.returncode == 0, done.stderr
    cpus, pinned, codes = json.loads(done.stdout)
    assert cpus == [CPUS[0]]
    assert not pinned
    assert "pin-failed" in codes
