"""The gpu-affinity rules, each by examples worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuaff.allocator.plan import plan
from gpuaff.topology.model import Gpu, Source
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

# Four cores (0,4) (1,5) (2,6) (3,7); CPUs 0 and 1 are not allowed.
HALVED = one_node(spread_cores(4), gpus=2, allowed="2-7")

# Node 0: cores 0-9, three GPUs; node 1: cores 10-13, one GPU. One CPU a core.
UNEVEN = box(
    spread_cores(14, smt=1),
    nodes=[range(10), range(10, 14)],
    sockets=[[0], [1]],
    gpus=[0, 0, 0, 1],
)


@pytest.mark.case("gpu-affinity-rule-1")
class TestRule1:
    def test_cores_are_ordered_by_their_lowest_cpu_allowed_or_not(self) -> None:
        assert shown(plan(HALVED, 2)) == ["4-5", "2-3,6-7"]

    def test_single_logical_keeps_the_lowest_allowed_cpu(self) -> None:
        found = plan(HALVED, 2, multithreading="single_logical")
        assert shown(found) == ["4-5", "2-3"]
        assert [share.cores for share in found.shares] == [2, 2]

    def test_all_has_that_order_too(self) -> None:
        assert shown(plan(HALVED, 1, mode="all", max_physical_cores=2)) == ["4-5"]

    def test_single_takes_the_first_of_that_order(self) -> None:
        assert shown(plan(HALVED, 1, mode="single")) == ["4"]

    def test_the_order_does_not_hang_on_how_the_machine_is_told(self) -> None:
        told = replace(HALVED, cores=(HALVED.cores or ())[::-1])
        assert shown(plan(told, 2)) == ["4-5", "2-3,6-7"]

    def test_a_cpu_in_no_core_counts_as_a_core_of_its_own(self) -> None:
        told = replace(one_node(spread_cores(2), gpus=2), cores=(cpus("0,2"),))
        assert shown(plan(told, 2, balanced=False, mode="unique_interleaved")) == ["0,2-3", "1"]


@pytest.mark.case("gpu-affinity-rule-2")
class TestRule2:
    def test_ranks_are_on_the_first_visible_gpus(self) -> None:
        found = plan(replace(UNEVEN, visible=(3, 1, 0)), 2)
        assert [share.gpu for share in found.shares] == [3, 1]
        assert shown(found) == ["10-13", "0-3"]

    def test_contiguous_balanced(self) -> None:
        """Node 0 has ⌊10 / 3⌋ = 3, node 1 has 4: everyone gets 3."""
        assert shown(plan(UNEVEN, 4)) == ["0-2", "3-5", "6-8", "10-12"]

    def test_interleaved_balanced(self) -> None:
        """Node 0's list is cut to 9 cores first."""
        found = plan(UNEVEN, 4, mode="unique_interleaved")
        assert shown(found) == ["0,3,6", "1,4,7", "2,5,8", "10-12"]

    def test_contiguous_unbalanced(self) -> None:
        """Ten cores for three: 4, 3, 3. gpu_affinity leaves the tenth core out."""
        found = plan(UNEVEN, 4, balanced=False)
        assert shown(found) == ["0-3", "4-6", "7-9", "10-13"]

    def test_contiguous_unbalanced_leaves_no_core_out(self) -> None:
        """Fourteen cores for three: 5, 5, 4."""
        machine = one_node(spread_cores(14, smt=1), gpus=3)
        assert shown(plan(machine, 3, balanced=False)) == ["0-4", "5-9", "10-13"]
        assert shown(plan(machine, 3)) == ["0-3", "4-7", "8-11"]

    def test_interleaved_unbalanced(self) -> None:
        found = plan(UNEVEN, 4, mode="unique_interleaved", balanced=False)
        assert shown(found) == ["0,3,6,9", "1,4,7", "2,5,8", "10-13"]

    def test_only_used_gpus_make_groups(self) -> None:
        """With two ranks node 0 is cut in two, and node 1's four cores cut nobody."""
        assert shown(plan(UNEVEN, 2)) == ["0-4", "5-9"]

    def test_contiguous_blocks_have_the_balanced_size(self) -> None:
        """Node 0: 8 cores for 2 GPUs; node 1: 2 for 1. The second block begins at core 2."""
        machine = box(
            spread_cores(10, smt=1),
            nodes=[range(8), range(8, 10)],
            sockets=[[0], [1]],
            gpus=[0, 0, 1],
        )
        assert shown(plan(machine, 3)) == ["0-1", "2-3", "8-9"]


