"""The calls for memory policies, on the real kernel; it tells in /proc what it has."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpuaff._system import mempolicy
from gpuaff._system.mempolicy import Policy
from tests import mempolicies, seccomp
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
        from gpuaff.cpuset import format_cpulist
        nodes = allowed_nodes()
        assert format_cpulist(nodes) == mempolicies.nodes()
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
        # Of a static policy the kernel remembers what was named, be it there or not. The last bit
        # of a word is the one that is lost when ``maxnode`` is one too small.
        set_policy(Policy(BIND | STATIC, nodes | {{63}}))
        assert get_policy().nodes == nodes | {{63}}
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


def test_an_unknown_machine_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="vax"))
    with pytest.raises(OSError, match="vax") as caught:
        mempolicy.get_policy()
    assert caught.value.errno == errno.ENOSYS


def test_what_a_filter_answers_is_raised() -> None:
    script = """
        from gpuaff._system.mempolicy import *
        for call in (get_policy, allowed_nodes, lambda: set_policy(Policy(DEFAULT))):
            try:
                call()
            except OSError as error:
                print(error.errno)
    """
    done = run(script, prefix=seccomp.refusing(errno.EPERM, *mempolicy.numbers()))
    assert done.stdout.split() == [str(errno.EPERM)] * 3, done.stderr


def test_a_policy_prints_as_it_is_asked_for() -> None:
    assert str(Policy(mempolicy.BIND | mempolicy.STATIC, frozenset({0, 1, 5}))) == "bind:0-1,5"
    assert str(Policy(mempolicy.DEFAULT)) == "default"
    assert str(Policy(6, frozenset({2}))) == "weighted-interleave:2"
    assert str(Policy(77, frozenset({2}))) == "mode 77:2"
