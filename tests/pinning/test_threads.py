"""Moving threads: real ones, seen from outside."""

from __future__ import annotations

import pytest

from tests.processes import CPUS, masks, printed, stopped

pytestmark = pytest.mark.needs("two-cpus")

STORM = """
    import os, sys, threading, time
    from gpuaff._system.kernel import set_affinity
    from gpuaff.pinning.threads import move_all

    ending = False

    def storm():
        while not ending:
            thread = threading.Thread(target=time.sleep, args=(0.002,))
            thread.start()
            thread.join()

    storms = [threading.Thread(target=storm) for _ in range(8)]
    sleepers = [threading.Thread(target=time.sleep, args=(60,), daemon=True) for _ in range(50)]
    for thread in storms + sleepers:
        thread.start()
    time.sleep(0.05)
    everything = frozenset(os.sched_getaffinity(0))
    target = frozenset({min(everything)})
    set_affinity(target)
    moved = move_all(target, lambda _, mask: mask == everything, {})
    print(moved.settled, len(moved.refused))
    sys.stdin.readline()
"""


@pytest.mark.case("A13")
def test_every_thread_moves_in_a_storm_of_births() -> None:
    with stopped(STORM) as script:
        assert script.heard() == "True 0"
        for _ in range(20):  # those that are born now come from parents that have moved
            seen = masks(script.pid)
            assert len(seen) > 50
            assert set(seen.values()) == {frozenset({CPUS[0]})}


CHAINS = """
    import os, sys, threading, time
    from gpuaff._system.kernel import set_affinity
    from gpuaff.pinning.threads import move_all

    ending = False

    def link():  # each thread starts the next one, and ends
        time.sleep(0.0005)
        if not ending:
            threading.Thread(target=link).start()

    everything = frozenset(os.sched_getaffinity(0))
    target = frozenset({min(everything)})
    lost = 0
    for _ in range(40):
        ending = False
        for _ in range(3):
            threading.Thread(target=link).start()
        time.sleep(0.002)
        set_affinity(target)
        moved = move_all(target, lambda _, mask: mask == everything, {})
        masks = []
        for tid in os.listdir("/proc/self/task"):
            try:
                masks.append(os.sched_getaffinity(int(tid)))
            except OSError:
                pass
        lost += moved.settled and any(mask == everything for mask in masks)
        ending = True
        while threading.active_count() > 1:
            time.sleep(0.001)
        os.sched_setaffinity(0, everything)
    print(lost)
"""


@pytest.mark.case("A13")
def test_no_link_of_a_chain_of_threads_is_missed() -> None:
    assert printed(CHAINS) == "0"


def test_a_thread_bound_on_purpose_stays() -> None:
    script = """
        import os, threading, time
        from gpuaff._system.kernel import set_affinity
        from gpuaff.pinning.threads import move_all
        first, second = sorted(os.sched_getaffinity(0))[:2]
        everything = frozenset(os.sched_getaffinity(0))
        ready = threading.Event()
        def bound():
            os.sched_setaffinity(0, {second})
            ready.set()
            time.sleep(60)
        thread = threading.Thread(target=bound, daemon=True)
        thread.start(); ready.wait()
        set_affinity(frozenset({first}))
        moved = move_all(frozenset({first}), lambda _, mask: mask == everything, {})
        print(os.sched_getaffinity(thread.native_id) == {second}, moved.settled)
    """
    assert printed(script) == "True True"


@pytest.mark.case("G4")
def test_the_kernel_drops_cpus_that_do_not_exist() -> None:
    script = """
        import os
        from gpuaff._system.kernel import get_affinity, set_affinity
        first = min(os.sched_getaffinity(0))
        set_affinity(frozenset({first, 1000}))
        print(sorted(get_affinity()) == [first])
        try:
            set_affinity(frozenset({1000}))
        except OSError as error:
            print(error.errno == 22, sorted(os.sched_getaffinity(0)) == [first])
    """
    assert printed(script).split() == ["True", "True", "True"]
