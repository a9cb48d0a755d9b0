"""Hybrid processors: fast cores first, and each kind cut on its own (case G5)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gpuaff.allocator.plan import plan
from gpuaff.cpuset import CpuSet
from gpuaff.topology.model import Gpu, Source, Topology
from tests.allocator.described import bare, codes, cpus, one_node, shown

pytestmark = pytest.mark.case("G5")


def core_i9(gpus: int) -> Topology:
    """An i9-13900H: six P cores (0,1) … (10,11) and the E cores 12 … 19."""
    fast = [frozenset((cpu, cpu + 1)) for cpu in range(0, 12, 2)]
    slow = [frozenset((cpu,)) for cpu in range(12, 20)]
    return replace(one_node([*fast, *slow], gpus), efficiency_cpus=cpus("12-19"))


def big_little(*near: str) -> Topology:
    """Four slow cores, 0-3, and four fast ones, 4-7."""
    gpus = [
        Gpu(index=index, node_cpus=cpus(text), source=Source.NVML)
        for index, text in enumerate(near)
    ]
    return replace(bare("0-7", *gpus), efficiency_cpus=cpus("0-3"))


def test_one_process_has_both_kinds() -> None:
    assert shown(plan(core_i9(1), 1)) == ["0-19"]


def test_trimming_keeps_fast_cores() -> None:
    assert shown(plan(core_i9(1), 1, max_physical_cores=7)) == ["0-12"]
    assert shown(plan(big_little("0-7"), 1, max_physical_cores=5)) == ["0,4-7"]
    assert shown(plan(big_little("0-7"), 1, mode="all", max_physical_cores=3)) == ["4-6"]


@pytest.mark.parametrize("mode", ["single", "single_unique"])
def test_the_single_core_is_a_fast_one(mode: str) -> None:
    assert shown(plan(big_little("0-7"), 1, mode=mode)) == ["4"]


def test_each_kind_is_cut_on_its_own() -> None:
    assert shown(plan(core_i9(2), 2)) == ["0-5,12-15", "6-11,16-19"]


def test_interleaved_cuts_each_kind_on_its_own() -> None:
    found = plan(core_i9(2), 2, mode="unique_interleaved")
    assert shown(found) == ["0-1,4-5,8-9,12,14,16,18", "2-3,6-7,10-11,13,15,17,19"]


def test_balanced_shares_have_as_many_of_each_kind() -> None:
    """6 P and 8 E cores for four ranks: one P and two E each."""
    assert shown(plan(core_i9(4), 4)) == ["0-1,12-13", "2-3,14-15", "4-5,16-17", "6-7,18-19"]
    found = plan(core_i9(4), 4, mode="unique_interleaved")
    assert shown(found) == ["0-1,12,16", "2-3,13,17", "4-5,14,18", "6-7,15,19"]


def test_unbalanced_blocks_leave_nothing_out() -> None:
    """6 P and 8 E cores for three: two P cores each, and 3, 3 and 2 E cores; for four: 2, 2, 1
    and 1 P cores, and two E cores each."""
    found = plan(core_i9(3), 3, balanced=False)
    assert shown(found) == ["0-3,12-14", "4-7,15-17", "8-11,18-19"]
    found = plan(core_i9(4), 4, balanced=False)
    assert shown(found) == ["0-3,12-13", "4-7,14-15", "8-9,16-17", "10-11,18-19"]


def test_unbalanced_interleaved_leaves_nothing_out() -> None:
    found = plan(core_i9(4), 4, mode="unique_interleaved", balanced=False)
    assert shown(found) == ["0-1,8-9,12,16", "2-3,10-11,13,17", "4-5,14,18", "6-7,15,19"]


def test_nobody_is_left_with_slow_cores_only() -> None:
    """Six P and two E cores for four ranks: cut as one list the last would get both E cores."""
    machine = core_i9(4).with_allowed(cpus("0-13"))
    assert shown(plan(machine, 4)) == ["0-1", "2-3", "4-5", "6-7"]


def test_just_enough_fast_cores() -> None:
    """Four fast and four slow cores for four ranks: one of each kind for everybody."""
    found = plan(big_little(*["0-7"] * 4), 4)
    assert shown(found) == ["0,4", "1,5", "2,6", "3,7"]


def test_too_few_fast_cores_for_all_make_one_list() -> None:
    """Six P and eight E cores for eight ranks: one core each, the P cores first."""
    found = plan(core_i9(8), 8)
    assert shown(found) == ["0-1", "2-3", "4-5", "6-7", "8-9", "10-11", "12", "13"]
    assert codes(found) == []


def test_ranks_on_one_gpu_cut_each_kind_too() -> None:
    assert shown(plan(core_i9(1), 2)) == ["0-5,12-15", "6-11,16-19"]


def test_four_ranks_on_one_gpu_have_two_of_each_kind() -> None:
    """Ten fast cores, 5-9 and 15-19, and ten slow ones, 0-4 and 10-14: two of each for everyone."""
    machine = Topology.load(Path(__file__).parents[1] / "data/described/gb10.json")
    expected = ["0-1,5-6", "2-3,7-8", "4,9-10,15", "11-12,16-17"]
    assert shown(plan(machine, 4)) == expected
    assert shown(plan(machine, 4, min_physical_cores=4)) == expected
    assert shown(plan(machine, 4, mode="core_complex")) == expected
    # In turn, of the fast cores 5-9, 15-17 and of the slow ones 0-4, 10-12.
    dealt = plan(machine, 4, mode="unique_interleaved")
    assert shown(dealt) == ["0,4-5,9", "1,6,10,15", "2,7,11,16", "3,8,12,17"]
    # The first two ranks have the odd ones of both kinds.
    uneven = plan(machine, 4, balanced=False)
    assert shown(uneven) == ["0-2,5-7", "3-4,8-10,15", "11-12,16-17", "13-14,18-19"]


def test_three_ranks_on_two_gpus_have_as_many_of_each_kind() -> None:
    """6 P and 8 E cores: two of each for everyone. Cut in halves first, the two ranks on GPU 0
    would have one P core and two E cores each."""
    assert shown(plan(core_i9(2), 3)) == ["0-3,12-13", "8-11,16-17", "4-7,14-15"]


@given(
    fast=st.integers(0, 14),
    slow=st.integers(0, 14),
    gpus=st.integers(1, 4),
    ranks=st.integers(1, 9),
    mode=st.sampled_from(("unique_contiguous", "unique_interleaved", "core_complex")),
    scope=st.sampled_from(("node", "socket")),
)
def test_balanced_shares_are_an_even_part_of_each_kind(
    fast: int, slow: int, gpus: int, ranks: int, mode: str, scope: str
) -> None:
    assume(fast + slow)
    cores: list[CpuSet] = [frozenset((cpu,)) for cpu in range(fast + slow)]
    machine = replace(one_node(cores, gpus), efficiency_cpus=frozenset(range(slow)))
    for share in plan(machine, ranks, mode=mode, scope=scope).shares:
        assert share.cores >= fast // ranks + slow // ranks
        assert len(share.cpus - machine.efficiency_cpus) >= fast // ranks


def test_without_allowed_slow_cores_nothing_is_special() -> None:
    machine = core_i9(2).with_allowed(cpus("0-11"))
    assert shown(plan(machine, 2)) == ["0-5", "6-11"]


def test_overlapping_near_sets_share_each_kind_fairly() -> None:
    """Fast: 4-5 for both, 6-7 for the second. Slow: 0-1 for the first, 2-3 for both."""
    assert shown(plan(big_little("0-5", "2-7"), 2)) == ["0-1,4-5", "2-3,6-7"]


def test_overlapping_near_sets_with_one_slow_core() -> None:
    """Fast: 4-5 for the first only, 6-7 for both, so two each. The slow core is the first's; cut
    as one list, the first would have 4-6 and the second 7 and 0."""
    found = plan(big_little("0,4-7", "0,6-7"), 2, balanced=False)
    assert shown(found) == ["0,4-5", "6-7"]


def test_overlapping_near_sets_with_too_few_fast_cores() -> None:
    """One fast core, 4, for both: with 0-2 there are four cores in all, two for each."""
    found = plan(big_little("0-1,4", "1-2,4"), 2, balanced=False)
    assert [share.cores for share in found.shares] == [2, 2]
    assert frozenset().union(*(share.cpus for share in found.shares)) == cpus("0-2,4")


def test_blocks_of_slow_cores_follow_the_balanced_size() -> None:
    """GPU 2 has three cores, so the others get two fast ones and one slow one each."""
    near = ("0-7", "0-7", "8-10")
    gpus = [
        Gpu(index=index, node_cpus=cpus(text), source=Source.NVML)
        for index, text in enumerate(near)
    ]
    machine = replace(bare("0-10", *gpus), efficiency_cpus=cpus("4-7"))
    assert shown(plan(machine, 3)) == ["0-1,4", "2-3,5", "8-10"]


@given(
    slow=st.sets(st.integers(0, 15)),
    ranks=st.integers(1, 6),
    balanced=st.booleans(),
    mode=st.sampled_from(("unique_contiguous", "unique_interleaved")),
)
def test_everyone_has_a_fast_core_if_there_are_enough(
    slow: set[int], ranks: int, balanced: bool, mode: str
) -> None:
    cores: list[CpuSet] = [frozenset((cpu,)) for cpu in range(16)]
    machine = replace(one_node(cores, ranks), efficiency_cpus=frozenset(slow))
    found = plan(machine, ranks, mode=mode, balanced=balanced)
    if 16 - len(slow) >= ranks:
        assert all(share.cpus - slow for share in found.shares)
