"""What becomes of a memory policy that a pinned process sets: each function is a program."""

import importlib
import io
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import gpuaff
from gpuaff._system import mempolicy
from gpuaff._system.mempolicy import Policy, set_policy
from tests import mempolicies, seccomp
from tests.programs.threads import before, child, holds, now

NODES = mempolicies.nodes()
FIRST = NODES.replace("-", ",").split(",")[0]
BIND_ONE, PREFERRED_ONE, INTERLEAVE_ONE = (
    f"{word}:{FIRST}" for word in ("bind", "preferred", "interleave")
)
BIND, PREFER = f"bind=static:{FIRST}", f"prefer=static:{FIRST}"
INTERLEAVE, ALL = f"interleave=static:{FIRST}", f"interleave:{NODES}"
"""As the kernel writes them."""


def policy() -> str:
    """This thread's policy."""
    return mempolicies.of("self", threading.get_native_id())


def warned(affinity: Any) -> list[str]:
    """The codes of a call's warnings about memory."""
    return [notice.code for notice in affinity.warnings if "mem" in notice.code]


def in_a_thread(work: Callable[[], object]) -> None:
    """Run a function in a thread, until the kernel, too, is done with it."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    while os.path.exists(f"/proc/self/task/{thread.native_id}"):  # noqa: PTH110 - as said
        time.sleep(0.01)


def logged() -> io.StringIO:
    """What is logged from now on."""
    text = io.StringIO()
    logging.basicConfig(format="%(message)s", stream=text)
    return text


def the_policy_is_set_and_put_back() -> None:
    options = {BIND_ONE: BIND, PREFERRED_ONE: PREFER, INTERLEAVE_ONE: INTERLEAVE}
    for option, kernels in options.items():
        affinity = gpuaff.set_affinity(0, 2, memory=option)
        holds(policy() == kernels, affinity.memory == option, warned(affinity) == [])
        affinity.restore()
        holds(affinity.pinned, policy() == "default")
        with gpuaff.set_affinity(1, 2, memory=option):
            holds(policy() == kernels)
        holds(policy() == "default")


def without_names_it_is_the_nodes_of_the_share() -> None:
    for word in ("bind", "preferred", "interleave"):
        affinity = gpuaff.set_affinity(0, 2, memory=word)
        assert affinity.plan is not None
        nodes = affinity.plan.share_of(0).numa_nodes
        holds(affinity.memory == f"{word}:{','.join(map(str, nodes))}", policy() != "default")
        holds(set(nodes) == mempolicy.get_policy().nodes)


def a_second_call_that_cannot_pin_takes_it_back() -> None:
    gpuaff.set_affinity(0, 2, memory=BIND_ONE, openmp=True)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    second = gpuaff.set_affinity(0, 2, memory=BIND_ONE)
    holds(not second.pinned, second.memory is None, policy() == "default")
    holds("OMP_NUM_THREADS" not in os.environ)


def twice_is_the_same_as_once() -> None:
    set_policy(Policy(mempolicy.INTERLEAVE, mempolicy.allowed_nodes()))
    first = gpuaff.set_affinity(0, 2, memory=BIND_ONE)
    gpuaff.set_affinity(1, 2, memory=PREFERRED_ONE)
    holds(policy() == PREFER)
    third = gpuaff.set_affinity(0, 2)
    holds(policy() == ALL, third.memory is None)
    gpuaff.set_affinity(1, 2, memory=BIND_ONE)
    first.restore()
    holds(policy() == ALL)


def blocks_inside_each_other() -> None:
    with gpuaff.set_affinity(0, 2, memory=BIND_ONE) as outer:
        with gpuaff.set_affinity(1, 2, memory=INTERLEAVE_ONE):
            holds(policy() == INTERLEAVE)
        holds(policy() == BIND)
        with gpuaff.set_affinity(1, 2):
            holds(policy() == "default")
        holds(policy() == BIND)
        with gpuaff.set_affinity(1, 2, memory=BIND_ONE):
            pass
        holds(policy() == BIND)
        with gpuaff.set_affinity(1, 2, memory=INTERLEAVE_ONE):
            outer.restore()
        holds(policy() == "default")
    holds(policy() == "default")


def a_policy_that_the_program_has_set_since_stays() -> None:
    affinity = gpuaff.set_affinity(0, 2, memory=BIND_ONE)
    set_policy(Policy(mempolicy.INTERLEAVE, mempolicy.allowed_nodes()))
    holds(gpuaff.set_affinity(0, 2).memory is None, policy() == ALL)
    with gpuaff.set_affinity(0, 2, memory=BIND_ONE):
        pass
    holds(policy() == ALL)
    affinity.restore()
    holds(policy() == ALL)


def only_the_thread_that_has_it_can_put_it_back() -> None:
    text = logged()
    affinity = gpuaff.set_affinity(0, 2, memory=BIND_ONE)

    def other() -> None:
        holds(policy() == BIND)
        affinity.restore()
        holds(policy() == "default", now() == before)

    in_a_thread(other)
    warning = text.getvalue()
    holds(warning.startswith("gpuaff: thread "), warning.count("\n") == 1)
    holds(warning.endswith("call restore() there [memory-not-restored]\n"))
    holds(policy() == BIND, now() == before)
    affinity.restore()
    holds(policy() == "default")
    in_a_thread(affinity.restore)


def a_call_from_another_thread() -> None:
    first = gpuaff.set_affinity(0, 2, memory=BIND_ONE)

    def other() -> None:
        second = gpuaff.set_affinity(0, 2, memory=INTERLEAVE_ONE)
        holds(warned(second) == ["memory-not-restored"], policy() == INTERLEAVE)
        second.restore()
        holds(policy() == "default")

    def heir() -> None:
        second = gpuaff.set_affinity(0, 2)
        holds(warned(second) == ["memory-not-restored"], policy() == "default")

    in_a_thread(other)
    in_a_thread(heir)
    holds(policy() == BIND)
    first.restore()
    holds(policy() == "default")


def a_thread_that_has_ended_is_forgotten() -> None:
    in_a_thread(lambda: gpuaff.set_affinity(0, 2, memory=BIND_ONE))
    holds(warned(gpuaff.set_affinity(0, 2)) == [])


def a_thread_that_outlives_the_policy() -> None:
    affinity, go = gpuaff.set_affinity(0, 2, memory=BIND_ONE), threading.Event()

    def other() -> None:
        go.wait()
        found.append(policy())
        affinity.restore()
        found.append(policy())

    found: list[str] = []
    thread = threading.Thread(target=other)
    thread.start()
    affinity.restore()
    go.set()
    thread.join()
    holds(found == [BIND, "default"])


def a_forked_child_puts_it_back_for_itself() -> None:
    """What a child starts with is its own first policy; its parent's restore() goes further."""
    affinity = gpuaff.set_affinity(0, 2, memory=BIND_ONE)

    def becomes(expected: str, *calls: Callable[[], object]) -> bool:
        for call in calls:
            call()
        return policy() == expected

    def own() -> gpuaff.Affinity:
        return gpuaff.set_affinity(0, 2, memory=INTERLEAVE_ONE)

    holds(child(lambda: becomes(BIND)) == 0)
    holds(child(lambda: becomes("default", affinity.restore)) == 0)
    holds(child(lambda: becomes(BIND, lambda: gpuaff.set_affinity(0, 2))) == 0)
    holds(child(lambda: becomes(BIND, lambda: own().restore())) == 0)
    holds(child(lambda: becomes("default", own, affinity.restore)) == 0)
    holds(policy() == BIND)