@pytest.mark.case("gpu-affinity-rule-3")
class TestRule3:
    def test_all_gives_the_whole_near_list_to_everyone(self) -> None:
        found = plan(UNEVEN, 4, mode="all")
        assert shown(found) == ["0-9", "0-9", "0-9", "10-13"]

    def test_all_trims_what_is_near_no_gpu_by_node_first(self) -> None:
        found = plan(dgx_a100(), 8, mode="all", scope="socket", max_physical_cores=40)
        assert found.shares[0].cpus == cpus("16-31,48-63,0-7,144-159,176-191,128-135")
        assert found.shares[4].cpus == cpus("80-95,112-127,64-71,208-223,240-255,192-199")

    def test_single_is_the_first_core_for_everyone(self) -> None:
        assert shown(plan(UNEVEN, 4, mode="single")) == ["0", "0", "0", "10"]

    def test_single_unique_is_the_first_core_not_yet_taken(self) -> None:
        assert shown(plan(UNEVEN, 4, mode="single_unique")) == ["0", "1", "2", "10"]

    def test_single_unique_follows_the_ranks_not_the_indices(self) -> None:
        found = plan(replace(UNEVEN, visible=(2, 3, 0)), 3, mode="single_unique")
        assert shown(found) == ["0", "10", "1"]

    @pytest.mark.parametrize("mode", ["all", "single", "single_unique"])
    def test_these_ignore_balanced(self, mode: str) -> None:
        even, uneven = (plan(UNEVEN, 4, mode=mode, balanced=balanced) for balanced in (True, False))
        assert even.shares == uneven.shares

    @pytest.mark.parametrize("mode", ["single", "single_unique"])
    def test_single_modes_ignore_min_and_max(self, mode: str) -> None:
        asked = plan(UNEVEN, 4, mode=mode, min_physical_cores=9, max_physical_cores=9)
        assert asked.shares == plan(UNEVEN, 4, mode=mode).shares


