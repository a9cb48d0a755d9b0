"""One set of allowed CPUs for each rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpuaff.allocator.cores import Cores, keep_whole, split_siblings
from gpuaff.allocator.plan import plan
from gpuaff.errors import GPUAffinityError, InvalidOptionError
from gpuaff.topology.model import Gpu, Source, Topology
from tests.allocator.described import (
    bare,
    box,
    codes,
    cpus,
    dgx_a100,
    one_node,
    packed_cores,
    shown,
    spread_cores,
)

EIGHT = one_node(spread_cores(8, smt=1), gpus=2)
HYPER = one_node(spread_cores(8), gpus=4)  # cores (0,8) … (7,15)


def shares(machine: Topology, *masks: str, **asked: Any) -> list[str]:
    return shown(plan(machine, len(masks), rank_allowed=masks, **asked))


class TestEachStaysInItsOwn:
    @pytest.mark.parametrize(
        "mode", ["unique_contiguous", "unique_interleaved", "core_complex", "all"]
    )
    def test_masks_that_are_apart_are_kept_whole(self, mode: str) -> None:
        assert shares(EIGHT, "0-3", "4-7", mode=mode) == ["0-3", "4-7"]

    def test_in_any_order(self) -> None:
        """Slurm's cyclic distribution: the second rank may have the lower cores."""
        assert shares(EIGHT, "1,3,5,7", "0,2,4,6") == ["1,3,5,7", "0,2,4,6"]

    def test_balanced_is_the_smallest(self) -> None:
        assert shares(EIGHT, "0-1", "2-7") == ["0-1", "2-3"]
        assert shares(EIGHT, "0-1", "2-7", balanced=False) == ["0-1", "2-7"]

    def test_equal_masks_are_cut_as_one(self) -> None:
        assert shares(EIGHT, "2-7", "2-7") == ["2-4", "5-7"]
        assert shares(EIGHT, "2-7", "2-7", mode="unique_interleaved") == ["2,4,6", "3,5,7"]

    def test_the_masks_replace_the_allowed_set(self) -> None:
        """The plan is made by a rank that may itself use 0-3 only."""
        assert shares(EIGHT.with_allowed(cpus("0-3")), "0-3", "4-7") == ["0-3", "4-7"]

    def test_overlapping_masks_are_shared_fairly(self) -> None:
        """Only the first rank: 0-1; both: 2-5; only the second: 6-7. Four each, in order."""
        assert shares(EIGHT, "0-5", "2-7") == ["0-3", "4-7"]

    def test_who_may_have_little_has_it_all(self) -> None:
        assert shares(EIGHT, "0-7", "2-3", balanced=False) == ["0-1,4-7", "2-3"]

    def test_interleaved_deals_the_common_ones(self) -> None:
        """Common are 2-5, two for each, dealt in turn."""
        assert shares(EIGHT, "0-5", "2-7", mode="unique_interleaved") == ["0-2,4", "3,5-7"]

    def test_only_what_is_near_counts(self) -> None:
        """GPU 0 is next to 0-3, GPU 1 to 4-7; the masks overlap on 2-5, the near parts don't."""
        machine = box(
            spread_cores(8, smt=1), nodes=[range(4), range(4, 8)], sockets=[[0], [1]], gpus=[0, 1]
        )
        assert shares(machine, "0-5", "2-7") == ["0-3", "4-7"]

    def test_masks_may_name_cpus_that_are_not_online(self) -> None:
        assert shares(EIGHT, "0-3,64", "4-31") == ["0-3", "4-7"]

    def test_nor_need_anybody_know_what_is_online(self) -> None:
        unknown = replace(EIGHT, cpus=frozenset())
        assert shares(unknown, "0-3", "4-7") == ["0-3", "4-7"]

    def test_sets_of_ids_do_as_well(self) -> None:
        found = plan(EIGHT, 2, rank_allowed=[{0, 1}, range(2, 4)])
        assert shown(found) == ["0-1", "2-3"]

    def test_without_a_gpu_each_keeps_its_own(self) -> None:
        found = plan(one_node(spread_cores(8, smt=1), gpus=0), 2, rank_allowed=["0-2", "4-7"])
        assert shown(found) == ["0-2", "4-7"]
        assert [share.cores for share in found.shares] == [3, 4]
        assert codes(found) == ["no-gpu"]
        assert "keeps the CPUs that it may use" in found.warnings[0].message


