"""``reserve``: cores that stay out of every share, for helper processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gpuaff.allocator.model import Plan
from gpuaff.allocator.plan import plan
from gpuaff.cpuset import format_cpulist
from gpuaff.errors import GPUAffinityError
from gpuaff.topology.model import Gpu, Source, Topology
from tests.allocator.described import bare, codes, cpus, dgx_a100, one_node, shown, spread_cores
from tests.allocator.random_machines import MODES, SCOPES, UNIQUE, any_machine

EIGHT = one_node(spread_cores(8, smt=1), gpus=2)
HYPER = one_node(spread_cores(8), gpus=2)

pytestmark = pytest.mark.case("B10")


def kept_back(found: Plan) -> list[str]:
    return [format_cpulist(share.reserved) for share in found.shares]


class TestOfEachPart:
    def test_the_last_cores(self) -> None:
        found = plan(HYPER, 2, reserve=1)
        assert shown(found) == ["0-2,8-10", "4-6,12-14"]
        assert kept_back(found) == ["3,11", "7,15"]
        assert [share.cores for share in found.shares] == [3, 3]

    def test_nothing_unless_asked(self) -> None:
        assert kept_back(plan(HYPER, 2)) == ["", ""]
        assert kept_back(plan(HYPER, 2, reserve=0)) == ["", ""]

    def test_interleaved(self) -> None:
        found = plan(EIGHT, 2, mode="unique_interleaved", reserve=1)
        assert shown(found) == ["0,2,4", "1,3,5"]
        assert kept_back(found) == ["6", "7"]

    def test_one_cpu_of_each_where_shares_have_one(self) -> None:
        found = plan(HYPER, 2, reserve=1, multithreading="single_logical")
        assert shown(found) == ["0-2", "4-6"]
        assert kept_back(found) == ["3", "7"]

    def test_after_balancing(self) -> None:
        """Parts of 5 and 3, so of 3 and 3, of which one each is reserved."""
        gpus = [
            Gpu(index=i, node_cpus=cpus(t), source=Source.NVML)
            for i, t in enumerate(["0-4", "5-7"])
        ]
        machine = bare("0-7", *gpus)
        found = plan(machine, 2, reserve=1)
        assert (shown(found), kept_back(found)) == (["0-1", "5-6"], ["2", "7"])
        uneven = plan(machine, 2, reserve=1, balanced=False)
        assert (shown(uneven), kept_back(uneven)) == (["0-3", "5-6"], ["4", "7"])

    def test_before_trimming(self) -> None:
        found = plan(EIGHT, 2, reserve=1, max_physical_cores=2)
        assert (shown(found), kept_back(found)) == (["0-1", "4-5"], ["3", "7"])

    def test_by_socket_what_is_farthest(self) -> None:
        """GPU 0 has 48-55, then 32-39 by the deal."""
        found = plan(dgx_a100(), 8, scope="socket", reserve=2)
        assert kept_back(found)[0] == "38-39,166-167"

    @pytest.mark.case("G5")
    def test_slow_cores_of_a_hybrid_machine(self) -> None:
        found = plan(replace(EIGHT, efficiency_cpus=cpus("0-3")), 2, reserve=2)
        assert (shown(found), kept_back(found)) == (["4-5", "6-7"], ["0-1", "2-3"])

    def test_ranks_on_one_gpu_reserve_each(self) -> None:
        found = plan(replace(EIGHT, visible=(0,)), 2, reserve=1)
        assert (shown(found), kept_back(found)) == (["0-2", "4-6"], ["3", "7"])

    def test_of_a_core_that_came_in_pieces(self) -> None:
        """Rank 0 has both siblings of core 0, and so one core to reserve beside core 1."""
        found = plan(HYPER, 2, rank_allowed=["0-1,8-9", "0,2-7"], balanced=False, reserve=1)
        assert (shown(found), kept_back(found)) == (["0,8", "2-6"], ["1,9", "7"])


class TestOfEachList:
    """Modes that cut nothing: the last cores of each near list are nobody's."""

    def test_all(self) -> None:
        found = plan(HYPER, 2, mode="all", reserve=2)
        assert shown(found) == ["0-5,8-13"] * 2
        assert kept_back(found) == ["6-7,14-15"] * 2

    def test_all_by_socket_keeps_node_cores(self) -> None:
        """Socket 0: the nodes 1 and 3 come first, then 0 and 2; the last are 46 and 47."""
        found = plan(dgx_a100(), 8, mode="all", scope="socket", reserve=2)
        assert kept_back(found)[0] == "46-47,174-175"

    def test_lists_that_overlap(self) -> None:
        """A has 0-5, B 4-9; 5 and 9 are nobody's."""
        gpus = [
            Gpu(index=i, node_cpus=cpus(t), source=Source.NVML)
            for i, t in enumerate(["0-5", "4-9"])
        ]
        found = plan(bare("0-9", *gpus), 2, mode="all", reserve=1)
        assert (shown(found), kept_back(found)) == (["0-4", "4,6-8"], ["5", "9"])

    def test_single(self) -> None:
        found = plan(EIGHT, 2, mode="single", reserve=3)
        assert (shown(found), kept_back(found)) == (["0", "0"], ["5-7", "5-7"])

    def test_single_by_socket_still_begins_at_the_node(self) -> None:
        found = plan(dgx_a100(), 8, mode="single", scope="socket", reserve=1)
        assert shown(found)[0] == "48,176"

    def test_single_unique(self) -> None:
        found = plan(EIGHT, 3, mode="single_unique", reserve=5)
        assert (shown(found), kept_back(found)) == (["0", "1", "2"], ["3-7"] * 3)


