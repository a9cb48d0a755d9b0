"""What a pinned process can do, step by step: each function is a program, see test_programs.py."""

import importlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import gpuaff
from gpuaff.pinning.restore import reapply_share
from tests import mempolicies
from tests.processes import cores_of_this_machine, worker_cpus
from tests.programs.threads import (
    before,
    bound_to,
    child,
    codes,
    holds,
    in_a_thread,
    now,
    tid_bound_to,
)


def a_block_leaves_a_bound_thread_where_its_share_was() -> None:
    second = gpuaff.plan(gpuaff.Topology.observe(), 2).shares[1].cpus
    mask = bound_to(second)
    with gpuaff.set_affinity(0, 2) as outer:
        with gpuaff.set_affinity(1, 2):
            pass
        holds(mask() == second, now() == outer)
    holds(mask() == second, now() == before)


def a_block_undoes_calls_inside_it() -> None:
    with gpuaff.set_affinity(0, 2) as outer:
        with gpuaff.set_affinity(1, 2):
            gpuaff.set_affinity(0, 1)
        holds(now() == outer)
        with gpuaff.set_affinity(1, 2):
            outer.restore()
        holds(now() == before)
    holds(now() == before)


def a_worker_bound_inside_the_share_stays_when_it_restores() -> None:
    affinity = gpuaff.set_affinity(0, 1)
    one = frozenset({max(before)})

    def work() -> Any:
        os.sched_setaffinity(0, one)
        affinity.restore()
        return now() == one

    holds(in_a_thread(work), now() == before)


def a_forked_childs_border_is_what_its_parent_had_set() -> None:
    """Until it undoes that."""
    affinity = gpuaff.set_affinity(0, 2)

    def work() -> bool:
        os.sched_setaffinity(0, {min(affinity)})  # as an import does
        thread, own = bound_to(affinity), gpuaff.set_affinity(0, 1)
        holds(own == affinity == thread(), own.restore() == affinity)
        holds(affinity.restore() == before == thread())
        own = gpuaff.set_affinity(0, 1)
        return own == before == thread() == own.restore()

    holds(child(work) == 0)


def a_bound_caller_without_a_gpu_stays_bound() -> None:
    gpuaff.set_affinity(0, 2)
    one = frozenset({max(before)})

    def work() -> Any:
        os.sched_setaffinity(0, one)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        affinity = gpuaff.set_affinity(0, 2)
        return affinity == one == now() and not affinity.pinned

    holds(in_a_thread(work), now() == before)


def the_parent_is_left_alone() -> None:
    """A launcher's own threads stay where they are, whatever its ranks do."""
    rank = "import gpuaff; a = gpuaff.set_affinity(0, 2); print(len(a)); a.restore()"
    mask = bound_to({min(before)})
    done = subprocess.run([sys.executable, "-c", rank], capture_output=True, text=True, check=True)
    holds(int(done.stdout) < len(before), now() == before, mask() == {min(before)})


def threads_that_were_moved_come_back_and_the_bound_one_stays() -> None:
    affinity = gpuaff.set_affinity(0, 1)  # all CPUs of this machine
    low, high = frozenset({min(before)}), {max(before)}
    bound, idle = bound_to(high), bound_to(None)
    os.sched_setaffinity(0, low)  # the main thread, narrowed
    holds(affinity.reapply() == affinity == now())
    holds(bound() == high, idle() == affinity)


def a_thread_outside_of_the_share_comes_back() -> None:
    affinity = gpuaff.set_affinity(0, 2)
    outside = before - affinity
    moved, wide = bound_to(outside), bound_to(before)
    holds(in_a_thread(affinity.reapply) == affinity)
    holds(moved() == affinity, wide() == affinity, gpuaff.check().ok)
    affinity.restore()
    holds(moved() == outside, wide() == before)


def those_who_inherited_a_narrowed_mask_come_back() -> None:
    affinity = gpuaff.set_affinity(0, 1)
    os.sched_setaffinity(0, {min(before)})
    heir = bound_to(None)
    holds(heir() == {min(before)}, affinity.reapply() == heir() == before, gpuaff.check().ok)


