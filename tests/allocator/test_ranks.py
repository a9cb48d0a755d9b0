"""More ranks than GPUs, fewer cores than ranks, demands, and machines that tell little."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuaff.allocator.plan import plan
from gpuaff.errors import GPUAffinityError
from gpuaff.notices import Notice
from gpuaff.topology.model import Gpu, Source, Topology
from tests.allocator.described import (
    bare,
    box,
    codes,
    cpus,
    dgx_a100,
    one_node,
    shown,
    spread_cores,
)

EIGHT = one_node(spread_cores(8, smt=1), gpus=2)


class TestSeveralRanksOnAGpu:
    def test_rank_r_is_on_gpu_r_modulo_their_number(self) -> None:
        found = plan(replace(EIGHT, visible=(1, 0)), 5)
        assert [share.gpu for share in found.shares] == [1, 0, 1, 0, 1]
        assert [share.rank for share in found.shares] == [0, 1, 2, 3, 4]

    def test_contiguous_cuts_a_gpus_share_into_blocks(self) -> None:
        found = plan(dgx_a100(), 16)
        assert found.shares[0].cpus == cpus("48-51,176-179")
        assert found.shares[8].cpus == cpus("52-55,180-183")
        assert found.shares[1].cpus == cpus("56-59,184-187")

    def test_interleaved_cuts_it_into_every_kth(self) -> None:
        """GPU 0 has 48, 50, … 62."""
        found = plan(dgx_a100(), 16, mode="unique_interleaved", multithreading="single_logical")
        assert found.shares[0].cpus == cpus("48,52,56,60")
        assert found.shares[8].cpus == cpus("50,54,58,62")
        assert found.shares[9].cpus == cpus("51,55,59,63")

    def test_by_socket_dealt_cores_come_along(self) -> None:
        found = plan(dgx_a100(), 16, scope="socket")
        assert found.shares[0].cpus == cpus("48-51,32-35,176-179,160-163")
        assert found.shares[8].cpus == cpus("52-55,36-39,180-183,164-167")

    def test_balanced_is_over_all_ranks(self) -> None:
        """GPU 0 has two ranks, GPU 1 one; each GPU's part is four cores."""
        assert shown(plan(EIGHT, 3)) == ["0-1", "4-5", "2-3"]

    def test_balanced_blocks_of_a_gpu_with_fewer_ranks_follow_each_other(self) -> None:
        """Six cores for each GPU. The ranks 0, 2 and 4 have two each, and so have 1 and 3."""
        machine = one_node(spread_cores(12, smt=1), gpus=2)
        assert shown(plan(machine, 5)) == ["0-1", "6-7", "2-3", "8-9", "4-5"]

    def test_unbalanced_cuts_only_where_there_are_several(self) -> None:
        assert shown(plan(EIGHT, 3, balanced=False)) == ["0-1", "4-7", "2-3"]

    def test_a_lonely_gpu_is_cut_for_all(self) -> None:
        assert shown(plan(replace(EIGHT, visible=(0,)), 4)) == ["0-1", "2-3", "4-5", "6-7"]

    @pytest.mark.case("D2")
    def test_two_instances_of_one_gpu(self) -> None:
        """MIG: two CUDA devices, one physical GPU."""
        assert shown(plan(replace(EIGHT, visible=(1, 1)), 2)) == ["0-3", "4-7"]

    @pytest.mark.parametrize("balanced", [True, False])
    @pytest.mark.parametrize("mode", ["unique_contiguous", "unique_interleaved"])
    def test_none_shares_while_there_is_a_core_for_each(self, mode: str, balanced: bool) -> None:
        """Two ranks on GPU 0, whose even part of the five cores is one."""
        found = plan(one_node(spread_cores(5, smt=1), gpus=4), 5, mode=mode, balanced=balanced)
        assert shown(found) == ["0", "1", "2", "3", "4"]
        assert codes(found) == []
        demanded = plan(one_node(spread_cores(5), gpus=4), 5, mode=mode, min_physical_cores=1)
        assert [share.cores for share in demanded.shares] == [1] * 5

    def test_none_shares_by_socket_either(self) -> None:
        """Three node cores for the three ranks of two GPUs, and three that are dealt to them."""
        machine = box(
            spread_cores(6, smt=1), nodes=[[0, 1, 2], [3, 4, 5]], sockets=[[0, 1]], gpus=[0, 0]
        )
        assert shown(plan(machine, 3, scope="socket")) == ["0,3", "1,4", "2,5"]

    def test_all_and_single_give_them_the_same(self) -> None:
        assert shown(plan(EIGHT, 3, mode="all")) == ["0-7"] * 3
        assert shown(plan(EIGHT, 3, mode="single")) == ["0"] * 3
        assert shown(plan(EIGHT, 3, mode="single_unique")) == ["0", "1", "2"]

    def test_fewer_ranks_than_gpus_use_the_first_gpus(self) -> None:
        assert shown(plan(EIGHT, 1)) == ["0-7"]