@pytest.mark.case("B2", "B7")
class TestSiblings:
    def test_masks_of_half_cores(self) -> None:
        """``--hint=nomultithread`` the other way round: rank 1 has the upper siblings only."""
        found = plan(HYPER, 2, rank_allowed=["0-7", "8-15"])
        assert shown(found) == ["0-7", "8-15"]
        assert [share.cores for share in found.shares] == [8, 8]

    def test_two_siblings_of_one_core(self) -> None:
        found = plan(HYPER, 2, rank_allowed=["0", "8"])
        assert shown(found) == ["0", "8"]
        assert [share.cores for share in found.shares] == [1, 1]
        assert codes(found) == ["mask-narrow"]

    def test_whole_cores_stay_whole(self) -> None:
        """Common are the cores (2,10) … (5,13)."""
        found = plan(HYPER, 2, rank_allowed=["0-5,8-13", "2-7,10-15"])
        assert shown(found) == ["0-3,8-11", "4-7,12-15"]

    def test_who_may_have_one_sibling_leaves_the_other(self) -> None:
        """Cores (0,8) and (1,9), of which rank 1 may use 0 and 1 only: it gets both, and rank 0
        the siblings. Both have two cores."""
        found = plan(HYPER, 2, rank_allowed=["0-1,8-9", "0-1"])
        assert shown(found) == ["8-9", "0-1"]
        assert [share.cores for share in found.shares] == [2, 2]

    def test_a_core_counts_once_though_it_comes_in_pieces(self) -> None:
        """Rank 1 has 1-7 as well, so rank 0 gets both siblings of core 0: one core."""
        found = plan(HYPER, 2, rank_allowed=["0,8", "0-7"], balanced=False)
        assert shown(found) == ["0,8", "1-7"]
        assert [share.cores for share in found.shares] == [1, 7]

    def test_two_that_may_have_a_whole_core_do_not_split_it(self) -> None:
        """Ranks 0 and 1 may have the cores (0,8) and (1,9), rank 2 only CPUs 0 and 1 of them: the
        lower siblings are rank 2's, or else one would have to have parts of both cores."""
        found = plan(HYPER, 3, rank_allowed=["0-1,8-9", "0-1,8-9", "0-1"], balanced=False)
        assert shown(found) == ["8", "9", "0-1"]

    def test_nor_where_one_goes_without(self) -> None:
        """Core (0,8) is all that ranks 0 and 1 may have; rank 1 then shares it."""
        found = plan(HYPER, 3, rank_allowed=["0,8", "0,8", "0-7"], balanced=False)
        assert shown(found) == ["8", "0,8", "0-7"]
        assert "too-few-cores" in codes(found)

    def test_balanced_counts_cores_not_pieces(self) -> None:
        """Rank 0 has one core, in two pieces; so ranks 2 and 3 have one of their four each, and
        rank 3's is the second."""
        masks = ["0,8", "0-2", "3-6,11-14", "3-6,11-14"]
        found = plan(HYPER, 4, rank_allowed=masks)
        assert shown(found) == ["0,8", "1", "3,11", "4,12"]

    def test_single_logical_is_one_of_each_core(self) -> None:
        found = plan(
            HYPER, 2, rank_allowed=["0,8", "0-7"], balanced=False, multithreading="single_logical"
        )
        assert shown(found) == ["0", "1-7"]

    def test_all_and_single_share_so_nothing_is_split(self) -> None:
        assert shares(HYPER, "0-1,8-9", "0-1", mode="all") == ["0-1,8-9", "0-1"]
        assert shares(HYPER, "0-1,8-9", "0-1", mode="single") == ["0,8", "0"]

    def test_single_unique_prefers_a_core_alone(self) -> None:
        """Rank 0 has CPU 0; rank 1 passes its sibling over; rank 2 has no other."""
        assert shares(HYPER, "0", "0-1,8-9", "0,8", mode="single_unique") == ["0", "1,9", "8"]

    def test_single_unique_shares_a_core_whole(self) -> None:
        """Both siblings are taken; rank 2 shares both, not only the first."""
        found = plan(HYPER, 3, rank_allowed=["0", "8", "0,8"], mode="single_unique")
        assert shown(found) == ["0", "8", "0,8"]
        assert codes(found)[-1] == "too-few-cores"

    def test_max_counts_cores(self) -> None:
        """Rank 0 has (0,8) in two pieces, and (1,9)."""
        found = plan(
            HYPER, 2, rank_allowed=["0-2,8-10", "0,2-7"], balanced=False, max_physical_cores=2
        )
        assert [share.cores for share in found.shares] == [2, 2]
        assert found.shares[0].cpus == cpus("0-1,8-9")