def twice_and_after_restore() -> None:
    affinity = gpuaff.set_affinity(0, 2)
    other = bound_to(None)
    holds(affinity.reapply() == affinity.reapply() == affinity)
    for _ in range(2):
        holds(affinity.restore() == before == other(), gpuaff.check().expected is None)
        holds(affinity.reapply() == affinity == other(), gpuaff.check().expected == affinity)
    holds(affinity.restore() == before == other())


def a_caller_that_is_bound_gets_its_own_back_in_the_end() -> None:
    affinity = gpuaff.set_affinity(0, 1)
    one = frozenset({max(before)})

    def work() -> Any:
        os.sched_setaffinity(0, one)
        return affinity.reapply() == affinity and affinity.restore() == one

    holds(in_a_thread(work), now() == before)


def an_earlier_share_takes_the_place_of_a_later_one() -> None:
    first = gpuaff.set_affinity(0, 2)
    other = bound_to(None)
    second = gpuaff.set_affinity(1, 2)
    holds(first.reapply() == first == other(), gpuaff.check().ok)
    holds(second.restore() == before == other())


def in_a_forked_child() -> None:
    """A child is pinned by itself; it knows what its parent had set, and can undo that."""
    affinity = gpuaff.set_affinity(0, 2)

    def work() -> Any:
        holds(gpuaff.check().ok, gpuaff.check().expected == affinity)
        os.sched_setaffinity(0, before)
        other = bound_to(None)
        holds(not gpuaff.check().ok, affinity.reapply() == affinity == other())
        holds(gpuaff.check().ok, gpuaff.check().expected == affinity)
        holds(affinity.restore() == before == other(), gpuaff.check().expected is None)
        return affinity.reapply() == affinity == other() and gpuaff.check().ok

    holds(child(work) == 0, in_a_thread(lambda: child(work)) == 0)
    holds(child(lambda: child(work) == 0) == 0)
    holds(now() == affinity)


def a_helper_on_reserved_cpus_stays() -> None:
    affinity = gpuaff.set_affinity(0, 1, reserve=1)
    helper = bound_to(affinity.reserved)
    holds(len(affinity.reserved) > 0, affinity.isdisjoint(affinity.reserved), gpuaff.check().ok)
    affinity.reapply()
    gpuaff.set_affinity(0, 1, reserve=1)
    holds(helper() == affinity.reserved)


def a_thread_that_was_bound_before_stays() -> None:
    """An OpenMP runtime was loaded first: it has narrowed the main thread and bound its worker."""
    worker = bound_to({max(before)})
    os.sched_setaffinity(0, {min(before)})
    affinity = gpuaff.set_affinity(0, 1)
    checked = gpuaff.check()
    holds([str(thread.state) for thread in checked.threads] == ["ok", "bound"], checked.ok)
    affinity.reapply()
    holds(worker() == {max(before)}, sorted(affinity) == [min(before)])


def heirs_of_a_narrowed_main_thread_go_back_to_the_ranks_share() -> None:
    """An import has narrowed a worker; nobody has bound what it started since."""
    affinity = gpuaff.set_affinity(0, 1)

    def work() -> Any:
        os.sched_setaffinity(0, {min(before)})
        heir = bound_to(None)
        part = gpuaff.spread(0, 1)
        holds(heir() == part == now())
        holds(part.restore() == affinity == heir())
        return True

    holds(child(work) == 0)


def the_end_of_a_block_gives_the_ranks_share_back() -> None:
    share = gpuaff.set_affinity(0, 2)
    with gpuaff.spread(0, 1) as part:
        holds(part <= share, gpuaff.check().ok)
    holds(now() == share, gpuaff.check().expected == share)
    holds(share.restore() == before)


# Twice, and back.


def twice_is_the_same_as_once_for_a_share() -> None:
    first = gpuaff.set_affinity(0, 2)
    holds(gpuaff.set_affinity(0, 2) == first)
    second, whole = gpuaff.set_affinity(1, 2), gpuaff.set_affinity(0, 1)
    holds(gpuaff.set_affinity(0, 2) == first, first.isdisjoint(second), first | second <= whole)


