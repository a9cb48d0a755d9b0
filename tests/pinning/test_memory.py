"""``set_affinity(memory=…)`` in real processes; numa_maps tells what the kernel has."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest

from gpuaff._system import mempolicy
from tests import mempolicies, seccomp
from tests.fakedriver.driver import FakeDriver
from tests.processes import printed, run, stopped

pytestmark = [
    pytest.mark.fake_driver,
    pytest.mark.needs("two-cpus"),
    pytest.mark.needs("memory-policies"),
]

NODES = mempolicies.nodes()
FIRST = re.split("[,-]", NODES)[0]

BIND, PREFER = f"bind=static:{FIRST}", f"prefer=static:{FIRST}"
INTERLEAVE, ALL = f"interleave=static:{FIRST}", f"interleave:{NODES}"
"""As the kernel writes them."""

START = f"""
import os, sys, threading, time
import gpuaff
from tests import mempolicies
from gpuaff._system.mempolicy import *

FIRST = {FIRST}
BIND_ONE, PREFERRED_ONE, INTERLEAVE_ONE = "bind:{FIRST}", "preferred:{FIRST}", "interleave:{FIRST}"

def policy():
    return mempolicies.of("self", threading.get_native_id())

def codes(affinity):
    return [notice.code for notice in affinity.warnings if "mem" in notice.code]

def in_a_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    while os.path.exists(f"/proc/self/task/{{thread.native_id}}"):  # Python is done with it before
        time.sleep(0.01)
"""


def said(driver: FakeDriver, script: str, **env: str) -> list[str]:
    """What a script printed, line by line."""
    return printed(START + script, env={**driver.env(), **env}).splitlines()


@pytest.mark.parametrize(
    ("word", "in_proc"), [("bind", BIND), ("preferred", PREFER), ("interleave", INTERLEAVE)]
)
@pytest.mark.case("A11", "B8")
def test_the_policy_is_set_and_put_back(driver: FakeDriver, word: str, in_proc: str) -> None:
    script = f"""
affinity = gpuaff.set_affinity(0, 2, memory="{word}:{FIRST}")
print(policy(), affinity.memory, codes(affinity), affinity.pinned)
affinity.restore()
print(policy())
with gpuaff.set_affinity(1, 2, memory="{word}:{FIRST}"):
    print(policy())
print(policy())
"""
    assert said(driver, script) == [
        f"{in_proc} {word}:{FIRST} [] True",
        "default",
        in_proc,
        "default",
    ]


@pytest.mark.parametrize("word", ["bind", "preferred", "interleave"])
@pytest.mark.case("A11")
def test_without_names_it_is_the_nodes_of_the_share(driver: FakeDriver, word: str) -> None:
    script = f"""
from gpuaff.cpuset import format_cpulist
affinity = gpuaff.set_affinity(0, 2, memory="{word}")
nodes = affinity.plan.share_of(0).numa_nodes
print(affinity.memory == "{word}:" + format_cpulist(nodes), set(nodes) == get_policy().nodes)
print(policy() == "default")
"""
    assert said(driver, script) == ["True True", "False"]


def test_it_is_told_in_the_one_line(driver: FakeDriver) -> None:
    script = f"""
import logging
logging.basicConfig(level=logging.INFO, format="%(message)s")
import gpuaff
gpuaff.set_affinity(0, 2, memory="bind:{FIRST}")
"""
    assert f"] memory bind:{FIRST}\n" in run(script, env=driver.env()).stderr


def test_the_argument_or_the_variable(driver: FakeDriver) -> None:
    script = """
print(gpuaff.set_affinity(0, 2).memory, gpuaff.set_affinity(0, 2, memory=BIND_ONE).memory)
"""
    assert said(driver, script, GPUAFF_MEMORY=f"interleave:{FIRST}") == [
        f"interleave:{FIRST} bind:{FIRST}"
    ]
    assert said(driver, script, GPUAFF_MEMORY="") == [f"None bind:{FIRST}"]
    assert run(START + script, env={**driver.env(), "GPUAFF_MEMORY": "bound"}).stderr.endswith(
        "InvalidOptionError: GPUAFF_MEMORY='bound': expected one of preferred, bind, interleave, "
        "with or without nodes (bind:0-1, interleave:gpu); did you mean bind?\n"
    )


@pytest.mark.parametrize("off", ["GPUAFF=off", "CUDA_VISIBLE_DEVICES="])
def test_nothing_is_set_where_nothing_is_pinned(driver: FakeDriver, off: str) -> None:
    name, _, value = off.partition("=")
    script = """