class TestPieces:
    """The parts by themselves. Cores 0 … 2 have two CPUs each."""

    CORES = Cores(cpus=(cpus("0,8"), cpus("1,9"), cpus("2,10")), slow_from=2, core_of=(0, 1, 2))

    def test_whole_masks_split_nothing(self) -> None:
        masks = [(mask, mask) for mask in (cpus("0,8"), cpus("1-2,9-10"))]
        assert split_siblings(self.CORES, masks).cpus == self.CORES.cpus

    def test_split_by_who_may_have_it(self) -> None:
        masks = [(mask, mask) for mask in (cpus("0-1,8"), cpus("0-2,9-10"))]
        found = split_siblings(self.CORES, masks)
        assert found.cpus == (cpus("0"), cpus("8"), cpus("1"), cpus("9"), cpus("2,10"))
        assert found.core_of == [0, 0, 1, 1, 2]
        assert found.slow_from == 4

    def test_pieces_come_by_their_lowest_cpu(self) -> None:
        """Whichever of them it is that has a mask of its own."""
        whole = cpus("0-2,8-10")
        for half in (cpus("0"), cpus("8")):
            found = split_siblings(self.CORES, [(half, half), (whole, whole)])
            assert found.cpus == (cpus("0"), cpus("8"), cpus("1,9"), cpus("2,10"))
            assert (found.core_of, found.slow_from) == ([0, 0, 1, 2], 3)

    def test_who_does_not_want_it_does_not_split_it(self) -> None:
        masks = [(cpus("0-1,8"), cpus("0,8")), (cpus("0-2,8-10"), cpus("1,9"))]
        assert split_siblings(self.CORES, masks).cpus == self.CORES.cpus

    def test_two_that_want_a_whole_core_compete_for_one_piece(self) -> None:
        """Places 0 and 1 are core 0; 0 is also for the third rank, so 1 is what they want."""
        cores = replace(self.CORES, cpus=(cpus("0"), cpus("8"), cpus("1,9")), core_of=(0, 0, 1))
        wanted = [frozenset({0, 1, 2}), frozenset({0, 1}), frozenset({0})]
        assert keep_whole(wanted, cores) == [{1, 2}, {1}, {0}]
        assert keep_whole(wanted[1:], cores) == wanted[1:]


