"""Balanced is the largest equal cut: never below the smallest share of the unbalanced plan."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gpuaff.allocator.cores import allowed_cores
from gpuaff.allocator.plan import plan
from gpuaff.cpuset import CpuSet
from gpuaff.topology.model import Topology
from gpuaff.topology.serialize import machine_names
from tests.allocator.described import box, cpus, one_node, shown, spread_cores
from tests.allocator.random_machines import MODES, SCOPES, any_machine, regular
from tests.allocator.special_machines import xeon6_snc3
from tests.allocator.test_rank_properties import masked
from tests.strategies import topologies

DESCRIBED = Path(__file__).parents[1] / "data/described"
ALL_MODES = (*MODES, "core_complex")
BOTH = pytest.mark.parametrize("balanced", [True, False])


class TestThreeNodesASocket:
    """Nodes of 40 cores, siblings 240 higher; node n has 40n … 40n + 39. GPUs are next to the nodes
    0, 2, 3 and 5, so 40 cores of each socket are nobody's, and too few for a round of 80."""

    XEON6 = Topology.load(DESCRIBED / "xeon6.json")
    HALVES = ("0-59,240-299", "60-119,300-359", "120-179,360-419", "180-239,420-479")

    @BOTH
    @pytest.mark.parametrize("mode", ["unique_contiguous", "core_complex"])
    def test_each_gpu_has_half_of_its_socket(self, mode: str, balanced: bool) -> None:
        """Of 40-79 the first 20 go to GPU 0, beside its own 0-39, the others to GPU 1."""
        found = plan(self.XEON6, 4, mode=mode, scope="socket", balanced=balanced)
        assert shown(found) == list(self.HALVES)

    def test_as_with_the_borders_of_its_gpus(self) -> None:
        bordered = plan(self.XEON6, 4, scope="socket", partition="machine")
        assert shown(bordered) == list(self.HALVES)

    @BOTH
    def test_interleaved(self, balanced: bool) -> None:
        """Of 40-79 every second one."""
        found = plan(
            self.XEON6,
            4,
            mode="unique_interleaved",
            scope="socket",
            multithreading="single_logical",
            balanced=balanced,
        )
        assert [share.cpus for share in found.shares] == [
            cpus("0-39,40-79:1/2"),
            cpus("80-119,41-79:1/2"),
            cpus("120-159,160-199:1/2"),
            cpus("200-239,161-199:1/2"),
        ]

    def test_a_demand_of_fifty_is_met(self) -> None:
        found = plan(self.XEON6, 4, scope="socket", min_physical_cores=50)
        assert [share.cores for share in found.shares] == [60] * 4

    def test_trimming_keeps_the_nodes(self) -> None:
        found = plan(self.XEON6, 4, scope="socket", max_physical_cores=40)
        assert shown(found) == shown(plan(self.XEON6, 4))

    @BOTH
    def test_two_gpus_on_each_node(self, balanced: bool) -> None:
        """Nodes of 32: 16 cores of its own for each GPU, and of the 32 of nobody's node 8 each."""
        found = plan(xeon6_snc3((0, 0, 2, 2, 3, 3, 5, 5)), 8, scope="socket", balanced=balanced)
        assert shown(found) == [
            "0-15,32-39,192-207,224-231",
            "16-31,40-47,208-223,232-239",
            "48-55,64-79,240-247,256-271",
            "56-63,80-95,248-255,272-287",
            "96-111,128-135,288-303,320-327",
            "112-127,136-143,304-319,328-335",
            "144-151,160-175,336-343,352-367",
            "152-159,176-191,344-351,368-383",
        ]

    @BOTH
    def test_one_gpu_and_two_on_the_nodes(self, balanced: bool) -> None:
        """32 cores of its own for GPU 0, 16 each for 1 and 2: 32-63 go to these, for 32 each."""
        found = plan(xeon6_snc3((0, 2, 2)), 3, scope="socket", balanced=balanced)
        assert shown(found) == [
            "0-31,192-223",
            "32-47,64-79,224-239,256-271",
            "48-63,80-95,240-255,272-287",
        ]

    @BOTH
    def test_two_ranks_on_each_gpu(self, balanced: bool) -> None:
        """30 cores each: ranks 0 and 4 are on GPU 0, and have 20 node cores and 10 of 40-79."""
        found = plan(self.XEON6, 8, scope="socket", balanced=balanced)
        assert [share.cores for share in found.shares] == [30] * 8
        assert shown(found)[:6:4] == ["0-19,40-49,240-259,280-289", "20-39,50-59,260-279,290-299"]


class TestSocketsWithDifferentlyManyNodes:
    @pytest.mark.parametrize("mode", ["unique_contiguous", "unique_interleaved"])
    def test_two_gpus_of_one_node_and_two_of_two(self, mode: str) -> None:
        """DGX A100, GPUs 0, 1, 4 and 6. Socket 0: 16 cores of node 3, with three others each: 32
        for each GPU. Socket 1: the 16 cores of the nodes 7 and 5, with one other each: 32 too."""
        machine = Topology.named("dgx-a100").with_visible_devices("0,1,4,6")
        even, uneven = (
            plan(machine, 4, mode=mode, scope="socket", balanced=balanced)
            for balanced in (True, False)
        )
        assert [share.cores for share in even.shares] == [32] * 4
        assert even.shares == uneven.shares
        assert shown(even)[2:] == ["96-127,224-255", "64-95,192-223"]

    def test_node_cores_are_taken_before_others(self) -> None:
        """Socket 0 has a node of 8 and 8 others, socket 1 a node of 4: four cores of the node."""
        machine = box(
            spread_cores(20, smt=1),
            nodes=[range(8), range(8, 16), range(16, 20)],
            sockets=[[0, 1], [2]],
            gpus=[0, 2],
        )
        assert shown(plan(machine, 2, scope="socket")) == ["0-3", "16-19"]


