"""What a process with a claim's CPUs can do, step by step: each function is a program."""

import logging
import os
import threading
import time
from typing import Any

import gpuaff
from gpuaff.pinning.grant import take_grant
from tests import mempolicies
from tests.programs.threads import (
    before,
    bound_to,
    child,
    codes,
    everywhere,
    holds,
    in_a_thread,
    now,
)


def a_claim_of_a_gpu_has_its_border() -> None:
    first = take_grant([0])
    bound_to(None)  # born inside
    holds(codes(first) == [], first.pinned, first.cpus == now(), everywhere() == {first.cpus})
    again = take_grant([0])
    holds(again.give_back() == first.cpus == now())
    holds(first.give_back() == before, everywhere() == {before})
    second = take_grant([1])
    holds(second.cpus.isdisjoint(first.cpus), 2 * len(second.cpus) <= len(before) + 1)
    holds(second.give_back() == before, second.give_back() == before)
    both = take_grant([1, 0, 1])
    holds(both.cpus == first.cpus | second.cpus == before)


def all_threads_go_and_come_back() -> None:
    """Also those that somebody has bound: to a part, outside, or just where all go."""
    low, high = {min(before)}, {max(before)}
    free, outside, inside = bound_to(None), bound_to(high), bound_to(low)
    made = take_grant([0])
    holds(free() == made.cpus, outside() <= made.cpus, inside() == low)
    affinity = gpuaff.set_affinity(0, 1)
    holds(outside() <= made.cpus, inside() == low)
    affinity.restore()
    holds(outside() <= made.cpus, inside() == low, free() == made.cpus == now())
    made.give_back()
    holds(free() == before == now(), outside() == high, inside() == low)


def a_thread_that_keeps_a_part() -> None:
    """It may run inside and outside: the outside is cut, and comes back."""
    os.sched_setaffinity(0, {min(before)})
    wide = bound_to(before)
    made = take_grant([0])
    holds(codes(made) == [], wide() == made.cpus == {min(before)})
    gpuaff.set_affinity(0, 1).restore()
    made.give_back()
    holds(wide() == before, now() == {min(before)})


def a_main_thread_that_was_narrowed() -> None:
    """By an import: nobody has bound it there on purpose."""
    both = gpuaff.set_affinity(0, 1)
    os.sched_setaffinity(0, {max(before)})
    made = take_grant([0])
    holds(now() == made.cpus, made.give_back() == both)


def cores_for_helpers_are_not_the_claims() -> None:
    gpuaff.set_affinity(0, 1, reserve=1)
    helper = bound_to({max(before)})
    holds(gpuaff.check().ok)
    made = take_grant([0])
    outside = bound_to({max(before)})
    holds(not gpuaff.check().ok)
    made.give_back()
    holds(helper() == outside() == {max(before)}, gpuaff.check().ok)


def a_thread_that_calls_while_it_is_bound() -> None:
    high = {max(before)}

    def work() -> Any:
        os.sched_setaffinity(0, high)
        made = take_grant([0])
        there = now() <= made.cpus
        made.give_back()
        return there and now() == high

    def inside() -> Any:
        os.sched_setaffinity(0, high)
        made = take_grant([0, 1])
        there = now() == high
        made.give_back()
        return there and now() == high

    holds(in_a_thread(work), in_a_thread(inside), now() == before)


def calls_from_before_the_claim() -> None:
    """Inside they cannot be undone; afterwards they can."""
    both = gpuaff.set_affinity(0, 1)
    made = take_grant([0])
    holds(now() == made.cpus)
    holds(made.give_back() == both, gpuaff.check().expected == both)
    both.restore()

    with gpuaff.set_affinity(1, 2) as outer:
        made = take_grant([0])
        inner = gpuaff.set_affinity(0, 1)
    holds(now() == outer.restore() == inner, inner.restore() == made.cpus)
    holds(made.give_back() == outer == inner.restore(), everywhere() == {outer})
    holds(outer.restore() == before, everywhere() == {before})

    outer = gpuaff.set_affinity(1, 2)
    made = take_grant([0])
    holds(outer.reapply() == made.cpus, gpuaff.check().ok, outer.isdisjoint(made.cpus))
    made.give_back()
    holds(now() == outer, outer.restore() == before)

    whole = gpuaff.set_affinity(0, 1)
    made = take_grant([0])
    holds(whole.reapply() == made.cpus)
    made.give_back()
    holds(now() == whole)