@pytest.mark.case("gpu-affinity-rule-4")
class TestRule4:
    def test_dgx_a100_by_node(self) -> None:
        found = plan(dgx_a100(), 8)
        assert found.shares[0].cpus == cpus("48-55,176-183")

    def test_dgx_a100_by_socket(self) -> None:
        found = plan(dgx_a100(), 8, scope="socket")
        assert found.shares[0].cpus == cpus("48-55,32-39,176-183,160-167")
        assert found.shares[2].cpus == cpus("16-23,0-7,144-151,128-135")

    def test_trimming_keeps_node_cores_first(self) -> None:
        found = plan(dgx_a100(), 8, scope="socket", max_physical_cores=10)
        assert found.shares[0].cpus == cpus("48-55,32-33,176-183,160-161")

    def test_first_dealt_come_before_second_dealt(self) -> None:
        """Node cores 0 and 1; 2 and 3 are dealt first, 4 and 5 second."""
        machine = box(
            spread_cores(6, smt=1), nodes=[[0, 1], range(2, 6)], sockets=[[0, 1]], gpus=[0]
        )
        sizes = {most: plan(machine, 1, scope="socket", max_physical_cores=most) for most in (3, 5)}
        assert shown(sizes[3]) == ["0-2"]
        assert shown(sizes[5]) == ["0-4"]

    def test_cores_of_a_node_whose_gpu_is_not_used_are_dealt_too(self) -> None:
        """Two ranks on node 3 of a DGX A100: its 16 cores get all other 48 of the socket."""
        found = plan(dgx_a100(), 2, scope="socket")
        assert found.shares[0].cpus == cpus("48-55,0-7,16-23,32-39,176-183,128-135,144-151,160-167")

    UNEVEN_DEAL = box(
        # Node 0: cores 0-3 and two GPUs; node 1: cores 4-9, dealt 4→0 5→1 6→2 7→3; 8 and 9 make
        # no full round.
        spread_cores(10, smt=1),
        nodes=[range(4), range(4, 10)],
        sockets=[[0, 1]],
        gpus=[0, 0],
    )

    @pytest.mark.parametrize("balanced", [True, False])
    def test_what_makes_no_full_round_goes_to_the_smallest_shares(self, balanced: bool) -> None:
        """Ten cores, five each: 8 and 9 to one GPU each."""
        found = plan(self.UNEVEN_DEAL, 2, scope="socket", balanced=balanced)
        assert shown(found) == ["0-1,4-5,8", "2-3,6-7,9"]

    def test_trimming_still_keeps_node_cores_and_then_full_rounds(self) -> None:
        sizes = {
            most: shown(plan(self.UNEVEN_DEAL, 2, scope="socket", max_physical_cores=most))
            for most in (2, 3, 4)
        }
        assert sizes[2] == ["0-1", "2-3"]
        assert sizes[3] == ["0-1,4", "2-3,6"]
        assert sizes[4] == ["0-1,4-5", "2-3,6-7"]

    def test_interleaved_deals_alike(self) -> None:
        """Cores 0 and 2 bring 4, 8 and 6; cores 1 and 3 bring 5, 9 and 7."""
        found = plan(self.UNEVEN_DEAL, 2, scope="socket", mode="unique_interleaved")
        assert shown(found) == ["0,2,4,6,8", "1,3,5,7,9"]

    def test_single_modes_take_node_cores(self) -> None:
        """The socket's lowest core is 0, but node 3 begins at core 48."""
        for mode in ("single", "single_unique"):
            found = plan(dgx_a100(), 8, mode=mode, scope="socket")
            assert found.shares[0].cpus == cpus("48,176")

    def test_single_unique_goes_on_with_cores_of_no_gpus_node(self) -> None:
        """Core 3 is near GPUs 0 and 1, core 0 near GPU 2; the cores 1 and 2 near none."""
        machine = box(
            spread_cores(4, smt=1), nodes=[[3], [0], [1, 2]], sockets=[[0, 1, 2]], gpus=[0, 0, 1]
        )
        assert shown(plan(machine, 3, mode="single_unique", scope="socket")) == ["3", "1", "0"]


@pytest.mark.case("gpu-affinity-rule-5")
class TestRule5:
    def test_min_counts_cores_after_the_deal(self) -> None:
        """8 node cores, but 16 with those dealt."""
        found = plan(dgx_a100(), 8, scope="socket", min_physical_cores=16)
        assert [share.cores for share in found.shares] == [16] * 8

    def test_max_counts_cores_not_cpus(self) -> None:
        found = plan(dgx_a100(), 8, max_physical_cores=3)
        assert found.shares[0].cpus == cpus("48-50,176-178")
        assert found.shares[0].cores == 3


@pytest.mark.case("gpu-affinity-rule-6")
class TestRule6:
    @pytest.mark.parametrize("smt", [1, 2, 4, 8])
    @pytest.mark.parametrize("make", [spread_cores, packed_cores])
    def test_cores_of_any_width_stay_whole(self, smt: int, make: type) -> None:
        cores = make(4, smt)
        found = plan(one_node(cores, gpus=2), 2)
        assert found.shares[0].cpus == cores[0] | cores[1]
        assert found.shares[1].cpus == cores[2] | cores[3]
        assert [share.cores for share in found.shares] == [2, 2]

    def test_ids_above_the_number_of_cpus_are_not_lost(self) -> None:
        gpu = Gpu(index=0, node_cpus=cpus("0-1,5000-5001"), source=Source.NVML)
        assert shown(plan(bare("0-1,5000-5001", gpu), 1)) == ["0-1,5000-5001"]

    def test_planning_inside_a_share_does_not_halve_it(self) -> None:
        share = plan(dgx_a100(), 8).shares[1]
        again = plan(dgx_a100(visible=[1]).with_allowed(share.cpus), 1)
        assert again.shares[0].cpus == share.cpus

    def test_a_rank_with_no_near_core_of_its_own_is_no_error(self) -> None:
        found = plan(one_node(spread_cores(1), gpus=2), 2)
        assert shown(found) == ["0-1", "0-1"]
        assert codes(found) == ["too-few-cores"]