class TestMoreRanksThanGpus:
    """The largest equal cut is one by rank."""

    def test_four_ranks_on_three_gpus(self) -> None:
        """Twelve cores, three each. In thirds first, the two ranks on GPU 0 would have two each."""
        machine = one_node(spread_cores(12, smt=1), gpus=3)
        assert shown(plan(machine, 4)) == ["0-2", "6-8", "9-11", "3-5"]
        dealt = plan(machine, 4, mode="unique_interleaved")
        assert shown(dealt) == ["0,4,8", "1,5,9", "2,6,10", "3,7,11"]

    @pytest.mark.parametrize("mode", ["unique_contiguous", "unique_interleaved", "core_complex"])
    @pytest.mark.parametrize(("nproc", "cores"), [(9, 12), (10, 10), (18, 6)])
    def test_the_cores_of_a_socket_are_cut_equally(self, mode: str, nproc: int, cores: int) -> None:
        """DGX A100, 64 cores a socket: five, six and ten ranks are on the GPUs of socket 0."""
        found = plan(Topology.named("dgx-a100"), nproc, mode=mode, scope="socket")
        assert [share.cores for share in found.shares] == [cores] * nproc
        assert len(frozenset().union(*(share.cpus for share in found.shares))) == 2 * cores * nproc

    def test_a_rank_has_its_part_of_the_node_and_more_of_the_socket(self) -> None:
        """Two nodes of five cores, one GPU: two node cores each, and three of the six others."""
        machine = box(
            spread_cores(10, smt=1), nodes=[range(5), range(5, 10)], sockets=[[0, 1]], gpus=[0]
        )
        found = plan(machine, 2, scope="socket", min_physical_cores=5)
        assert shown(found) == ["0-1,4-6", "2-3,7-9"]

    def test_a_node_with_few_ranks_gives_cores_to_one_with_many(self) -> None:
        """Nodes of five cores, four ranks on the GPUs of one and one on the other's: two each."""
        machine = box(
            spread_cores(10, smt=1),
            nodes=[range(5), range(5, 10)],
            sockets=[[0, 1]],
            gpus=[0, 0, 1],
        )
        assert shown(plan(machine, 5, scope="socket")) == ["0,4", "2,8", "5-6", "1,7", "3,9"]

    def test_unbalanced_ones_are_cut_gpu_by_gpu(self) -> None:
        """Thirteen cores: 5, 4 and 4, and the five once more."""
        machine = one_node(spread_cores(13, smt=1), gpus=3)
        assert shown(plan(machine, 4, balanced=False)) == ["0-2", "5-8", "9-12", "3-4"]


def smallest(machine: Topology, nproc: int, **asked: object) -> int:
    return min(share.cores for share in plan(machine, nproc, **asked).shares)  # type: ignore[arg-type]


@given(
    st.one_of(
        regular(),
        any_machine(),
        topologies(min_gpus=1),
        topologies(min_gpus=1, complete=True),
        st.sampled_from(machine_names()).map(Topology.named),
    ),
    st.integers(1, 9),
    st.sampled_from(ALL_MODES),
    st.sampled_from(SCOPES),
)
def test_no_balanced_share_is_smaller_than_all_unbalanced_ones(
    machine: Topology, nproc: int, mode: str, scope: str
) -> None:
    even, uneven = (
        smallest(machine, nproc, mode=mode, scope=scope, balanced=balanced)
        for balanced in (True, False)
    )
    assert even >= uneven


@given(
    st.one_of(regular(), st.sampled_from(machine_names()).map(Topology.named)),
    st.integers(1, 40),
    st.sampled_from(("unique_contiguous", "unique_interleaved", "core_complex")),
    st.sampled_from(SCOPES),
)
def test_more_ranks_than_gpus_have_the_largest_equal_share(
    machine: Topology, nproc: int, mode: str, scope: str
) -> None:
    """Where GPUs' cores are the same or apart, and all cores are of one kind."""
    near = Counter(share.cpus for share in plan(machine, nproc, mode="all", scope=scope).shares)
    assume(nproc > len(machine.visible) and not machine.efficiency_cpus)
    assume(sum(map(len, near)) == len(frozenset().union(*near)))
    sizes = [len(allowed_cores(machine, cpus).cpus) // ranks for cpus, ranks in near.items()]
    assume(min(sizes) > 0)
    assert smallest(machine, nproc, mode=mode, scope=scope) == min(sizes)


@given(masked(), st.sampled_from(ALL_MODES), st.sampled_from(SCOPES))
def test_nor_where_ranks_have_masks_of_their_own(
    asked: tuple[Topology, list[CpuSet]], mode: str, scope: str
) -> None:
    machine, masks = asked
    even, uneven = (
        smallest(machine, len(masks), mode=mode, scope=scope, balanced=balanced, rank_allowed=masks)
        for balanced in (True, False)
    )
    assert even >= uneven


@given(
    st.one_of(regular(), any_machine(), topologies(min_gpus=1, complete=True)),
    st.integers(1, 9),
    st.sampled_from(("unique_contiguous", "unique_interleaved", "core_complex")),
    st.sampled_from(SCOPES),
)
def test_unbalanced_leaves_no_near_core_out(
    machine: Topology, nproc: int, mode: str, scope: str
) -> None:
    near = plan(machine, nproc, mode="all", scope=scope)
    cut = plan(machine, nproc, mode=mode, scope=scope, balanced=False)
    whole, given_out = (
        frozenset().union(*(share.cpus for share in found.shares)) for found in (near, cut)
    )
    assert given_out == whole
