"""Whatever goes wrong in a call, the process is then as it was before."""

from __future__ import annotations

import os

import pytest

from tests.fakedriver.driver import FakeDriver
from tests.processes import run

pytestmark = [
    pytest.mark.fake_driver,
    pytest.mark.needs("two-cpus"),
    pytest.mark.needs("memory-policies"),
]

START = """
import logging, os, signal, threading, time
import gpuaff
from tests import mempolicies, seccomp
from tests.programs.threads import Helper
from gpuaff.pinning import pin
from gpuaff._system import mempolicy, nvml_prewarm

def masks():
    # Those that wake the driver may take a moment to end.
    return {tid: os.sched_getaffinity(tid) for tid in (os.getpid(), helper.native_id)}

def settled():
    # Only then does check() see no thread of those, which has the mask that was in force meanwhile.
    while len(os.listdir("/proc/self/task")) > 2:
        time.sleep(0.001)
    return True

def own():
    return mempolicies.of("self", threading.get_native_id()), os.environ.get("OMP_NUM_THREADS")

def raised(work):
    try:
        work()
    except BaseException as error:
        return type(error).__name__
    return None

def bound(share):
    return lambda: os.sched_setaffinity(0, share)

before = os.sched_getaffinity(0)
helper = Helper()
"""


def said(driver: FakeDriver, script: str, **env: str) -> list[str]:
    """What a script printed; what it logged is left out."""
    done = run(START + script, env={**driver.env(), **env})
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


EARLIER = ["", "gpuaff.set_affinity(1, 2, memory='bind', openmp=True)"]


@pytest.mark.parametrize("first", EARLIER)
def test_a_logging_filter_that_raises(driver: FakeDriver, first: str) -> None:
    script = f"""
class Refuse(logging.Filter):
    def filter(self, record):
        raise RuntimeError
{first}
logging.getLogger("gpuaff").setLevel(logging.INFO)
logging.getLogger("gpuaff").addFilter(Refuse())
then = masks(), own()
print(raised(lambda: gpuaff.set_affinity(0, 2, memory="interleave", openmp=True)))
print((masks(), own()) == then)
"""
    assert said(driver, script) == ["RuntimeError", "True"]


# Ctrl-C at any moment is tested in test_interrupted.py.


@pytest.mark.parametrize("rank", [0, 1])
def test_strict_puts_each_thread_where_it_was(driver: FakeDriver, rank: int) -> None:
    """Also one that somebody had set back, which the call would have moved along."""
    script = f"""
gpuaff.set_affinity(0, 2)
helper.do(bound(before))
def unsettled(*how, move=pin.threads.move_all, **more):
    found = move(*how, **more)
    found.settled = False
    return found
pin.threads.move_all = unsettled
then = masks()
print(raised(lambda: gpuaff.set_affinity({rank}, 2, strict=True)), masks() == then)
"""
    assert said(driver, script) == ["GPUAffinityError", "True"]


def test_an_inherited_policy_outlives_a_call_that_fails(driver: FakeDriver) -> None:
    script = """
gpuaff.set_affinity(0, 2, memory="bind", openmp=True)
heir = Helper()
then = heir.do(own)
fail = lambda: gpuaff.set_affinity(0, 2, memory="bind:900")
print(then[0].startswith("bind"), heir.do(lambda: raised(fail)), heir.do(own) == then)
with_outer = lambda: gpuaff.set_affinity(1, 2, memory="interleave").__exit__(None, None, None)
heir.do(with_outer)
print(heir.do(own) == then)
"""
    assert said(driver, script) == ["True", "GPUAffinityError", "True", "True"]