def a_block_that_raises_is_left() -> None:
    try:
        with gpuaff.set_affinity(0, 2) as affinity:
            holds(now() == affinity < before, 1 / 0)
    except ZeroDivisionError:
        holds(now() == before)


def restore_in_another_thread() -> None:
    affinity = gpuaff.set_affinity(0, 2)
    holds(in_a_thread(affinity.restore) == now() == before, affinity.restore() == before)
    holds(gpuaff.set_affinity(1, 2) != affinity)


def restore_leaves_a_thread_that_was_bound_since() -> None:
    mask, affinity = bound_to(None), gpuaff.set_affinity(0, 2)
    tid = tid_bound_to(None)
    os.sched_setaffinity(tid, {max(before)})
    affinity.restore()
    holds(mask() == now() == before, os.sched_getaffinity(tid) == {max(before)})


def a_thread_bound_just_where_the_share_is_stays() -> None:
    """Also where a strict call refuses what comes up after the threads were moved."""
    threads: Any = importlib.import_module("gpuaff.pinning.threads")
    move_all, mask = threads.move_all, bound_to({min(before)})

    def unsettled(*how: Any, **more: Any) -> Any:
        passes = move_all(*how, **more)
        passes.settled = False
        return passes

    gpuaff.set_affinity(0, len(before)).restore()
    holds(now() == before, mask() == {min(before)})
    threads.move_all = unsettled
    try:
        gpuaff.set_affinity(0, len(before), strict=True)
    except gpuaff.GPUAffinityError as error:
        holds("threads-unsettled" in str(error), now() == before, mask() == {min(before)})


def restore_of_an_earlier_call_forgets_no_bound_thread() -> None:
    """It goes back with the call that is in force."""
    one = frozenset({max(before)})

    def work() -> Any:
        os.sched_setaffinity(0, one)
        first, last = gpuaff.set_affinity(0, 2), gpuaff.set_affinity(1, 2)
        first.restore()
        return last.restore() == one

    holds(in_a_thread(work))


def a_childs_border_is_the_mask_that_it_starts_with() -> None:
    affinity = gpuaff.set_affinity(1, 2)
    inner = "import gpuaff, os; print(sorted(gpuaff.set_affinity(0, 1)))"
    spawned = subprocess.run([sys.executable, "-c", inner], capture_output=True, text=True)
    holds(spawned.stdout.strip() == str(sorted(affinity)))


