"""Which plan a rank makes: what several ranks decide apart must fit together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuaff import GPUAffinityError, Plan, Topology
from gpuaff.allocator.model import Options, Share
from gpuaff.allocator.plan import plan_with
from gpuaff.cpuset import CpuSet, parse_cpulist
from gpuaff.launch.binding import Masks, OwnGpus
from gpuaff.launch.inherited import Pinned
from gpuaff.launch.ranks import Ranks
from gpuaff.pinning.rank_plan import inputs_of_all, plan_for_rank, plan_inside_share
from gpuaff.topology.model import Gpu

COMMON = Masks()
UNKNOWN = Masks(unknown="its parent may use CPUs 0-255")

A100 = Topology.named("dgx-a100")
"""GPU 0 and 1 are near cores 48-63 (CPUs 48-63,176-191), GPU 2 and 3 near 16-31."""

BUS = tuple(replace(gpu, uuid=None, socket_cpus=None) for gpu in A100.gpus)
"""What sysfs tells of its GPUs."""


def named(*cpulists: str) -> Masks:
    sets = tuple(map(parse_cpulist, cpulists))
    return Masks(named=sets, bound=True)


def codes(plan: Plan) -> list[str]:
    return [notice.code for notice in plan.warnings]


def message(plan: Plan, code: str) -> str:
    (found,) = [notice.message for notice in plan.warnings if notice.code == code]
    return found


def only_share(plan: Plan, rank: int) -> Share:
    assert [share.rank for share in plan.shares] == [rank]
    return plan.share_of(rank)


def planned(
    rank: int,
    size: int,
    masks: Masks = COMMON,
    own: OwnGpus | None = None,
    *,
    allowed: str | None = None,
    visible: tuple[int, ...] | None = None,
    hidden: bool = False,
    machine: Topology = A100,
    bus: Sequence[Gpu] = BUS,
    **options: Any,
) -> Plan:
    """The plan of a rank that may use these CPUs, and sees these GPUs.

    CUDA shows no other; ``hidden``: a device cgroup hides the others, too.
    """
    seen = machine if allowed is None else machine.with_allowed(parse_cpulist(allowed))
    if visible is not None:
        seen = replace(seen, visible=visible)
    if hidden:
        (gpu,) = visible or ()
        seen = replace(seen, gpus=(replace(seen.gpu_by_index[gpu], index=0),), visible=(0,))
    all_gpus = () if own is None else bus
    ranks = Ranks(local_rank=rank, local_size=size)
    return plan_for_rank(seen, Options.of(size, **options), ranks, masks, own, all_gpus)


def inside_share(share: Pinned, **options: Any) -> Share:
    """What rank 3 of 8 has that was started with this share."""
    machine, ranks = A100.with_allowed(share.cpus), Ranks(local_rank=3, local_size=8)
    return only_share(plan_inside_share(machine, Options.of(8, **options), ranks, None, share), 3)


def test_common_masks_are_shared_out() -> None:
    assert planned(3, 8) == plan_with(A100, Options.of(8))


# Unknown masks.


@pytest.mark.case("A23", "F8")
def test_unknown_masks_are_not_cut() -> None:
    """Rank 1 of 2 is on GPU 1, with 6 of its 16 near cores in its mask."""
    unknown = UNKNOWN._replace(unbound="torchrun plainly")
    plan = planned(1, 2, unknown, allowed="0-15,58-63,186-191")
    share = only_share(plan, 1)
    assert (share.gpu, share.cpus, share.cores) == (1, parse_cpulist("58-63,186-191"), 6)
    said = message(plan, "masks-unknown")
    for part in ("its parent may use CPUs 0-255", "58-63,186-191", "unbound (torchrun plainly)"):
        assert part in said


def test_unknown_masks_heed_the_other_options() -> None:
    single = planned(1, 2, UNKNOWN, mode="single", multithreading="single_logical")
    assert only_share(single, 1).cpus == {48}
    assert only_share(planned(0, 2, UNKNOWN, max_physical_cores=3), 0).cores == 3


@pytest.mark.parametrize(
    ("asked", "refused"),
    [
        ({"min_physical_cores": 17}, "min_physical_cores=17.*rank 3 on GPU 3 can have 16"),
        ({"reserve": 16}, "rank 3 on GPU 3 would have no core left"),
        ({"reserve": 16, "mode": "single"}, "rank 3 on GPU 3 would have no core left"),
    ],
)
def test_what_cannot_be_had_is_said_of_the_rank_itself(asked: dict[str, Any], refused: str) -> None:
    with pytest.raises(GPUAffinityError, match=refused):
        planned(3, 8, UNKNOWN, **asked)


def test_more_ranks_than_gpus_go_round() -> None:
    assert only_share(planned(10, 20, UNKNOWN), 10).gpu == 2


def test_remarks_about_a_rank_follow_it() -> None:
    plan = planned(3, 8, UNKNOWN, allowed="0-15")
    assert {notice.rank for notice in plan.warnings if notice.code == "near-not-allowed"} == {3}


def test_without_gpus_nothing_is_cut_whatever_the_masks() -> None:
    plan = planned(1, 2, UNKNOWN, visible=())
    assert codes(plan) == ["no-gpu"]
    assert plan.share_of(1).cpus == A100.allowed


# A share that is there already.


@pytest.mark.parametrize("mode", ["unique_contiguous", "unique_interleaved", "core_complex", "all"])
@pytest.mark.parametrize("partition", ["job", "machine"])
def test_a_share_is_kept_whole(mode: str, partition: str) -> None:
    """Rank 3 of 8 has 8 of the 16 cores near GPUs 2 and 3, and is not cut to 4 or 1."""
    share = Pinned(local_rank=3, local_size=8, cpus=parse_cpulist("24-31,152-159"))
    kept = inside_share(share, mode=mode, partition=partition, cpus="16-31,144-159")
    assert (kept.gpu, kept.cpus, kept.cores) == (3, share.cpus, 8)


def test_a_kept_share_is_reserved_from_once() -> None:
    cpus, helpers = parse_cpulist("25-31,153-159"), parse_cpulist("24,152")
    share = Pinned(local_rank=3, local_size=8, cpus=cpus, reserved=helpers)
    kept = inside_share(share, reserve=1)
    assert (kept.cpus, kept.reserved) == (cpus, helpers)
    kept = inside_share(share._replace(reserved=frozenset()), reserve=1)
    assert (kept.cores, len(kept.reserved)) == (6, 2)


# Masks that the launcher names, or the caller.


def test_what_all_ranks_plan_from_is_the_same_in_each() -> None:
    sets = tuple(map(parse_cpulist, ("48-51", "52-55", "16-19")))
    found = {
        inputs_of_all(A100.with_allowed(sets[rank]), Options.of(3), rank, sets) for rank in range(3)
    }
    (inputs,) = found
    assert inputs[0].allowed == parse_cpulist("48-55,16-19")
    assert inputs[1].rank_allowed == sets


@pytest.mark.case("B19", "A17")
def test_named_masks_are_cut_among_those_that_have_them() -> None:
    """In every rank the same plan, each share inside the rank's own mask."""
    sets = ("56-63,184-191", "48-55,176-183", "16-31,144-159", "16-31,144-159")
    plans = [
        planned(rank, 4, named(*sets), allowed=own, visible=(0, 1, 2, 3))
        for rank, own in enumerate(sets)
    ]
    expected = ("56-63,184-191", "48-55,176-183", "16-23,144-151", "24-31,152-159")
    assert {tuple(share.cpus for share in plan.shares) for plan in plans} == {
        tuple(map(parse_cpulist, expected))
    }