def test_what_somebody_else_has_set_outlives_a_call_that_fails(driver: FakeDriver) -> None:
    script = """
gpuaff.set_affinity(0, 2, memory="bind", openmp=True)
mempolicy.set_policy(mempolicy.Policy(mempolicy.LOCAL))
os.environ["OMP_NUM_THREADS"] = "7"
then = own()
print(raised(lambda: gpuaff.set_affinity(0, 2, memory="bind:900", openmp=True)), own() == then)
"""
    assert said(driver, script) == ["GPUAffinityError", "True"]


@pytest.mark.parametrize(
    ("what", "spot"),
    [
        ("affinity.restore", "threads.move_all"),
        ("affinity.reapply", "threads.move"),
        ("call", "plan_for_rank"),
        ("leave", "threads.move_all"),
    ],
)
def test_a_signal_handler_may_not_call_into_a_call(
    driver: FakeDriver, what: str, spot: str
) -> None:
    script = f"""
affinity = gpuaff.set_affinity(0, 2)
call = lambda: gpuaff.set_affinity(0, 2)
leave = lambda: affinity.__exit__(None, None, None)
real = pin.{spot}
def interrupted(*arguments, **options):
    pin.{spot} = real
    found = real(*arguments, **options)
    signal.raise_signal(signal.SIGUSR1)
    return found
pin.{spot} = interrupted
signal.signal(signal.SIGUSR1, lambda *_: {what}())
then = masks()
print(raised(lambda: gpuaff.set_affinity(1, 2)), masks() == then, settled() and gpuaff.check().ok)
signal.signal(signal.SIGUSR1, lambda *_: seen.append(gpuaff.check().expected))
seen, pin.{spot} = [], interrupted
second = gpuaff.set_affinity(1, 2)
print(bool(seen), set(map(frozenset, masks().values())) == {{second}}, second.restore() == before)
"""
    assert said(driver, script) == ["GPUAffinityError", *["True"] * 5]


_NUMBERS = {"x86_64": (203, 204), "aarch64": (122, 123)}
"""Of sched_setaffinity and sched_getaffinity."""

SETTING, GETTING = _NUMBERS.get(os.uname().machine, (-1, -1))

FILTERED = """
affinity = gpuaff.set_affinity(0, 2, memory="bind", openmp=True)
then = helper.do(lambda: (masks(), gpuaff.check().expected)), own()
seccomp.install(1, {calls})
call = gpuaff.set_affinity(1, 2)
print(call.pinned, [notice.code for notice in call.warnings])
print(raised(lambda: gpuaff.set_affinity(1, 2, strict=True)))
print((helper.do(lambda: (masks(), gpuaff.check().expected)), own()) == then)
affinity.reapply()
affinity.restore()
affinity.__exit__(None, None, None)
print(helper.do(lambda: (masks(), gpuaff.check().expected)) == then[0])
"""


@pytest.mark.skipif(SETTING < 0, reason="not here: the numbers of the calls are not known here")
@pytest.mark.parametrize(
    "calls", [[SETTING], [GETTING], [SETTING, GETTING]], ids=["set", "get", "both"]
)
@pytest.mark.case("B22")
def test_a_filter_that_comes_later(driver: FakeDriver, calls: list[int]) -> None:
    """It holds for the main thread; the other one looks."""
    done = run(START + FILTERED.format(calls=calls), env=driver.env())
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["False ['pin-failed']", "GPUAffinityError", "True", "True"]
    assert "[pin-failed]" in done.stderr


@pytest.mark.parametrize("what", ["restore()", "reapply()", "__exit__(None, None, None)"])
def test_when_the_interpreter_is_taken_down(driver: FakeDriver, what: str) -> None:
    """Modules have gone by then; there is nothing to be done either."""
    script = f"""
import builtins, gpuaff, os
class Late:
    affinity = gpuaff.set_affinity(0, 2)
    def __del__(self, write=os.write):
        try:
            self.affinity.{what}
            write(1, b"fine")
        except BaseException as error:
            write(1, repr(error).encode())
builtins.late = Late()
"""
    assert run(script, env=driver.env(), fresh=True).stdout == "fine"