def what_is_set_besides_comes_back() -> None:
    def state() -> Any:
        return now(), mempolicies.of("self"), os.environ.get("OMP_NUM_THREADS")

    first = state()
    outer = gpuaff.set_affinity(0, 1, memory="bind", openmp=True)
    there = state()
    made = take_grant([0])
    gpuaff.set_affinity(0, 1)
    holds(state()[1:] == first[1:])
    made.give_back()
    holds(state() == there)
    outer.restore()
    holds(state() == first)
    made = take_grant([0])
    inner = gpuaff.set_affinity(0, 1, memory="bind", openmp=True)
    made.give_back()
    holds(state() == first)
    outer = gpuaff.set_affinity(0, 1, memory="bind")
    made = take_grant([0])
    inner = gpuaff.set_affinity(0, 1, openmp=True)
    holds(state()[2] is not None)
    inner.restore()
    made.give_back()
    outer.restore()
    holds(state() == first)


def a_forked_child_stays_inside() -> None:
    """It inherits the mask; it can't release the claim, nor leave it by calls from before."""
    outer = gpuaff.set_affinity(0, 1)
    made = take_grant([0])
    there = frozenset(now())
    inner = gpuaff.set_affinity(0, 1)

    def left() -> Any:
        outer.restore()
        inner.restore()
        made.give_back()
        return now() == there and gpuaff.check().expected == there and outer.reapply() == there

    def cut() -> Any:
        mine = gpuaff.set_affinity(0, 1)
        return mine <= there and mine.restore() == there and outer.restore() == there

    def grandchild() -> Any:
        return child(left) == 0

    holds(child(left) == 0, child(cut) == 0, child(grandchild) == 0, now() == there)
    inner.restore()
    holds(child(left) == 0, child(cut) == 0)
    made.give_back()
    holds(child(lambda: outer.restore() == before) == 0)


def a_mask_that_leaves_part_of_the_border_out() -> None:
    """For all of a claim's GPUs or for none; strict raises."""
    os.sched_setaffinity(0, {min(before)})
    for gpus in ([1], [0, 1]):
        made = take_grant(gpus)
        holds(codes(made) == ["grant-unpinned"], not made.pinned)
        holds(made.cpus == now() == {min(before)}, made.give_back() == now())
        try:
            take_grant(gpus, strict=True)
            raise AssertionError("it was not refused")
        except gpuaff.GPUAffinityError as error:
            holds("[grant-unpinned;" in str(error), now() == {min(before)})


def wholly_or_not_at_all() -> None:
    """A log filter raises at the end: everything is as it was, and it can be done again."""

    class Fails(logging.Filter):
        def filter(self, _: logging.LogRecord) -> bool:
            born.append(bound_to(None))  # where the caller is by now
            raise KeyboardInterrupt

    born: list[Any] = []
    log = logging.getLogger("gpuaff")
    log.setLevel("INFO")
    log.addFilter(fails := Fails())
    low, high = {min(before)}, {max(before)}
    threads = [bound_to(mask) for mask in (None, low, high)]

    def state() -> Any:
        return [thread() for thread in threads], now(), gpuaff.check().expected

    first = state()
    for _ in range(2):
        try:
            take_grant([0])
            raise AssertionError("it was not interrupted")
        except KeyboardInterrupt:
            holds(state() == first)
    log.removeFilter(fails)
    outer = gpuaff.set_affinity(1, 2)
    there = state()
    log.addFilter(fails)
    try:
        take_grant([0])
        raise AssertionError("it was not interrupted")
    except KeyboardInterrupt:
        holds(state() == there)
    log.removeFilter(fails)
    take_grant([0]).give_back()
    holds(state() == there)
    outer.restore()
    holds(state() == first, all(thread() == before for thread in born))


def threads_that_are_born_meanwhile() -> None:
    stop = threading.Event()

    def breed() -> Any:
        while not stop.is_set():
            threading.Thread(target=stop.wait, daemon=True).start()
            time.sleep(0.0005)

    threading.Thread(target=breed, daemon=True).start()
    time.sleep(0.02)
    made = take_grant([0])
    holds(everywhere() == {made.cpus})
    made.give_back()
    holds(everywhere() == {before})
    stop.set()


def set_affinity_cuts_inside_and_goes_back_to_it() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
    made = take_grant([0, 1])
    one = gpuaff.set_affinity(0, 2, partition="machine")
    holds(one < made.cpus, one.restore() == made.cpus, everywhere() == {made.cpus})
    made.give_back()
    made = take_grant([1])
    two = gpuaff.set_affinity(0, 1)
    holds(two <= made.cpus, codes(two) == [])
    with gpuaff.set_affinity(1, 2) as inner:
        holds(inner <= made.cpus)
    holds(two.restore() == made.cpus == gpuaff.check().expected, gpuaff.check().ok)
    again = gpuaff.set_affinity(0, 1)
    holds(made.give_back() == before, everywhere() == {before}, gpuaff.check().expected is None)
    for late in (again, two, one):
        late.restore()
    holds(everywhere() == {before})