class TestFewerCoresThanRanks:
    def test_all_share_what_there_is(self) -> None:
        found = plan(one_node(spread_cores(2), gpus=3), 3)
        assert shown(found) == ["0-3"] * 3
        assert codes(found) == ["too-few-cores"]
        assert "ranks 0-2 must share cores" in found.warnings[0].message
        assert found.warnings[0].rank is None

    def test_unbalanced_interleaved_leaves_only_the_last_without(self) -> None:
        machine = one_node(spread_cores(2, smt=1), gpus=3)
        found = plan(machine, 3, mode="unique_interleaved", balanced=False)
        assert shown(found) == ["0", "1", "0-1"]
        assert [(warning.code, warning.rank) for warning in found.warnings] == [
            ("too-few-cores", 2)
        ]

    def test_they_do_not_count_when_the_others_are_balanced(self) -> None:
        """Node 0 has one core for two GPUs, node 1 four for one."""
        machine = box(
            spread_cores(5, smt=1), nodes=[[0], range(1, 5)], sockets=[[0], [1]], gpus=[0, 0, 1]
        )
        assert shown(plan(machine, 3)) == ["0", "0", "1-4"]

    def test_ranks_of_one_gpu_share_its_part_only(self) -> None:
        """Two cores, two GPUs: the ranks 0 and 2 on GPU 0 leave GPU 1's core alone."""
        found = plan(one_node(spread_cores(2, smt=1), gpus=2), 3)
        assert shown(found) == ["0", "1", "0"]
        assert codes(found) == ["too-few-cores"]

    def test_those_who_share_in_single_unique_begin_at_another_core_each(self) -> None:
        """Two cores; ranks 2, 3, 4 find none: they share core 0, core 1, core 0."""
        found = plan(one_node(spread_cores(2, smt=1), gpus=5), 5, mode="single_unique")
        assert shown(found) == ["0", "1", "0", "1", "0"]

    def test_single_unique_shares_the_first_core(self) -> None:
        found = plan(one_node(spread_cores(2, smt=1), gpus=3), 3, mode="single_unique")
        assert shown(found) == ["0", "1", "0"]
        assert found.warnings[0].code == "too-few-cores"
        assert found.warnings[0].rank == 2

    def test_trimmed_they_begin_at_different_cores(self) -> None:
        found = plan(one_node(spread_cores(2, smt=1), gpus=3), 3, max_physical_cores=1)
        assert shown(found) == ["0", "1", "0"]

    def test_by_socket_the_rest_of_the_socket_helps(self) -> None:
        """One node core for two GPUs, but four cores on the socket: no deal, just two each."""
        machine = box(spread_cores(4, smt=1), nodes=[[2], [0, 1, 3]], sockets=[[0, 1]], gpus=[0, 0])
        found = plan(machine, 2, scope="socket")
        assert shown(found) == ["0-1", "2-3"]
        assert codes(found) == []