class TestSeveralRanksOnAGpu:
    def test_masks_that_differ_far_from_the_gpu_make_no_difference(self) -> None:
        """Ranks 0 and 2 on GPU 0, rank 1 on GPU 1, all near 0-7: GPU by GPU, then rank by rank."""
        machine = box(
            spread_cores(12, smt=1), nodes=[range(8), range(8, 12)], sockets=[[0], [1]], gpus=[0, 0]
        )
        masks = ("0-8", "0-9", "0-11")
        assert shares(machine, *masks, balanced=False) == ["0-1", "4-7", "2-3"]
        assert shares(machine, *masks, balanced=False) == shown(plan(machine, 3, balanced=False))

    def test_masks_of_their_own(self) -> None:
        found = plan(replace(EIGHT, visible=(1,)), 2, rank_allowed=["0-1", "6-7"])
        assert shown(found) == ["0-1", "6-7"]
        assert [share.gpu for share in found.shares] == [1, 1]

    def test_masks_that_overlap(self) -> None:
        assert shares(replace(EIGHT, visible=(1,)), "0-3", "2-7", balanced=False) == ["0-3", "4-7"]


class TestFewerRanksThanGpus:
    def test_the_first_gpus_are_used(self) -> None:
        found = plan(dgx_a100(), 2, rank_allowed=["48-63,176-191", "56-63,184-191"])
        assert shown(found) == ["48-55,176-183", "56-63,184-191"]

    @pytest.mark.case("B17")
    def test_a_gpu_whose_mask_is_far(self) -> None:
        """GPU 2 is next to node 1 (16-31), its rank may use node 0; GPU 0's stays near."""
        found = plan(dgx_a100(visible=[0, 2]), 2, rank_allowed=["48-63,176-191", "0-15,128-143"])
        assert shown(found) == ["48-63,176-191", "0-15,128-143"]
        assert [str(share.source) for share in found.shares] == ["nvml", "nearest"]


class TestBySocket:
    def test_the_deal_is_inside_the_mask(self) -> None:
        """DGX A100, GPU 0: node 3 is 48-63; a mask that has half of it and half of node 0."""
        found = plan(dgx_a100(), 1, scope="socket", rank_allowed=["0-7,48-55"])
        assert shown(found) == ["0-7,48-55"]
        trimmed = plan(
            dgx_a100(), 1, scope="socket", rank_allowed=["0-7,48-55"], max_physical_cores=9
        )
        assert shown(trimmed) == ["0,48-55"]

    def test_masks_apart_on_one_socket(self) -> None:
        masks = ["0-7,48-55", "8-15,56-63"]
        found = plan(dgx_a100(), 2, scope="socket", rank_allowed=masks)
        assert shown(found) == masks


@pytest.mark.case("G5")
class TestHybrid:
    """Fast 0-3, slow 4-7."""

    MACHINE = replace(EIGHT, efficiency_cpus=cpus("4-7"))

    def test_kinds_are_shared_apart_inside_overlapping_masks(self) -> None:
        """Fast: 0 for A, 1-3 for both; slow: 4-6 for both, 7 for B."""
        assert shares(self.MACHINE, "0-6", "1-7") == ["0-1,4-5", "2-3,6-7"]

    def test_fast_cores_are_kept(self) -> None:
        assert shares(self.MACHINE, "2-4", "0-1,5-7", max_physical_cores=2) == ["2-3", "0-1"]