def test_a_set_beyond_the_own_mask_is_cut() -> None:
    sets = ["48-55", "56-63"]
    plan = planned(1, 2, allowed="58-70", rank_allowed=sets)
    assert plan.share_of(1).cpus == parse_cpulist("58-63")
    assert "56-57" in message(plan, "mask-cut")
    assert "mask-cut" not in codes(planned(1, 2, allowed="48-63", rank_allowed=sets))


def test_a_launchers_list_is_no_promise_of_the_callers() -> None:
    plan = planned(1, 2, named("48-55", "56-63"), allowed="58-63")
    assert "mask-cut" not in codes(plan)


def test_a_set_of_which_nothing_may_be_used() -> None:
    with pytest.raises(GPUAffinityError, match=r"rank 1 the CPUs 4-7.*48-51 only"):
        planned(1, 2, allowed="48-51", rank_allowed=["0-3", "4-7"])


@pytest.mark.parametrize("masks", [UNKNOWN, named("0-1", "2-3")])
def test_the_caller_knows_better_than_the_launcher(masks: Masks) -> None:
    plan = planned(0, 2, masks, allowed="48-55", rank_allowed=["48-51", "52-55"])
    assert "masks-unknown" not in codes(plan)


@pytest.mark.parametrize(
    ("masks", "mine", "part", "is_said"),
    [
        (named("48-55,176-183", "16-23,144-151"), "16-23,144-151", "16-23,144-151", False),
        (named("16-31", "24-47"), "24-47", "24-31", True),
    ],
    ids=["that no other rank has", "that others have too"],
)
def test_an_own_gpu_in_a_mask(masks: Masks, mine: str, part: str, is_said: bool) -> None:
    plan = planned(1, 2, masks, OwnGpus(own=(3,), on_node=2), allowed=mine, visible=(3,))
    share = only_share(plan, 1)
    assert (share.gpu, share.cpus) == (3, parse_cpulist(part))
    assert ("gpus-unknown" in codes(plan)) is is_said