class TestRefused:
    @pytest.mark.parametrize("mode", ["unique_contiguous", "unique_interleaved", "core_complex"])
    def test_a_part_that_is_no_larger(self, mode: str) -> None:
        with pytest.raises(
            GPUAffinityError,
            match=r"^requested reserve=4, but rank 0 on GPU 0 would have no core left "
            r"\(4 of the 8 cores near its GPU\); reserve fewer, ",
        ):
            plan(EIGHT, 2, reserve=4, mode=mode)
        assert shown(plan(EIGHT, 2, reserve=3)) == ["0", "4"]

    def test_a_rank_without_a_core_of_its_own(self) -> None:
        with pytest.raises(GPUAffinityError, match=r"rank 0 on GPU 0 .* \(0 of the 2 cores"):
            plan(one_node(spread_cores(2), gpus=3), 3, reserve=1)

    @pytest.mark.parametrize("mode", ["all", "single", "single_unique"])
    def test_a_list_that_is_no_longer(self, mode: str) -> None:
        with pytest.raises(GPUAffinityError, match="none of the 8 cores near its GPU"):
            plan(EIGHT, 2, reserve=8, mode=mode)

    def test_a_single_core_for_each_cannot_be_had(self) -> None:
        with pytest.raises(GPUAffinityError, match="rank 2 on GPU 0 would have no core left"):
            plan(EIGHT, 3, reserve=6, mode="single_unique")

    def test_a_list_inside_what_another_reserves(self) -> None:
        gpus = [
            Gpu(index=i, node_cpus=cpus(t), source=Source.NVML)
            for i, t in enumerate(["0-5", "5-6"])
        ]
        with pytest.raises(GPUAffinityError, match="rank 1 on GPU 1 would have no core"):
            plan(bare("0-6", *gpus), 2, mode="all", reserve=1)

    def test_the_least_counts_what_is_left(self) -> None:
        assert shown(plan(EIGHT, 2, reserve=1, min_physical_cores=3)) == ["0-2", "4-6"]
        with pytest.raises(GPUAffinityError, match="can have 3 besides the 1 to reserve: 8 cores"):
            plan(EIGHT, 2, reserve=1, min_physical_cores=4)


class TestNothingIsCut:
    def test_without_a_gpu_nothing_is_reserved_and_that_is_said(self) -> None:
        found = plan(one_node(spread_cores(4, smt=1), gpus=0), 2, reserve=9)
        assert (shown(found), kept_back(found)) == (["0-3", "0-3"], ["", ""])
        assert codes(found) == ["no-gpu"]
        assert "and no core is reserved" in found.warnings[0].message

    def test_nor_without_cpus(self) -> None:
        found = plan(Topology(gpus=(Gpu(index=0),), visible=(0,)), 1, reserve=1)
        assert (shown(found), kept_back(found)) == ([""], [""])


ASKED = {"scope": st.sampled_from(SCOPES), "balanced": st.booleans()}


@settings(max_examples=50)
@given(
    any_machine(),
    st.integers(1, 5),
    st.sampled_from((*UNIQUE, "core_complex")),
    st.fixed_dictionaries(ASKED),
    st.integers(1, 3),
)
def test_a_part_is_divided_into_share_and_reserve(
    machine: Topology, nproc: int, mode: str, asked: dict[str, Any], count: int
) -> None:
    whole = plan(machine, nproc, mode=mode, **asked)
    if "too-few-cores" in codes(whole) or min(share.cores for share in whole.shares) <= count:
        with pytest.raises(GPUAffinityError, match=f"^requested reserve={count},"):
            plan(machine, nproc, mode=mode, reserve=count, **asked)
        return
    for share, part in zip(
        plan(machine, nproc, mode=mode, reserve=count, **asked).shares, whole.shares, strict=True
    ):
        assert share.cpus | share.reserved == part.cpus
        assert not share.cpus & share.reserved
        assert share.cores == part.cores - count


@settings(max_examples=50)
@given(
    any_machine(),
    st.integers(1, 5),
    st.sampled_from(MODES[:3]),
    st.sampled_from(SCOPES),
    st.integers(1, 3),
)
def test_no_share_holds_what_is_reserved_for_any(
    machine: Topology, nproc: int, mode: str, scope: str, count: int
) -> None:
    try:
        found = plan(machine, nproc, mode=mode, scope=scope, reserve=count)
    except GPUAffinityError:
        assume(False)
    taken = frozenset().union(*(share.cpus for share in found.shares))
    assert not any(share.reserved & taken for share in found.shares)
    near = plan(machine, nproc, mode="all", scope=scope)
    assert all(s.reserved <= n.cpus for s, n in zip(found.shares, near.shares, strict=True))