class TestRemarks:
    NODES = box(
        spread_cores(8, smt=1), nodes=[range(4), range(4, 8)], sockets=[[0], [1]], gpus=[0, 0, 1]
    )

    def test_masks_that_hold_everything_together_are_not_narrow(self) -> None:
        assert codes(plan(self.NODES, 3, rank_allowed=["0-1", "2-3", "4-7"])) == []

    @pytest.mark.case("A23")
    def test_what_nobody_may_use_is_said(self) -> None:
        found = plan(self.NODES, 3, rank_allowed=["0", "2-3", "4-7"])
        assert codes(found) == ["mask-narrow"]
        assert "allows only 0,2-3 of the CPUs near GPUs 0-1 (0-3)" in found.warnings[0].message

    @pytest.mark.case("A2")
    def test_a_rank_far_from_its_gpu_is_named(self) -> None:
        found = plan(self.NODES, 3, rank_allowed=["0-1", "4-5", "6-7"])
        lost = next(warning for warning in found.warnings if warning.code == "near-not-allowed")
        assert lost.rank == 1
        assert "none of the CPUs near GPU 1 (0-3) is allowed for rank 1" in lost.message
        assert codes(found) == ["near-not-allowed", "mask-narrow"]

    def test_two_ranks_of_one_gpu_of_which_one_is_far(self) -> None:
        found = plan(replace(self.NODES, visible=(0,)), 2, rank_allowed=["0-3", "4-7"])
        assert shown(found) == ["0-3", "4-7"]
        assert [(warning.code, warning.rank) for warning in found.warnings] == [
            ("near-not-allowed", 1)
        ]

    def test_ranks_at_several_sites_of_a_gpu_name_it_once(self) -> None:
        found = plan(replace(self.NODES, visible=(0,)), 2, rank_allowed=["4-5", "6-7"])
        assert (
            "none of the CPUs near GPU 0 (0-3) is allowed for ranks 0-1"
            in found.warnings[0].message
        )

    def test_the_scope_hint_counts_what_a_rank_may_use(self) -> None:
        """Node 2 of a DGX A100 (32-47) is on no GPU's node; rank 1 may not use it."""
        found = plan(dgx_a100(), 2, rank_allowed=["32-55,160-183", "56-63,184-191"])
        assert codes(found) == ["scope-hint"]
        assert "the CPUs 32-47,160-175 " in found.warnings[0].message
        assert codes(plan(dgx_a100(), 2, rank_allowed=["48-55,176-183", "56-63,184-191"])) == []

    def test_too_few_cores_in_a_mask(self) -> None:
        found = plan(EIGHT, 3, rank_allowed=["0-3", "4", "4"])
        assert shown(found) == ["0-3", "4", "4"]
        assert ("too-few-cores", None) in [(said.code, said.rank) for said in found.warnings]


class TestRefused:
    def test_a_rank_with_nothing_online(self) -> None:
        with pytest.raises(
            GPUAffinityError,
            match=r"rank_allowed\[1\] \(8-9\) holds none of the online CPUs 0-7;",
        ):
            plan(EIGHT, 2, rank_allowed=["0-7", "8-9"])

    @pytest.mark.parametrize(
        "masks", [["0-3"], ["0-3", "4-7", "0"], [], "0-3", 5, ["0-3", ""], ["0-3", "x"]]
    )
    def test_what_cannot_be_meant(self, masks: Any) -> None:
        with pytest.raises(InvalidOptionError, match=r"^rank_allowed"):
            plan(EIGHT, 2, rank_allowed=masks)

    def test_a_demand_tells_the_ranks_own_mask(self) -> None:
        with pytest.raises(
            GPUAffinityError, match=r"rank 1 on GPU 1 can have 1: 1 cores .* CPUs 4\)"
        ):
            plan(EIGHT, 2, rank_allowed=["0-3", "4"], min_physical_cores=2, balanced=False)


@pytest.mark.case("G2")
def test_ids_above_a_machine_word() -> None:
    gpu = [Gpu(index=at, node_cpus=cpus("60-70,5000-5003"), source=Source.NVML) for at in (0, 1)]
    machine = bare("60-70,5000-5003", *gpu)
    assert shares(machine, "60-66", "67-70,5000-5003", balanced=False) == [
        "60-66",
        "67-70,5000-5003",
    ]


def test_wide_cores_in_pieces() -> None:
    """POWER: cores of eight CPUs; two ranks have a half of each."""
    machine = one_node(packed_cores(2, smt=8), gpus=2)
    found = plan(machine, 2, rank_allowed=["0-3,8-11", "4-7,12-15"])
    assert shown(found) == ["0-3,8-11", "4-7,12-15"]
    assert [share.cores for share in found.shares] == [2, 2]