def a_filter_that_comes_later() -> None:
    """Then the policy cannot be put back, and that is said."""
    text = logged()
    affinity = gpuaff.set_affinity(0, 2, memory=BIND_ONE)
    seccomp.install(1, [mempolicy.numbers()[1]])
    affinity.restore()
    warning = text.getvalue()
    holds("refused the earlier memory policy, default" in warning, policy() == BIND)
    holds("[memory-not-restored]" in warning)


def all_or_nothing() -> None:
    """The policy is in force when the CPUs are moved, and goes back when they cannot be."""
    threads: Any = importlib.import_module("gpuaff.pinning.threads")
    move, seen = threads.move, []

    def refuse(cpus: frozenset[int], *how: Any) -> Any:
        if cpus == before:
            return move(cpus, *how)
        seen.append(policy())
        raise OSError(22, "Invalid argument")

    threads.move = refuse
    affinity = gpuaff.set_affinity(0, 2, memory=BIND_ONE)
    holds(seen == [BIND, BIND], policy() == "default", affinity.memory is None, now() == before)
    try:
        gpuaff.set_affinity(0, 2, memory=BIND_ONE, strict=True)
    except gpuaff.GPUAffinityError:
        holds(policy() == "default", not affinity.pinned)
    threads.move = move
    first = gpuaff.set_affinity(0, 2, memory=PREFERRED_ONE)
    options: Any
    for options in ({"memory": "bind:999"}, {"memory": "bind", "min_physical_cores": 5000}):
        try:
            gpuaff.set_affinity(1, 2, **options)
        except gpuaff.GPUAffinityError:
            holds(policy() == PREFER, now() == first)
    first.restore()
    holds(policy() == "default")