DGX_BY_HAND = {
    ("all", "node"): ["48-63,176-191"] * 2
    + ["16-31,144-159"] * 2
    + ["112-127,240-255"] * 2
    + ["80-95,208-223"] * 2,
    ("all", "socket"): ["0-63,128-191"] * 4 + ["64-127,192-255"] * 4,
    ("single", "node"): ["48,176"] * 2 + ["16,144"] * 2 + ["112,240"] * 2 + ["80,208"] * 2,
    ("single_unique", "node"): [
        *("48,176", "49,177", "16,144", "17,145"),
        *("112,240", "113,241", "80,208", "81,209"),
    ],
    ("unique_contiguous", "node"): [
        *("48-55,176-183", "56-63,184-191", "16-23,144-151", "24-31,152-159"),
        *("112-119,240-247", "120-127,248-255", "80-87,208-215", "88-95,216-223"),
    ],
    ("unique_contiguous", "socket"): [
        "32-39,48-55,160-167,176-183",
        "40-47,56-63,168-175,184-191",
        "0-7,16-23,128-135,144-151",
        "8-15,24-31,136-143,152-159",
        "96-103,112-119,224-231,240-247",
        "104-111,120-127,232-239,248-255",
        "64-71,80-87,192-199,208-215",
        "72-79,88-95,200-207,216-223",
    ],
    ("unique_interleaved", "node"): [
        *("48-63:1/2,176-191:1/2", "49-63:1/2,177-191:1/2"),
        *("16-31:1/2,144-159:1/2", "17-31:1/2,145-159:1/2"),
        *("112-127:1/2,240-255:1/2", "113-127:1/2,241-255:1/2"),
        *("80-95:1/2,208-223:1/2", "81-95:1/2,209-223:1/2"),
    ],
    ("unique_interleaved", "socket"): [
        *("32-63:1/2,160-191:1/2", "33-63:1/2,161-191:1/2"),
        *("0-31:1/2,128-159:1/2", "1-31:1/2,129-159:1/2"),
        *("96-127:1/2,224-255:1/2", "97-127:1/2,225-255:1/2"),
        *("64-95:1/2,192-223:1/2", "65-95:1/2,193-223:1/2"),
    ],
}
DGX_BY_HAND["single", "socket"] = DGX_BY_HAND["single", "node"]
DGX_BY_HAND["single_unique", "socket"] = DGX_BY_HAND["single_unique", "node"]


@pytest.mark.case("gpu-affinity-rule-4", "B2", "B7", "B17")
@pytest.mark.parametrize(("mode", "scope"), sorted(DGX_BY_HAND))
def test_dgx_a100_in_every_mode_and_scope(mode: str, scope: str) -> None:
    found = plan(dgx_a100(), 8, mode=mode, scope=scope)
    assert [share.cpus for share in found.shares] == [
        cpus(text) for text in DGX_BY_HAND[mode, scope]
    ]
    assert [share.gpu for share in found.shares] == list(range(8))


@pytest.mark.parametrize(("mode", "scope"), sorted(DGX_BY_HAND))
def test_single_logical_leaves_the_upper_siblings_out(mode: str, scope: str) -> None:
    found = plan(dgx_a100(), 8, mode=mode, scope=scope, multithreading="single_logical")
    assert [share.cpus for share in found.shares] == [
        frozenset(cpu for cpu in cpus(text) if cpu < 128) for text in DGX_BY_HAND[mode, scope]
    ]


def test_six_gpus_four_and_two() -> None:
    """Node 0 has four GPUs and 24 cores, node 1 two and 24: balanced, everyone gets 6."""
    machine = box(
        spread_cores(48),
        nodes=[range(24), range(24, 48)],
        sockets=[[0], [1]],
        gpus=[0, 0, 0, 0, 1, 1],
    )
    assert shown(plan(machine, 6)) == [
        *("0-5,48-53", "6-11,54-59", "12-17,60-65", "18-23,66-71"),
        *("24-29,72-77", "30-35,78-83"),
    ]
    assert shown(plan(machine, 6, balanced=False))[4:] == ["24-35,72-83", "36-47,84-95"]