def threads_call_it_at_the_same_time() -> None:
    results: list[object] = []
    threads = [
        threading.Thread(target=lambda: results.append(gpuaff.set_affinity(1, 2))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    holds(len(results) == 8, set(results) == {now()})


def no_thread_can_be_started() -> None:
    """The driver is not woken in advance, and what a cpuset grants is not asked."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    kind: Any = threading.Thread
    kind.start = start
    first, second = gpuaff.set_affinity(0, 2), gpuaff.set_affinity(1, 2)
    holds(first.pinned, second.pinned, now() == second, second.restore() == before)


def an_actor_whose_gpus_change() -> None:
    """A framework sets the variable in a process that runs; the same call follows it."""
    for shown, gpu in (("1", 1), ("0", 0), ("", None)):
        os.environ["CUDA_VISIBLE_DEVICES"] = shown
        affinity = gpuaff.set_affinity(0, 1)
        holds(affinity.gpu == gpu, affinity.pinned is bool(shown), affinity <= before)
    holds(now() == before)  # best effort: no GPU, so nothing is cut


# An unknown rank, among two GPUs; and GPUAFF_PINNED, which says what is in force.


def an_unknown_rank_narrows_nothing() -> None:
    with gpuaff.set_affinity(memory="preferred", openmp=True) as affinity:
        holds(affinity.rank is None, affinity.plan is None, affinity.memory is None)
        holds(not affinity.pinned, now() == before, "OMP_NUM_THREADS" not in os.environ)
    (notice,) = affinity.warnings
    holds("and the mask stays where several are; " in notice.message, notice.code == "no-rank")
    holds(notice.message.endswith("call set_affinity(local_rank, nproc_per_node)"))


def an_unknown_rank_leaves_what_an_earlier_call_has_set() -> None:
    share = gpuaff.set_affinity(1, 2)
    holds(gpuaff.set_affinity() == share, os.environ["GPUAFF_PINNED"].startswith("v1:1:2:"))
    holds(share.restore() == before)


def an_unknown_rank_is_an_error_where_it_must_not_be() -> None:
    try:
        gpuaff.set_affinity(strict=True)
    except gpuaff.GPUAffinityError as error:
        holds("[no-rank; strict]" in str(error), now() == before)
    holds(gpuaff.set_affinity(0, 1, strict=True).gpu == 0)


def the_variable_is_undone_with_the_share() -> None:
    def rank() -> str:
        return os.environ.get("GPUAFF_PINNED", "v1:-")[3:6]

    with gpuaff.set_affinity(0, 2):
        holds(rank() == "0:2")
        with gpuaff.set_affinity(1, 2):
            holds(rank() == "1:2")
        holds(rank() == "0:2")
    holds(rank() == "-")
    gpuaff.set_affinity(0, 2)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    holds(not gpuaff.set_affinity(0, 2).pinned, rank() == "-")


def the_variable_of_this_process_is_no_border_for_its_next_call() -> None:
    """Rank 0 of 1 has all CPUs, and is cut when it turns out to be rank 0 of 2."""
    made = [gpuaff.set_affinity(*call) for call in ((0, 1), (0, 2), (0, 2), (1, 2))]
    sizes, half = [len(affinity) for affinity in made], len(before) // 2
    holds(sizes == [len(before), half, half, half])
    holds(not any("share-inherited" in codes(affinity) for affinity in made))


# Workers: REST is left to them, when the main process has a core.

CORES, REST = cores_of_this_machine(), worker_cpus()


def all_threads_of_a_worker_move_and_go_back() -> None:
    thread, part = bound_to(None), gpuaff.spread(0, 1)
    holds(thread() == now() == part, (part < before) is (len(CORES) > 1))
    holds(part.restore() == before == thread() == now())
    with gpuaff.spread(0, 1):
        holds(thread() == part)
    holds(thread() == before)


def twice_is_the_same_as_once_for_a_worker() -> None:
    affinity, one = gpuaff.set_affinity(0, 1), gpuaff.spread(1, 2)
    holds(one == gpuaff.spread(1, 2) == now(), one | gpuaff.spread(0, 2) == REST)
    affinity.reapply()
    holds(now() == affinity, gpuaff.spread(1, 2) == one)
    gpuaff.set_affinity(0, 1)
    holds(now() == affinity, gpuaff.spread(1, 2) == one)
    with gpuaff.set_affinity(0, 1, cpus=[max(before)]):
        holds(sorted(gpuaff.spread(0, 1)) == [max(before)], gpuaff.spread(0, 1).restore() == before)


def a_forked_worker_cuts_the_share_and_not_a_narrowed_mask() -> None:
    affinity = gpuaff.set_affinity(0, 1)
    os.sched_setaffinity(0, {min(before)})  # as an import does

    def work() -> bool:
        part = gpuaff.spread(0, 1)
        return part == REST and part.restore() == affinity

    holds(child(work) == 0)


def a_workers_mask_of_one_cpu_is_not_widened() -> None:
    os.sched_setaffinity(0, {min(before)})
    holds(sorted(gpuaff.spread(1, 3)) == [min(before)], gpuaff.spread(2, 3).pinned)


# Forked children, blocks and chains of threads.

OWN: tuple[Callable[[], gpuaff.Affinity], ...] = (
    lambda: gpuaff.spread(0, 1),
    lambda: gpuaff.spread(0, 3),
    lambda: gpuaff.set_affinity(0, 2),
)
"""What a child may set itself."""


def leave(block: gpuaff.Affinity) -> None:
    """Come to the end of a block."""
    block.__exit__(None, None, None)


def state() -> tuple[object, ...]:
    """What a call may have set."""
    policy, count = mempolicies.of("self"), os.environ.get("OMP_NUM_THREADS")
    return now(), policy, count, gpuaff.check().expected


def a_block_without_a_gpu_gives_the_outer_share_back() -> None:
    first, other = state(), bound_to(before)
    with gpuaff.set_affinity(0, 2, memory="bind", openmp=True) as outer:
        there = state()
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        with gpuaff.set_affinity(0, 2) as inner:
            holds(not inner.pinned, state() == first, other() == before)
        holds(state() == there, other() == outer)
    holds(state() == first, other() == before)
    os.sched_setaffinity(0, {min(before)})
    with gpuaff.set_affinity(0, 2):
        pass
    holds(now() == {min(before)})


def a_forked_child_that_leaves_blocks() -> None:
    first = state()
    outer = gpuaff.set_affinity(0, 2, memory="bind", openmp=True)
    there = state()

    def work(inner: gpuaff.Affinity, is_reapplied: bool) -> bool:
        if is_reapplied:
            inner.reapply()
        leave(inner)
        holds(state() == there)
        leave(outer)
        return state() == first

    for memory in (None, "interleave"):
        with gpuaff.set_affinity(1, 2, memory=memory) as inner:
            holds(child(partial(work, inner, True)) == 0, child(partial(work, inner, False)) == 0)
        holds(state() == there)


def a_child_that_has_set_something_undoes_its_parents_call() -> None:
    """All of its threads go, as they do where the later call was made in the same process."""
    affinity = gpuaff.set_affinity(0, 1)
    low, high = frozenset({min(before)}), frozenset({max(before)})

    def work(own: Callable[[], gpuaff.Affinity]) -> bool:
        thread = bound_to(None)
        part = own()
        holds(thread() == part == now())
        later = bound_to(low if part == high else high)
        then = later()
        holds(affinity.restore() == before == thread(), later() == then)
        holds(gpuaff.check().expected is None)
        part = own()  # all of them once more
        return thread() == part == now() == gpuaff.check().expected

    for own in OWN:
        holds(child(partial(work, own)) == 0)
    holds(now() == affinity)


def a_child_that_has_set_something_leaves_its_parents_blocks() -> None:
    """The inner block has the same share as the outer one."""
    outer, inner = gpuaff.set_affinity(0, 1), gpuaff.set_affinity(0, 1)

    def work(own: Callable[[], gpuaff.Affinity]) -> bool:
        thread, _ = bound_to(None), own()
        leave(inner)
        holds(thread() == outer == now() == gpuaff.check().expected)
        leave(outer)
        return thread() == before == now() and gpuaff.check().expected is None

    for own in OWN:
        holds(child(partial(work, own)) == 0)


def what_was_not_pinned_is_not_put_back() -> None:
    for name, value in (("CUDA_VISIBLE_DEVICES", ""), ("GPUAFF", "off")):
        os.environ[name] = value
        affinity = gpuaff.set_affinity(0, 2)
        os.sched_setaffinity(0, {max(before)})
        holds(sorted(affinity.reapply()) == [max(before)])
        os.sched_setaffinity(0, before)
        del os.environ[name]


def threads_that_are_born_meanwhile_come_too() -> None:
    """Each thread of a chain starts the next one, and ends."""
    share, ending = frozenset({min(before)}), threading.Event()
    gpuaff.set_affinity(0, 1)

    def link() -> None:
        time.sleep(0.0005)
        if not ending.is_set():
            threading.Thread(target=link).start()

    for _ in range(20):
        ending.clear()
        os.sched_setaffinity(0, before)
        for _ in range(3):
            threading.Thread(target=link).start()
        time.sleep(0.002)
        reapply_share(share, reserved=frozenset(), rank=0)
        seen = masks_of_threads()
        ending.set()
        holds(before not in seen)
        while threading.active_count() > 1:
            time.sleep(0.001)


def masks_of_threads() -> list[frozenset[int]]:
    """The masks of the threads that have not ended yet."""
    found = []
    for tid in os.listdir("/proc/self/task"):  # noqa: PTH208 - its numbers
        with suppress(OSError):
            found.append(frozenset(os.sched_getaffinity(int(tid))))
    return found