class TestNodesThatAreNoCleanPartsOfTheSocket:
    """By socket there is no deal then; the socket's cores are just cut."""

    @staticmethod
    def machine(*nodes: str) -> Topology:
        gpus = [
            Gpu(index=index, node_cpus=cpus(text), socket_cpus=cpus("0-7"), source=Source.NVML)
            for index, text in enumerate(nodes)
        ]
        return bare("0-11", *gpus)

    def test_clean_ones_are_dealt_to(self) -> None:
        assert shown(plan(self.machine("4-5", "6-7"), 2, scope="socket")) == ["0-1,4-5", "2-3,6-7"]

    def test_a_node_outside_the_socket(self) -> None:
        assert shown(plan(self.machine("4-5", "8-9"), 2, scope="socket")) == ["0-3", "4-7"]

    def test_nodes_that_overlap(self) -> None:
        assert shown(plan(self.machine("4-6", "6-7"), 2, scope="socket")) == ["0-3", "4-7"]

    def test_a_gpu_whose_node_nobody_knows(self) -> None:
        known = self.machine("4-5", "6-7")
        unknown = replace(known.gpus[1], node_cpus=None)
        machine = replace(known, gpus=(known.gpus[0], unknown))
        assert shown(plan(machine, 2, scope="socket")) == ["0-3", "4-7"]
        trimmed = plan(machine, 2, scope="socket", mode="all", max_physical_cores=3)
        assert shown(trimmed) == ["0,4-5", "0,4-5"]

    def test_sockets_that_overlap_are_shared_fairly(self) -> None:
        known = self.machine("4-5", "6-7")
        moved = replace(known.gpus[1], socket_cpus=cpus("6-11"))
        machine = replace(known, gpus=(known.gpus[0], moved))
        assert shown(plan(machine, 2, scope="socket")) == ["0-5", "6-11"]


class TestDemands:
    def test_min_that_is_met(self) -> None:
        found = plan(EIGHT, 2, min_physical_cores=4)
        assert [share.cores for share in found.shares] == [4, 4]

    def test_min_that_is_not(self) -> None:
        with pytest.raises(GPUAffinityError) as caught:
            plan(EIGHT, 2, min_physical_cores=5)
        message = str(caught.value)
        assert "min_physical_cores=5" in message
        assert "rank 0 on GPU 0 can have 4" in message
        assert "8 cores near its GPU" in message
        assert "\n" not in message

    def test_it_holds_for_every_rank(self) -> None:
        machine = box(
            spread_cores(6, smt=1), nodes=[range(4), range(4, 6)], sockets=[[0], [1]], gpus=[0, 1]
        )
        with pytest.raises(GPUAffinityError, match="rank 1 on GPU 1 can have 2"):
            plan(machine, 2, min_physical_cores=3, balanced=False)

    def test_a_shared_core_is_no_core_of_ones_own(self) -> None:
        with pytest.raises(GPUAffinityError, match="rank 0 on GPU 0 can have 0"):
            plan(one_node(spread_cores(2), gpus=3), 3, min_physical_cores=1)

    def test_mode_all_checks_and_trims(self) -> None:
        found = plan(EIGHT, 2, mode="all", min_physical_cores=8, max_physical_cores=8)
        assert shown(found) == ["0-7", "0-7"]
        assert shown(plan(EIGHT, 2, mode="all", max_physical_cores=3)) == ["0-2", "0-2"]
        with pytest.raises(GPUAffinityError, match="can have 8"):
            plan(EIGHT, 2, mode="all", min_physical_cores=9)

    def test_without_a_gpu_the_allowed_cores_count(self) -> None:
        machine = one_node(spread_cores(4), gpus=0)
        assert shown(plan(machine, 2, min_physical_cores=4)) == ["0-7", "0-7"]
        with pytest.raises(GPUAffinityError, match="a rank would keep 4 cores: no GPU is visible"):
            plan(machine, 2, min_physical_cores=5)

    def test_without_cpus_no_demand_can_be_met(self) -> None:
        with pytest.raises(GPUAffinityError, match="has no CPUs"):
            plan(Topology(gpus=(Gpu(index=0),), visible=(0,)), 1, min_physical_cores=1)

    def test_the_error_tries_socket_only_where_that_is_new(self) -> None:
        for scope, tried in (("node", True), ("socket", False)):
            with pytest.raises(GPUAffinityError) as caught:
                plan(EIGHT, 2, scope=scope, min_physical_cores=5)
            assert ('try scope="socket"' in str(caught.value)) is tried

    @pytest.mark.parametrize("machine", [one_node(spread_cores(1), gpus=0), Topology()])
    def test_single_modes_demand_nothing(self, machine: Topology) -> None:
        assert codes(plan(machine, 1, mode="single", min_physical_cores=9)) == ["no-gpu"]


