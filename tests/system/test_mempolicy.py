"""The calls for memory policies, on the real kernel; it tells in /proc what it has."""

from __future__ import annotations

import errno
import re
import subprocess
from pathlib import Path

import pytest

from gpuaff._system import mempolicy
from gpuaff._system.mempolicy import Policy
from tests import mempolicies, seccomp
from tests.fakedriver.build import compiler
from tests.processes import printed, run

POLICIES = {
    "Policy(BIND, nodes)": ("bind:{}", "bind:{}"),
    "Policy(BIND | STATIC, nodes)": ("bind=static:{}", "bind:{}"),
    "Policy(INTERLEAVE, nodes)": ("interleave:{}", "interleave:{}"),
    "Policy(PREFERRED | STATIC, first)": ("prefer=static:{first}", "preferred:{first}"),
    "Policy(LOCAL)": ("local", "local"),
    "Policy(DEFAULT)": ("default", "default"),
}
"""As /proc has them, and as we print them."""


@pytest.mark.needs("memory-policies")
def test_the_kernel_has_what_was_set() -> None:
    script = f"""
        from gpuaff._system.mempolicy import *
        from tests import mempolicies
        nodes = allowed_nodes()
        first = frozenset({{min(nodes)}})
        before = get_policy()
        for policy in {", ".join(POLICIES)}:
            set_policy(policy)
            assert get_policy() == policy
            print(mempolicies.of(), get_policy())
            set_policy(before)
            assert (mempolicies.of(), get_policy()) == ("default", before)
    """
    nodes = mempolicies.nodes()
    first = re.split("[,-]", nodes)[0]
    assert [line.split() for line in printed(script).splitlines()] == [
        [text.format(nodes, first=first) for text in texts] for texts in POLICIES.values()
    ]


@pytest.mark.needs("memory-policies")
def test_several_nodes_are_preferred_since_linux_5_15() -> None:
    script = """
        from gpuaff._system.mempolicy import *
        set_policy(Policy(PREFERRED_MANY | STATIC, allowed_nodes()))
        print(get_policy(), set(open("/proc/self/numa_maps").readline().split()))
    """
    assert printed(script).startswith(f"preferred:{mempolicies.nodes()} ")
    assert "prefer (many)" in printed(script) or "(many)=static" in printed(script)


@pytest.mark.needs("memory-policies")
def test_the_allowed_nodes_are_those_in_proc() -> None:
    script = """
        from gpuaff.cpuset import format_cpulist
        from gpuaff._system.mempolicy import allowed_nodes
        print(format_cpulist(allowed_nodes()))
    """
    assert printed(script) == mempolicies.nodes()


def room() -> int:
    """How many nodes this kernel is built for: the width of the mask that it prints."""
    mask = re.search(r"^Mems_allowed:\s*(.*)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert mask is not None
    return 32 * len(mask.group(1).split(","))


@pytest.mark.needs("memory-policies")
@pytest.mark.case("G2")
def test_masks_are_as_large_as_the_nodes_need() -> None:
    """The kernel drops nodes that it lacks, but not those that it could never have."""
    beyond = [room(), room() + 63, 2 * room() - 1, 2 * room(), 5 * room() + 1]
    script = f"""
        from gpuaff._system.mempolicy import *
        nodes = allowed_nodes()
        for extra in {[200, room() - 1]}:
            set_policy(Policy(BIND, nodes | {{extra}}))
            assert get_policy() == Policy(BIND, nodes)
        for extra in {beyond}:
            try:
                set_policy(Policy(BIND, nodes | {{extra}}))
            except OSError as error:
                print(error.errno)
    """
    assert printed(script).split() == [str(errno.EINVAL)] * len(beyond)


@pytest.mark.needs("memory-policies")
@pytest.mark.case("G2")
def test_the_last_bit_of_a_mask_counts() -> None:
    """It is the one that is lost when ``maxnode`` is one too small.

    Of a static policy the kernel remembers what was named, be it there or not.
    """
    script = """
        from gpuaff._system.mempolicy import *
        nodes = allowed_nodes() | {63}
        set_policy(Policy(BIND | STATIC, nodes))
        print(get_policy().nodes == nodes)
    """
    assert printed(script) == "True"


@pytest.mark.needs("compiler")
def test_the_numbers_of_this_machine_are_those_of_its_headers() -> None:
    text = "#include <sys/syscall.h>\nGET= __NR_get_mempolicy SET= __NR_set_mempolicy\n"
    command = [str(compiler()), "-E", "-P", "-"]
    out = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    numbers = re.search(r"GET=\s*(\d+)\s+SET=\s*(\d+)", out)
    assert numbers is not None
    assert mempolicy.numbers() == tuple(map(int, numbers.groups()))


def test_a_machine_that_is_not_known_is_told() -> None:
    script = """
        import os
        from gpuaff._system import mempolicy
        os.uname = lambda: type("", (), {"machine": "vax"})
        try:
            mempolicy.get_policy()
        except OSError as error:
            print(error.errno, error.strerror)
    """
    number, text = printed(script).split(" ", 1)
    assert int(number) == errno.ENOSYS
    assert "vax" in text


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS, errno.EINVAL])
def test_what_a_filter_answers_is_raised(error: int) -> None:
    script = """
        from gpuaff._system.mempolicy import *
        for call in (get_policy, allowed_nodes, lambda: set_policy(Policy(DEFAULT))):
            try:
                call()
            except OSError as error:
                print(error.errno)
    """
    done = run(script, prefix=seccomp.refusing(error, *mempolicy.numbers()))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(error)] * 3


def test_a_policy_prints_as_it_is_asked_for() -> None:
    assert str(Policy(mempolicy.BIND | mempolicy.STATIC, frozenset({0, 1, 5}))) == "bind:0-1,5"
    assert str(Policy(mempolicy.DEFAULT)) == "default"
    assert str(Policy(6, frozenset({2}))) == "weighted-interleave:2"
    assert str(Policy(77, frozenset({2}))) == "mode 77:2"