# GPUs of one's own.


@pytest.mark.case("D10")
@pytest.mark.parametrize("hidden", [False, True])
def test_each_takes_the_part_of_its_own_gpu(hidden: bool) -> None:
    """As if every rank saw all four, whichever rank has which GPU."""
    parts = {0: "48-55,176-183", 1: "56-63,184-191", 2: "16-23,144-151", 3: "24-31,152-159"}
    for rank, gpu in enumerate((2, 0, 3, 1)):
        own = OwnGpus(named=(0, 1, 2, 3), own=(gpu,), on_node=4)
        plan = planned(rank, 4, COMMON, own, visible=(gpu,), hidden=hidden)
        share = only_share(plan, rank)
        assert share.cpus == parse_cpulist(parts[gpu])
        assert share.gpu == (0 if hidden else gpu), "as this rank's driver counts"
        assert "gpus-unknown" not in codes(plan)


@given(st.sets(st.integers(0, 7), min_size=1), st.booleans())
def test_own_parts_are_disjoint_and_near(gpus: set[int], hidden: bool) -> None:
    order = sorted(gpus)
    parts: list[CpuSet] = []
    for rank, gpu in enumerate(order):
        own = OwnGpus(named=tuple(order), own=(gpu,), on_node=len(order))
        plan = planned(rank, max(2, len(order)), COMMON, own, visible=(gpu,), hidden=hidden)
        part = only_share(plan, rank).cpus
        assert part <= (A100.gpu_by_index[gpu].node_cpus or frozenset())
        parts.append(part)
    assert sum(map(len, parts)) == len(frozenset().union(*parts))


def test_every_rank_has_the_same_description() -> None:
    """Where the driver knows what sysfs does not, but only of the rank's own GPU."""
    vague = tuple(replace(g, node_cpus=None, local_cpus=None, numa_node=None) for g in BUS)
    shares = []
    for gpu in range(4):
        own = OwnGpus(named=(0, 1, 2, 3), own=(gpu,), on_node=4)
        plan = planned(gpu, 4, COMMON, own, visible=(gpu,), hidden=True, bus=vague)
        shares.append(only_share(plan, gpu).cpus)
    assert sum(map(len, shares)) == len(frozenset().union(*shares)) == 256


def test_remarks_about_other_gpus_are_left_to_their_ranks() -> None:
    """Of the CPUs near GPU 3 none is allowed."""
    said = {}
    for rank, gpu in enumerate((3, 0)):
        own = OwnGpus(named=(0, 3), own=(gpu,), on_node=2)
        plan = planned(rank, 2, COMMON, own, allowed="48-63", visible=(gpu,))
        said[gpu] = [notice.rank for notice in plan.warnings if notice.code == "near-not-allowed"]
    assert said == {3: [0], 0: []}