affinity = gpuaff.set_affinity(0, 2, memory=BIND_ONE)
print(affinity.pinned, affinity.memory, policy())
affinity.restore()
"""
    assert said(driver, script, **{name: value}) == ["False None default"]


def test_a_second_call_that_cannot_pin_takes_it_back(driver: FakeDriver) -> None:
    script = """
gpuaff.set_affinity(0, 2, memory=BIND_ONE, openmp=True)
os.environ["CUDA_VISIBLE_DEVICES"] = ""
print(gpuaff.set_affinity(0, 2).pinned, policy(), os.environ.get("OMP_NUM_THREADS"))
"""
    assert said(driver, script) == ["False default None"]


def test_pages_land_where_the_policy_says(driver: FakeDriver) -> None:
    """Another process reads where: the area was not there when the policy was set."""
    script = f"""
import mmap, sys
import gpuaff
gpuaff.set_affinity(0, 2, memory="bind:{FIRST}")
area = mmap.mmap(-1, 1 << 22, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
area.write(b"x" * (1 << 22))
print("written")
sys.stdin.readline()
"""
    with stopped(script, env=driver.env()) as process:
        assert process.heard() == "written"
        lines = Path(f"/proc/{process.pid}/numa_maps").read_text().splitlines()
        assert {line.split()[1] for line in lines} == {BIND}
        pages = [
            int(line.split(f"N{FIRST}=")[1].split()[0]) for line in lines if f"N{FIRST}=" in line
        ]
        assert max(pages) >= 8


def test_twice_is_the_same_as_once(driver: FakeDriver) -> None:
    script = """
set_policy(Policy(INTERLEAVE, allowed_nodes()))
first = gpuaff.set_affinity(0, 2, memory=BIND_ONE)
second = gpuaff.set_affinity(1, 2, memory=PREFERRED_ONE)
print(policy())
third = gpuaff.set_affinity(0, 2)
print(policy(), third.memory)
gpuaff.set_affinity(1, 2, memory=BIND_ONE)
first.restore()
print(policy())
"""
    assert said(driver, script) == [PREFER, f"{ALL} None", ALL]


def test_blocks_inside_each_other(driver: FakeDriver) -> None:
    script = """
with gpuaff.set_affinity(0, 2, memory=BIND_ONE) as outer:
    with gpuaff.set_affinity(1, 2, memory=INTERLEAVE_ONE):
        print(policy())
    print(policy())
    with gpuaff.set_affinity(1, 2):
        print(policy())
    print(policy())
    with gpuaff.set_affinity(1, 2, memory=INTERLEAVE_ONE):
        outer.restore()
    print(policy())
print(policy())
"""
    assert said(driver, script) == [
        INTERLEAVE, BIND, "default", BIND, "default", "default"
    ]  # fmt: skip


def test_a_block_inside_one_that_asks_for_the_same(driver: FakeDriver) -> None:
    script = """
with gpuaff.set_affinity(0, 2, memory=BIND_ONE):
    with gpuaff.set_affinity(1, 2, memory=BIND_ONE):
        pass
    print(policy())
print(policy())
"""
    assert said(driver, script) == [BIND, "default"]


def test_a_policy_that_somebody_has_set_since_stays(driver: FakeDriver) -> None:
    script = """
affinity = gpuaff.set_affinity(0, 2, memory=BIND_ONE)
set_policy(Policy(INTERLEAVE, allowed_nodes()))
print(gpuaff.set_affinity(0, 2).memory, policy())
with gpuaff.set_affinity(0, 2, memory=BIND_ONE):
    pass
print(policy())
affinity.restore()
print(policy())
"""
    assert said(driver, script) == [f"None {ALL}", ALL, ALL]


def test_only_the_thread_that_has_it_can_put_it_back(driver: FakeDriver) -> None:
    script = """
import logging
logging.basicConfig(format="%(message)s", stream=sys.stdout)
before = os.sched_getaffinity(0)
affinity = gpuaff.set_affinity(0, 2, memory=BIND_ONE)

def other():
    print(policy())
    affinity.restore()
    print(policy(), os.sched_getaffinity(0) == before)

in_a_thread(other)
print(policy(), os.sched_getaffinity(0) == before)
affinity.restore()
print(policy())
in_a_thread(affinity.restore)
"""
    lines = said(driver, script)
    warning = lines.pop(1)
    assert warning.startswith("gpuaff: thread ")
    assert warning.endswith("call restore() there [memory-not-restored]")
    assert lines == [BIND, "default True", f"{BIND} True", "default"]


def test_a_call_from_another_thread(driver: FakeDriver) -> None:
    script = """
affinity = gpuaff.set_affinity(0, 2, memory=BIND_ONE)
found = []

def other():
    second = gpuaff.set_affinity(0, 2, memory=INTERLEAVE_ONE)
    found.extend([codes(second), policy()])
    second.restore()
    found.append(policy())

in_a_thread(other)
print(*found)
print(policy())
third = gpuaff.set_affinity(0, 2)
print(policy(), codes(third))
"""
    assert said(driver, script) == [
        f"['memory-not-restored'] {INTERLEAVE} default",
        BIND,
        "default []",
    ]


def test_a_thread_that_has_it_from_its_maker(driver: FakeDriver) -> None:
    script = """
gpuaff.set_affinity(0, 2, memory=BIND_ONE)
def other():
    affinity = gpuaff.set_affinity(0, 2)
    print(policy(), codes(affinity))
in_a_thread(other)
print(policy())
"""
    assert said(driver, script) == ["default ['memory-not-restored']", BIND]


def test_a_thread_that_has_ended_is_forgotten(driver: FakeDriver) -> None:
    script = """
in_a_thread(lambda: gpuaff.set_affinity(0, 2, memory=BIND_ONE))
print(codes(gpuaff.set_affinity(0, 2)))
"""
    assert said(driver, script) == ["[]"]


def test_a_thread_that_outlives_the_policy(driver: FakeDriver) -> None:
    script = """
affinity = gpuaff.set_affinity(0, 2, memory=BIND_ONE)
go = threading.Event()

def other():
    go.wait()
    print(policy())
    affinity.restore()
    print(policy())

thread = threading.Thread(target=other)
thread.start()
affinity.restore()
go.set()
thread.join()
"""
    assert said(driver, script) == [BIND, "default"]


def test_a_forked_child_puts_it_back_for_itself(driver: FakeDriver) -> None:
    script = """
affinity = gpuaff.set_affinity(0, 2, memory=BIND_ONE)
def child(work):
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        work()
        print(policy(), flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
child(lambda: None)
child(affinity.restore)
child(lambda: gpuaff.set_affinity(0, 2))
child(lambda: gpuaff.set_affinity(0, 2, memory=INTERLEAVE_ONE).restore())
def own_and_then_the_parents():
    gpuaff.set_affinity(0, 2, memory=INTERLEAVE_ONE)
    affinity.restore()
child(own_and_then_the_parents)
print(policy())
"""
    # What a child starts with is its own first policy, as its mask is its border.
    assert said(driver, script) == [BIND, "default", BIND, BIND, INTERLEAVE, BIND]


REFUSALS = [
    pytest.param(errno.EPERM, "--cap-add SYS_NICE", id="EPERM"),
    pytest.param(errno.ENOSYS, "it has none, as one built without NUMA", id="ENOSYS"),
]

TRY = (
    START
    + """
before = os.sched_getaffinity(0)
affinity = gpuaff.set_affinity(0, 2, memory="bind")
(notice,) = [n for n in affinity.warnings if n.code == "memory-refused"]
print(affinity.pinned, len(affinity) < len(before), affinity.memory)
print(notice.message)
print(affinity.restore() == before)
try:
    gpuaff.set_affinity(0, 2, memory="bind", strict=True)
except gpuaff.GPUAffinityError as error:
    print("[memory-refused; strict]" in str(error), os.sched_getaffinity(0) == before)
"""
)


@pytest.mark.parametrize(("error", "says"), REFUSALS)
@pytest.mark.parametrize(
    "calls", [mempolicy.numbers(), mempolicy.numbers()[1:]], ids=["both", "setting"]
)
@pytest.mark.case("B22")
def test_a_filter_that_forbids_it(
    driver: FakeDriver, error: int, says: str, calls: tuple[int, ...]
) -> None:
    done = run(TRY, env=driver.env(), prefix=seccomp.refusing(error, *calls))
    assert done.returncode == 0, done.stderr
    first, message, *rest = done.stdout.splitlines()
    assert first == "True True None"
    assert says in message
    assert rest == ["True", "True True"]


def test_a_filter_that_comes_later(driver: FakeDriver) -> None:
    """Then the policy cannot be put back, and that is said."""
    script = """
import logging
from tests import seccomp
logging.basicConfig(format="%(message)s", stream=sys.stdout)
affinity = gpuaff.set_affinity(0, 2, memory=BIND_ONE)
seccomp.install(1, [mempolicy.numbers()[1]])
affinity.restore()
print(policy())
"""
    warning, policy = said(driver, "from gpuaff._system import mempolicy" + script)
    assert "refused the earlier memory policy, default" in warning
    assert "[memory-not-restored]" in warning
    assert policy == BIND


def test_a_kernel_that_can_prefer_one_node_only() -> None:
    """As Linux was before 5.15; the second node is not there, which the kernel does not mind."""
    script = """
from gpuaff.pinning.memory import set_mode
print([notice.code for notice in set_mode("preferred", frozenset({FIRST, 60}), FIRST)])
print(policy(), get_policy().nodes)
set_mode("preferred", frozenset({FIRST, 60}), 60)
"""
    many = mempolicy.PREFERRED_MANY | mempolicy.STATIC
    old = seccomp.refusing(errno.EINVAL, mempolicy.numbers()[1], first=many)
    done = run(START + script, prefix=old)
    assert done.stdout == f"['memory-first']\n{PREFER} frozenset({{{FIRST}}})\n"
    assert "Invalid argument" in done.stderr, "the one that is nearest to the GPU is not there"
    new = run(START + script).stdout
    assert new.startswith("[]\nprefer")
    assert new.endswith(f"frozenset({{{FIRST}, 60}})\n")
    refused = seccomp.refusing(errno.EPERM, mempolicy.numbers()[1], first=many)
    assert "PermissionError" in run(START + script, prefix=refused).stderr


@pytest.mark.case("C11")
def test_all_or_nothing(driver: FakeDriver) -> None:
    """The policy is in force when the CPUs are moved, and goes back when they can't be."""
    script = """
from gpuaff.pinning import pin
from gpuaff.pinning.threads import move
before = os.sched_getaffinity(0)
seen = []

def refuse(cpus, *how):
    if cpus == before:
        return move(cpus, *how)
    seen.append(policy())
    raise OSError(22, "Invalid argument")

pin.threads.move = refuse
affinity = gpuaff.set_affinity(0, 2, memory=BIND_ONE)
print(*seen)
print(policy(), affinity.memory, affinity.pinned, os.sched_getaffinity(0) == before)
try:
    gpuaff.set_affinity(0, 2, memory=BIND_ONE, strict=True)
except gpuaff.GPUAffinityError:
    print(policy())
pin.threads.move = move
first = gpuaff.set_affinity(0, 2, memory=PREFERRED_ONE)
for arguments in ({"memory": "bind:999"}, {"memory": "bind", "min_physical_cores": 5000}):
    try:
        gpuaff.set_affinity(1, 2, **arguments)
    except gpuaff.GPUAffinityError:
        print(policy(), os.sched_getaffinity(0) == first)
first.restore()
print(policy())
"""
    assert said(driver, script) == [
        f"{BIND} {BIND}",
        "default None False True",
        "default",
        f"{PREFER} True",
        f"{PREFER} True",
        "default",
    ]


@pytest.mark.case("C11")
def test_the_mask_is_what_it_is_without_memory(driver: FakeDriver) -> None:
    script = """
plain = gpuaff.set_affinity(1, 2)
print(gpuaff.set_affinity(1, 2, memory=BIND_ONE) == plain == os.sched_getaffinity(0))
"""
    assert said(driver, script) == ["True"]


@pytest.mark.case("A16")
def test_nodes_that_are_not_there(driver: FakeDriver) -> None:
    script = """
for memory in ("bind:999", "preferred:gpu"):
    try:
        gpuaff.set_affinity(0, 2, memory=memory)
    except gpuaff.GPUAffinityError as error:
        print(str(error).split(":")[0], policy())
"""
    assert said(driver, script) == ["memory='bind default", "memory='preferred default"]


def test_without_an_option_nothing_of_it_is_imported(driver: FakeDriver) -> None:
    script = """
import sys
import gpuaff
gpuaff.set_affinity(0, 2)
print([name for name in sys.modules if name.startswith("gpuaff") and "mem" in name])
"""
    assert printed(script, env=driver.env(), fresh=True) == "[]"