class TestLittleIsKnown:
    def test_no_visible_gpu(self) -> None:
        found = plan(dgx_a100(visible=[], allowed="0-15"), 3, multithreading="single_logical")
        assert shown(found) == ["0-15"] * 3
        assert {(share.gpu, share.source, share.cores) for share in found.shares} == {
            (None, Source.ALL, 16)
        }
        assert found.shares[0].numa_nodes == (0,)
        assert codes(found) == ["no-gpu"]

    def test_no_gpu_and_no_cpus(self) -> None:
        found = plan(Topology(), 1)
        assert shown(found) == [""]
        assert codes(found) == ["no-gpu"]

    def test_a_table_whose_affinity_cells_are_empty(self) -> None:
        """WSL2 shows a GPU and no masks."""
        found = plan(Topology(gpus=(Gpu(index=0),), visible=(0,)), 2)
        assert shown(found) == ["", ""]
        assert {(share.gpu, share.source, share.cores) for share in found.shares} == {
            (0, Source.ALL, 0)
        }
        assert codes(found) == ["cpus-unknown"]

    def test_cores_unknown(self) -> None:
        """Siblings cannot be known, so every CPU counts as a core."""
        found = plan(replace(one_node(spread_cores(2), gpus=2), cores=None), 2)
        assert shown(found) == ["0-1", "2-3"]
        assert codes(found) == ["cores-unknown"]

    def test_a_mask_outside_the_machine_contradicts_it(self) -> None:
        with pytest.raises(GPUAffinityError, match=r"CPU mask \(8-9\) holds none of .* 0-7;"):
            plan(replace(bare("0-7", Gpu(index=0)), allowed=cpus("8-9")), 1)

    def test_an_empty_mask_contradicts_it(self) -> None:
        with pytest.raises(GPUAffinityError, match=r"no CPU is allowed: the CPU mask \(empty\)"):
            plan(bare("0-7", allowed=""), 1)

    def test_a_visible_gpu_that_is_not_there(self) -> None:
        with pytest.raises(GPUAffinityError, match=r"GPU 5 is visible, but .* \[0, 1\]"):
            plan(replace(EIGHT, visible=(0, 5)), 2)


class TestRemarks:
    def test_nothing_to_say(self) -> None:
        assert plan(EIGHT, 2).warnings == ()

    def test_what_the_visible_devices_had_to_say_is_carried_over(self) -> None:
        notes = (
            Notice("visible-duplicate", "GPU 0 is listed twice"),
            Notice("nvml-missing", "no driver"),
        )
        assert codes(plan(replace(EIGHT, notes=notes), 2)) == ["visible-duplicate"]
        assert codes(plan(replace(EIGHT, notes=notes, visible=()), 2)) == [
            "visible-duplicate",
            "no-gpu",
        ]

    @pytest.mark.parametrize("mode", ["all", "unique_interleaved", "unique_contiguous"])
    def test_half_of_a_dgx_a100_is_near_no_gpu(self, mode: str) -> None:
        found = plan(dgx_a100(), 8, mode=mode)
        assert codes(found) == ["scope-hint"]
        assert 'scope="socket"' in found.warnings[0].message
        assert "0-15,32-47,64-79,96-111," in found.warnings[0].message

    def test_the_hint_counts_all_gpus_of_the_machine(self) -> None:
        """With two ranks node 1 idles too, but it is some GPU's."""
        assert "CPUs 0-15,32-47,128-143,160-175 " in plan(dgx_a100(), 2).warnings[0].message

    def test_no_hint_by_socket_nor_for_single_cores(self) -> None:
        assert codes(plan(dgx_a100(), 8, scope="socket")) == []
        assert codes(plan(dgx_a100(), 8, mode="single")) == []
        assert codes(plan(dgx_a100(), 8, mode="single_unique")) == []

    def test_no_hint_where_the_mask_leaves_nothing_more(self) -> None:
        found = plan(dgx_a100(allowed="16-31,48-63,80-95,112-127"), 8)
        assert codes(found) == ["mask-narrow"]