def test_several_own_gpus_count_as_the_first() -> None:
    """CUDA's device 0, whatever the rank."""
    own = OwnGpus(named=(2, 3, 4, 5), own=(4, 5), on_node=4)
    share = only_share(planned(1, 2, COMMON, own, visible=(4, 5)), 1)
    assert (share.gpu, share.cpus) == (4, parse_cpulist("112-119,240-247"))
    assert only_share(planned(1, 2, UNKNOWN, own, visible=(4, 5)), 1).gpu == 4


def test_a_job_that_has_all_gpus_needs_no_names() -> None:
    plan = planned(0, 8, COMMON, OwnGpus(own=(3,), on_node=8), visible=(3,), hidden=True)
    assert only_share(plan, 0).cpus == parse_cpulist("24-31,152-159")


WITHOUT_ADDRESSES = replace(A100, gpus=tuple(replace(g, pci_bus_id=None) for g in A100.gpus))
LOST = replace(A100, gpus=(Gpu(index=0), *A100.gpus[1:]))
"""Sysfs has lost GPU 0 too: the scheduler's 2 and 3 would be those that are left."""


@pytest.mark.parametrize(
    ("own", "machine", "bus"),
    [
        pytest.param(OwnGpus(own=(3,), on_node=2), A100, BUS, id="not named"),
        pytest.param(OwnGpus(named=(0, 1), own=(3,), on_node=2), A100, BUS, id="without it"),
        pytest.param(OwnGpus(named=(3, 8), own=(3,), on_node=2), A100, BUS, id="too many"),
        pytest.param(OwnGpus(named=(2, 3), own=(2,), on_node=2), A100, BUS, id="other numbers"),
        pytest.param(OwnGpus(named=(2, 3), own=(3,)), WITHOUT_ADDRESSES, (), id="no address"),
        pytest.param(OwnGpus(named=(2, 3), on_node=2), LOST, BUS[1:], id="a lost GPU"),
    ],
)
def test_names_that_do_not_help(own: OwnGpus, machine: Topology, bus: Sequence[Gpu]) -> None:
    plan = planned(1, 2, COMMON, own, visible=(3,), machine=machine, bus=bus)
    share = only_share(plan, 1)
    assert (share.gpu, share.cpus) == (3, parse_cpulist("16-31,144-159"))
    assert "GPU 3" in message(plan, "gpus-unknown")
    assert plan.warnings[-1].rank == 1


def test_several_ranks_on_each_own_gpu_keep_its_part() -> None:
    for rank, gpu in enumerate((0, 0, 1, 1)):
        own = OwnGpus(named=(0, 1), own=(gpu,), on_node=2)
        plan = planned(rank, 4, COMMON, own, visible=(gpu,))
        expected = "48-55,176-183" if gpu == 0 else "56-63,184-191"
        assert only_share(plan, rank).cpus == parse_cpulist(expected)
        assert codes(plan)[-1] == "gpus-unknown"


@pytest.mark.case("D10")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("partition", ["job", "machine"])
def test_fewer_ranks_than_gpus_may_all_be_on_one(partition: str, rank: int) -> None:
    """``--gpu-bind=map_gpu:2,2`` in a job that has GPU 2 and 3."""
    own = OwnGpus(named=(2, 3), own=(2,), on_node=2, shared=True)
    plan = planned(rank, 2, COMMON, own, visible=(2,), partition=partition)
    assert only_share(plan, rank).cpus == parse_cpulist("16-23,144-151")
    assert codes(plan).count("gpus-unknown") == 1


def test_unknown_masks_and_an_own_gpu() -> None:
    own = OwnGpus(named=(2, 3), own=(3,), on_node=2)
    plan = planned(1, 2, UNKNOWN, own, allowed="24-27", visible=(3,), hidden=True)
    share = only_share(plan, 1)
    assert (share.gpu, share.cpus) == (0, parse_cpulist("24-27"))
    assert codes(plan)[-1] == "masks-unknown"


def test_one_gpu_that_is_nobodys_own_is_shared() -> None:
    shares = [planned(rank, 2, visible=(3,)).share_of(rank).cpus for rank in (0, 1)]
    assert shares == [parse_cpulist("16-23,144-151"), parse_cpulist("24-31,152-159")]


