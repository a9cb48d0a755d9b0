"""``set_affinity(memory=…)`` in real processes; numa_maps tells what the kernel has."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuaff._system import mempolicy
from tests import seccomp
from tests.fakedriver.driver import FakeDriver
from tests.pinning.test_programs import programs
from tests.processes import perform, run, stopped
from tests.programs import policies
from tests.programs.policies import BIND, FIRST, PREFER

pytestmark = [
    pytest.mark.fake_driver,
    pytest.mark.needs("two-cpus"),
    pytest.mark.needs("memory-policies"),
]


@pytest.mark.case("A11", "A16", "B8", "C11")
@pytest.mark.parametrize("program", programs(policies))
def test_a_process_that_sets_a_policy(driver: FakeDriver, program: Callable[[], None]) -> None:
    perform(program, env=driver.env())


def test_the_argument_or_the_variable(driver: FakeDriver) -> None:
    script = f"""
        import logging, os, gpuaff
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        for variable in ("interleave:{FIRST}", ""):
            os.environ["GPUAFF_MEMORY"] = variable
            for memory in (None, "bind:{FIRST}"):
                print(gpuaff.set_affinity(0, 2, memory=memory).memory)
        os.environ["GPUAFF_MEMORY"] = "bound"
        gpuaff.set_affinity(0, 2)
    """
    done = run(script, env=driver.env())
    bind = f"bind:{FIRST}"
    assert done.stdout.splitlines() == [f"interleave:{FIRST}", bind, "None", bind]
    assert f"] memory {bind}\n" in done.stderr, "the one line"
    assert done.stderr.endswith(
        "InvalidOptionError: GPUAFF_MEMORY='bound': expected one of preferred, bind, interleave, "
        "with or without nodes (bind:0-1, interleave:gpu); did you mean bind?\n"
    )


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


TRY = """
    import os, gpuaff
    before = os.sched_getaffinity(0)
    affinity = gpuaff.set_affinity(0, 2, memory="bind")
    (notice,) = [n for n in affinity.warnings if n.code == "memory-refused"]
    assert affinity.pinned and len(affinity) < len(before) and affinity.memory is None
    assert affinity.restore() == before
    try:
        gpuaff.set_affinity(0, 2, memory="bind", strict=True)
    except gpuaff.GPUAffinityError as error:
        assert "[memory-refused; strict]" in str(error) and os.sched_getaffinity(0) == before
        print(notice.message)
"""
BOTH, SETTING = mempolicy.numbers(), mempolicy.numbers()[1:]


@pytest.mark.parametrize(
    ("error", "says", "calls"),
    [
        (errno.EPERM, "--cap-add SYS_NICE", BOTH),
        (errno.EPERM, "--cap-add SYS_NICE", SETTING),
        (errno.ENOSYS, "it has none, as one built without NUMA", BOTH),
    ],
    ids=["both", "setting", "ENOSYS"],
)
@pytest.mark.case("B22")
def test_a_filter_that_forbids_it(
    driver: FakeDriver, error: int, says: str, calls: tuple[int, ...]
) -> None:
    done = run(TRY, env=driver.env(), prefix=seccomp.refusing(error, *calls))
    assert done.returncode == 0, done.stderr
    assert says in done.stdout


PREFERS = """
    from tests.programs.policies import *
    from gpuaff.pinning.memory import set_mode
    nodes = frozenset({int(FIRST), 60})
    print([notice.code for notice in set_mode("preferred", nodes, int(FIRST))])
    print(policy(), sorted(mempolicy.get_policy().nodes))
    set_mode("preferred", nodes, 60)
"""


def test_a_kernel_that_can_prefer_one_node_only() -> None:
    """As Linux was before 5.15; the second node is not there, which the kernel does not mind."""
    many = mempolicy.PREFERRED_MANY | mempolicy.STATIC
    old = seccomp.refusing(errno.EINVAL, mempolicy.numbers()[1], first=many)
    done = run(PREFERS, prefix=old)
    assert done.stdout == f"['memory-first']\n{PREFER} [{FIRST}]\n"
    assert "Invalid argument" in done.stderr, "the one that is nearest to the GPU is not there"
    new = run(PREFERS).stdout
    assert new.startswith("[]\nprefer")
    assert new.endswith(f"[{FIRST}, 60]\n")
    refused = seccomp.refusing(errno.EPERM, mempolicy.numbers()[1], first=many)
    assert "PermissionError" in run(PREFERS, prefix=refused).stderr
