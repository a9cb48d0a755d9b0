"""``cpus``: the only CPUs that are shared out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gpuaff.allocator.plan import plan
from gpuaff.errors import GPUAffinityError, InvalidOptionError
from gpuaff.topology.model import Gpu, Topology
from tests.allocator.described import codes, cpus, dgx_a100, one_node, shown, spread_cores
from tests.allocator.random_machines import MODES, SCOPES, any_machine, some_of

EIGHT = one_node(spread_cores(8, smt=1), gpus=2)

pytestmark = pytest.mark.case("B11")


def test_only_these_are_cut() -> None:
    assert shown(plan(EIGHT, 2, cpus="2-5")) == ["2-3", "4-5"]
    assert shown(plan(EIGHT, 2, cpus=[7, 0])) == ["0", "7"]


def test_ids_of_any_integer_type() -> None:
    class Five:
        """An integer that is no int, as numpy's are."""

        def __index__(self) -> int:
            return 5

    ids: Any = iter([Five(), 3])
    assert shown(plan(EIGHT, 1, cpus=ids)) == ["3,5"]


def test_they_say_nothing_of_a_narrow_mask() -> None:
    """It is not the mask that leaves the others out."""
    assert codes(plan(EIGHT, 2, cpus="2-5")) == []
    assert codes(plan(EIGHT.with_allowed(cpus("0-6")), 2, cpus="2-5")) == ["mask-narrow"]


def test_far_ones_are_taken_and_that_is_said() -> None:
    found = plan(dgx_a100(visible=[0, 1]), 2, cpus="0-3,128-131")
    assert shown(found) == ["0-1,128-129", "2-3,130-131"]
    assert codes(found) == ["near-not-allowed"]
    assert "is in cpus=0-3,128-131" in found.warnings[0].message


def test_inside_each_ranks_own_mask() -> None:
    found = plan(EIGHT, 2, cpus="2-5", rank_allowed=["0-3", "4-7"])
    assert shown(found) == ["2-3", "4-5"]


def test_without_a_gpu_each_rank_keeps_these() -> None:
    found = plan(one_node(spread_cores(8, smt=1), gpus=0), 2, cpus="2-5")
    assert shown(found) == ["2-5", "2-5"]


class TestRefused:
    def test_not_online(self) -> None:
        with pytest.raises(
            GPUAffinityError,
            match=r"^requested cpus=6-9, but the CPUs 8-9 are not .*online: 0-7; allowed: 0-7\);",
        ):
            plan(EIGHT, 2, cpus="6-9")

    def test_not_allowed(self) -> None:
        with pytest.raises(GPUAffinityError, match=r"CPUs 0-1 are not .* allowed: 2-7\)"):
            plan(EIGHT.with_allowed(cpus("2-7")), 2, cpus="0-3")

    def test_both(self) -> None:
        with pytest.raises(
            GPUAffinityError, match=r"CPUs 1,8 are not available \(online: 0-7; allowed: 2-7\)"
        ):
            plan(EIGHT.with_allowed(cpus("2-7")), 2, cpus="1-2,8")

    def test_allowed_to_no_rank(self) -> None:
        with pytest.raises(GPUAffinityError, match=r"CPUs 3 are not .* allowed: 0-2,4-7\)"):
            plan(EIGHT, 2, cpus="2-4", rank_allowed=["0-2", "4-7"])

    def test_none_for_one_rank(self) -> None:
        with pytest.raises(
            GPUAffinityError,
            match=r"requested cpus=2-3, but rank 1 may use only the CPUs 4-7, none of which",
        ):
            plan(EIGHT, 2, cpus="2-3", rank_allowed=["0-3", "4-7"])

    def test_no_cpu_is_known(self) -> None:
        with pytest.raises(GPUAffinityError, match="online: unknown; allowed: none"):
            plan(Topology(gpus=(Gpu(index=0),), visible=(0,)), 1, cpus="0")

    def test_not_online_is_not_said_where_nobody_knows(self) -> None:
        machine = replace(EIGHT, cpus=frozenset(), allowed=cpus("0-7"))
        with pytest.raises(GPUAffinityError, match=r"CPUs 8-9 are not .*online: unknown"):
            plan(machine, 2, cpus="6-9")

    def test_one_line(self) -> None:
        with pytest.raises(GPUAffinityError) as caught:
            plan(EIGHT, 2, cpus="6-9")
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("value", ["", "x", [], [-1], [True], 3, ["0"], "0-99999999", [65536]])
    def test_what_cannot_be_meant(self, value: Any) -> None:
        with pytest.raises(InvalidOptionError, match=r"^cpus="):
            plan(EIGHT, 2, cpus=value)


@settings(max_examples=50)
@given(
    machine=any_machine(),
    nproc=st.integers(1, 7),
    mode=st.sampled_from((*MODES, "core_complex")),
    scope=st.sampled_from(SCOPES),
    data=st.data(),
)
def test_as_if_only_these_were_allowed(
    machine: Topology, nproc: int, mode: str, scope: str, data: st.DataObject
) -> None:
    few = data.draw(some_of(machine.allowed & machine.cpus))
    assume(few)
    asked: dict[str, Any] = {"mode": mode, "scope": scope}
    narrow = plan(machine.with_allowed(few), nproc, **asked)
    assert plan(machine, nproc, cpus=few, **asked).shares == narrow.shares