@pytest.mark.parametrize("masks", [COMMON, named("0-255", "0-255")])
def test_one_gpu_of_a_machine_with_more_may_be_a_wrappers_work(masks: Masks) -> None:
    plan = planned(1, 2, masks, visible=(3,))
    assert message(plan, "one-gpu").startswith("2 ranks see one GPU and")


def test_one_gpu_is_nothing_to_speak_of() -> None:
    plans = {
        "the others are hidden from the driver": planned(1, 2, visible=(3,), hidden=True),
        "one rank": planned(0, 1, visible=(3,)),
        "two GPUs": planned(0, 4, visible=(2, 3)),
        "nothing is cut": planned(1, 2, UNKNOWN, visible=(3,)),
    }
    assert [why for why, plan in plans.items() if "one-gpu" in codes(plan)] == []


# partition="machine": what is inside the border of one's GPU is one's own, whoever the others are.


@pytest.mark.case("B13", "B14")
def test_a_whole_border_needs_to_know_nobody() -> None:
    """The border of GPU 1 is 56-63 and a part of the free cores, 8-15, with their siblings."""
    border = "8-15,56-63,136-143,184-191"
    plan = planned(1, 8, UNKNOWN, allowed=border, partition="machine")
    assert only_share(plan, 1).cpus == parse_cpulist("56-63,184-191")
    assert "masks-unknown" not in codes(plan)
    assert plan.partition == "machine"


def test_a_part_of_a_border_is_no_ground() -> None:
    plan = planned(1, 8, UNKNOWN, allowed="56-63,184-191", partition="machine")
    assert plan.partition == "job"
    assert {"border-unused", "masks-unknown"} <= set(codes(plan))


def test_ranks_on_one_gpu_cut_its_border() -> None:
    """Of 16 ranks 1 and 9 are on GPU 1: four of its eight near cores each."""
    for rank, part in ((1, "56-59,184-187"), (9, "60-63,188-191")):
        plan = planned(rank, 16, UNKNOWN, partition="machine")
        assert only_share(plan, rank).cpus == parse_cpulist(part)
    with pytest.raises(GPUAffinityError, match="rank 1 on GPU 1"):
        planned(9, 16, UNKNOWN, partition="machine", min_physical_cores=7)


@pytest.mark.parametrize("masks", [COMMON, UNKNOWN])
def test_a_claimed_gpu_is_nobody_elses(masks: Masks) -> None:
    """Whatever the number of ranks; by ``job``, or without the border, only near it."""
    own = OwnGpus(claimed=True)
    plan = planned(11, 16, masks, own, visible=(2,), partition="machine")
    assert only_share(plan, 11).cpus == parse_cpulist("16-23,144-151")
    assert plan.partition == "machine"
    assert not {"gpus-unknown", "masks-unknown"} & set(codes(plan))
    plan = planned(11, 16, masks, own, allowed="16-23", visible=(2,), partition="machine")
    assert only_share(plan, 11).cpus == parse_cpulist("16-23")
    assert plan.partition == "job"


@pytest.mark.parametrize(
    ("own", "remedy"),
    [
        (OwnGpus(on_node=2), "srun --gpus-per-node"),
        (OwnGpus(claimed=True), "gpuaff run -n 2 -- torchrun"),
    ],
)
def test_the_remedy_is_for_who_has_shown_one_gpu(own: OwnGpus, remedy: str) -> None:
    """A launcher, or the rank's own claim, where its border is not known."""
    assert remedy in message(planned(1, 2, COMMON, own, visible=(2,)), "gpus-unknown")


@pytest.mark.case("D10")
@pytest.mark.parametrize(
    ("own", "size", "is_said"),
    [(OwnGpus(on_node=4), 4, False), (OwnGpus(named=(0, 1, 2, 3)), 8, True)],
    ids=["one rank on it", "several"],
)
def test_an_own_gpu_has_its_border(own: OwnGpus, size: int, is_said: bool) -> None:
    plan = planned(3, size, COMMON, own, visible=(2,), partition="machine")
    share = only_share(plan, 3)
    assert (share.gpu, share.cpus) == (2, parse_cpulist("16-23,144-151"))
    assert ("gpus-unknown" in codes(plan)) is is_said
