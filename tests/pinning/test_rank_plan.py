"""Which plan a rank makes: what several ranks decide apart must fit together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuaff import GPUAffinityError, Plan, Topology
from gpuaff.allocator.model import Options, Share
from gpuaff.allocator.plan import plan_with
from gpuaff.cpuset import CpuSet, parse_cpulist
from gpuaff.launch.binding import Masks, OwnGpus, Whose
from gpuaff.launch.inherited import Pinned
from gpuaff.launch.ranks import Ranks
from gpuaff.pinning.rank_plan import inputs_of_all, plan_for_rank, plan_inside_share
from gpuaff.topology.model import Gpu

COMMON = Masks(Whose.COMMON)
UNKNOWN = Masks(whose=Whose.UNKNOWN, source="its parent may use CPUs 0-255")

A100 = Topology.named("dgx-a100")
"""GPU 0 and 1 are near cores 48-63 (CPUs 48-63,176-191), GPU 2 and 3 near 16-31."""


def ranks(rank: int, size: int) -> Ranks:
    return Ranks(local_rank=rank, local_size=size)


def named(*cpulists: str) -> Masks:
    sets = tuple(map(parse_cpulist, cpulists))
    return Masks(whose=Whose.NAMED, named=sets, bound=True)


def codes(plan: Plan) -> list[str]:
    return [notice.code for notice in plan.warnings]


def only_share(plan: Plan, rank: int) -> Share:
    assert [share.rank for share in plan.shares] == [rank]
    return plan.share_of(rank)


def test_common_masks_are_shared_out() -> None:
    options = Options.of(8)
    assert plan_for_rank(A100, options, ranks(3, 8), COMMON) == plan_with(A100, options)


# Unknown masks.


@pytest.mark.case("A23", "F8")
def test_unknown_masks_are_not_cut() -> None:
    """Rank 1 of 2 is on GPU 1, with 6 of its 16 near cores in its mask."""
    mine = A100.with_allowed(parse_cpulist("0-15,58-63,186-191"))
    plan = plan_for_rank(mine, Options.of(2), ranks(1, 2), UNKNOWN)
    share = only_share(plan, 1)
    assert (share.gpu, share.cpus, share.cores) == (1, parse_cpulist("58-63,186-191"), 6)
    said = next(notice for notice in plan.warnings if notice.code == "masks-unknown")
    assert said.rank == 1
    assert "its parent may use CPUs 0-255" in said.message
    assert "58-63,186-191" in said.message


def test_unknown_masks_name_the_launchers_own_remedy() -> None:
    mine = A100.with_allowed(parse_cpulist("0-15,58-63,186-191"))
    plan = plan_for_rank(
        mine, Options.of(2), ranks(1, 2), UNKNOWN._replace(unbound="torchrun plainly")
    )
    said = next(notice for notice in plan.warnings if notice.code == "masks-unknown")
    assert "start the ranks unbound (torchrun plainly)" in said.message


# A share that is there already.


@pytest.mark.parametrize("mode", ["unique_contiguous", "unique_interleaved", "core_complex", "all"])
@pytest.mark.parametrize("partition", ["job", "machine"])
def test_a_share_is_kept_whole(mode: str, partition: str) -> None:
    """Rank 3 of 8 has 8 of the 16 cores near GPUs 2 and 3, and is not cut to 4 or 1."""
    cpus = parse_cpulist("24-31,152-159")
    share = Pinned(local_rank=3, local_size=8, cpus=cpus)
    options = Options.of(8, mode=mode, partition=partition, cpus="16-31,144-159")
    plan = plan_inside_share(A100.with_allowed(cpus), options, ranks(3, 8), None, share)
    kept = only_share(plan, 3)
    assert (kept.gpu, kept.cpus, kept.cores) == (3, cpus, 8)


def test_a_kept_share_is_reserved_from_once() -> None:
    cpus, helpers = parse_cpulist("25-31,153-159"), parse_cpulist("24,152")
    topology, options = A100.with_allowed(cpus), Options.of(8, reserve=1)
    share = Pinned(local_rank=3, local_size=8, cpus=cpus, reserved=helpers)
    kept = only_share(plan_inside_share(topology, options, ranks(3, 8), None, share), 3)
    assert (kept.cpus, kept.reserved) == (cpus, helpers)
    unreserved = share._replace(reserved=frozenset())
    kept = only_share(plan_inside_share(topology, options, ranks(3, 8), None, unreserved), 3)
    assert (kept.cores, len(kept.reserved)) == (6, 2)


def test_unknown_masks_heed_the_other_options() -> None:
    options = Options.of(2, mode="single", multithreading="single_logical")
    assert only_share(plan_for_rank(A100, options, ranks(1, 2), UNKNOWN), 1).cpus == {48}
    options = Options.of(2, max_physical_cores=3)
    assert only_share(plan_for_rank(A100, options, ranks(0, 2), UNKNOWN), 0).cores == 3
    with pytest.raises(GPUAffinityError, match="min_physical_cores=17"):
        plan_for_rank(A100, Options.of(2, min_physical_cores=17), ranks(0, 2), UNKNOWN)


@pytest.mark.parametrize(
    ("asked", "refused"),
    [
        ({"min_physical_cores": 17}, "rank 3 on GPU 3 can have 16"),
        ({"reserve": 16}, "rank 3 on GPU 3 would have no core left"),
        ({"reserve": 16, "mode": "single"}, "rank 3 on GPU 3 would have no core left"),
    ],
)
def test_what_cannot_be_had_is_said_of_the_rank_itself(
    asked: dict[str, object], refused: str
) -> None:
    with pytest.raises(GPUAffinityError, match=refused):
        plan_for_rank(A100, Options.of(8, **asked), ranks(3, 8), UNKNOWN)


def test_more_ranks_than_gpus_go_round() -> None:
    plan = plan_for_rank(A100, Options.of(20), ranks(10, 20), UNKNOWN)
    assert only_share(plan, 10).gpu == 2


def test_remarks_about_a_rank_follow_it() -> None:
    far = A100.with_allowed(parse_cpulist("0-15"))
    plan = plan_for_rank(far, Options.of(8), ranks(3, 8), UNKNOWN)
    assert {notice.rank for notice in plan.warnings if notice.code == "near-not-allowed"} == {3}


def test_without_gpus_nothing_is_cut_whatever_the_masks() -> None:
    none = replace(A100, visible=())
    plan = plan_for_rank(none, Options.of(2), ranks(1, 2), UNKNOWN)
    assert codes(plan) == ["no-gpu"]
    assert plan.share_of(1).cpus == A100.allowed


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
    masks = named(*sets)
    machine = replace(A100, visible=(0, 1, 2, 3))
    plans = [
        plan_for_rank(
            machine.with_allowed(parse_cpulist(own)), Options.of(4), ranks(rank, 4), masks
        )
        for rank, own in enumerate(sets)
    ]
    expected = ("56-63,184-191", "48-55,176-183", "16-23,144-151", "24-31,152-159")
    assert {tuple(share.cpus for share in plan.shares) for plan in plans} == {
        tuple(map(parse_cpulist, expected))
    }


def test_a_set_beyond_the_own_mask_is_cut() -> None:
    options = Options.of(2, rank_allowed=["48-55", "56-63"])
    mine = A100.with_allowed(parse_cpulist("58-70"))
    sets = options.rank_allowed
    assert sets is not None
    topology, cut = inputs_of_all(mine, options, 1, sets)
    assert cut.rank_allowed == (parse_cpulist("48-55"), parse_cpulist("58-63"))
    assert topology.allowed == parse_cpulist("48-55,58-63")
    plan = plan_for_rank(mine, options, ranks(1, 2), COMMON)
    said = [notice.message for notice in plan.warnings if notice.code == "mask-cut"]
    assert len(said) == 1
    assert "56-57" in said[0]
    inside = A100.with_allowed(parse_cpulist("48-63"))
    assert "mask-cut" not in codes(plan_for_rank(inside, options, ranks(1, 2), COMMON))


def test_a_launchers_list_is_no_promise_of_the_callers() -> None:
    mine = A100.with_allowed(parse_cpulist("58-63"))
    plan = plan_for_rank(mine, Options.of(2), ranks(1, 2), named("48-55", "56-63"))
    assert "mask-cut" not in codes(plan)


def test_a_set_of_which_nothing_may_be_used() -> None:
    options = Options.of(2, rank_allowed=["0-3", "4-7"])
    mine = A100.with_allowed(parse_cpulist("48-51"))
    with pytest.raises(GPUAffinityError, match=r"rank 1 the CPUs 4-7.*48-51 only"):
        plan_for_rank(mine, options, ranks(1, 2), COMMON)


def test_the_caller_knows_better_than_the_launcher() -> None:
    options = Options.of(2, rank_allowed=["48-51", "52-55"])
    for masks in (UNKNOWN, named("0-1", "2-3")):
        plan = plan_for_rank(A100.with_allowed(parse_cpulist("48-55")), options, ranks(0, 2), masks)
        assert "masks-unknown" not in codes(plan)


def test_an_own_gpu_in_a_mask_that_nobody_else_has() -> None:
    masks = named("48-55,176-183", "16-23,144-151")
    mine = replace(A100.with_allowed(parse_cpulist("16-23,144-151")), visible=(3,))
    plan = plan_for_rank(mine, Options.of(2), ranks(1, 2), masks, OwnGpus(own=(3,), on_node=2))
    share = only_share(plan, 1)
    assert (share.gpu, share.cpus) == (3, parse_cpulist("16-23,144-151"))
    assert "gpus-unknown" not in codes(plan)


def test_an_own_gpu_in_a_mask_that_others_have_too() -> None:
    masks = named("16-31", "24-47")
    mine = replace(A100.with_allowed(parse_cpulist("24-47")), visible=(3,))
    plan = plan_for_rank(mine, Options.of(2), ranks(1, 2), masks, OwnGpus(own=(3,), on_node=2))
    assert only_share(plan, 1).cpus == parse_cpulist("24-31")
    assert codes(plan)[-1] == "gpus-unknown"


# GPUs of one's own.


def bus(machine: Topology) -> tuple[Gpu, ...]:
    """What sysfs tells of a machine's GPUs."""
    return tuple(replace(gpu, uuid=None, socket_cpus=None) for gpu in machine.gpus)


def shown_one(machine: Topology, gpu: int, *, hidden: bool) -> Topology:
    """What a rank sees that has one GPU: CUDA shows no other, a device cgroup hides them too."""
    if not hidden:
        return replace(machine, visible=(gpu,))
    kept = replace(machine.gpu_by_index[gpu], index=0)
    return replace(machine, gpus=(kept,), visible=(0,))


def by_own_gpu(
    gpus: Sequence[int], gpu: int, *, hidden: bool = False, rank: int = 0, size: int | None = None
) -> Plan:
    own = OwnGpus(named=tuple(gpus), own=(gpu,), on_node=len(gpus))
    return plan_for_rank(
        shown_one(A100, gpu, hidden=hidden),
        Options.of(size or len(gpus)),
        ranks(rank, size or len(gpus)),
        COMMON,
        own,
        bus(A100),
    )


@pytest.mark.case("D10")
@pytest.mark.parametrize("hidden", [False, True])
def test_each_takes_the_part_of_its_own_gpu(hidden: bool) -> None:
    """As if every rank saw all four, whichever rank has which GPU."""
    parts = {0: "48-55,176-183", 1: "56-63,184-191", 2: "16-23,144-151", 3: "24-31,152-159"}
    for rank, gpu in enumerate((2, 0, 3, 1)):
        plan = by_own_gpu((0, 1, 2, 3), gpu, hidden=hidden, rank=rank)
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
        topology = shown_one(A100, gpu, hidden=hidden)
        size = max(2, len(order))
        plan = plan_for_rank(topology, Options.of(size), ranks(rank, size), COMMON, own, bus(A100))
        part = only_share(plan, rank).cpus
        assert part <= (A100.gpu_by_index[gpu].node_cpus or frozenset())
        parts.append(part)
    assert sum(map(len, parts)) == len(frozenset().union(*parts))


def test_a_lost_gpu_that_sysfs_has_lost_too_leaves_no_numbers() -> None:
    """The scheduler's 1 and 2 would be the second and the third of those that are left."""
    lost, *others = A100.gpus
    gone = Gpu(index=lost.index)
    topology = replace(A100, gpus=(gone, *others), visible=(2,))
    own = OwnGpus(named=(1, 2), on_node=2)
    plan = plan_for_rank(topology, Options.of(2), ranks(1, 2), COMMON, own, bus(A100)[1:])
    assert "gpus-unknown" in codes(plan)


def test_every_rank_has_the_same_description() -> None:
    """Where the driver knows what sysfs does not, but only of the rank's own GPU."""
    vague = tuple(replace(g, node_cpus=None, local_cpus=None, numa_node=None) for g in bus(A100))
    own = [OwnGpus(named=(0, 1, 2, 3), own=(gpu,), on_node=4) for gpu in range(4)]
    parts = [
        plan_for_rank(
            shown_one(A100, gpu, hidden=True), Options.of(4), ranks(gpu, 4), COMMON, own[gpu], vague
        )
        for gpu in range(4)
    ]
    shares = [only_share(plan, rank).cpus for rank, plan in enumerate(parts)]
    assert sum(map(len, shares)) == len(frozenset().union(*shares)) == 256


def test_remarks_about_other_gpus_are_left_to_their_ranks() -> None:
    """Of the CPUs near GPU 3 none is allowed."""
    near_0 = A100.with_allowed(parse_cpulist("48-63"))
    said = {}
    for rank, gpu in enumerate((3, 0)):
        own = OwnGpus(named=(0, 3), own=(gpu,), on_node=2)
        plan = plan_for_rank(
            shown_one(near_0, gpu, hidden=False),
            Options.of(2),
            ranks(rank, 2),
            COMMON,
            own,
            bus(A100),
        )
        said[gpu] = [notice.rank for notice in plan.warnings if notice.code == "near-not-allowed"]
    assert said == {3: [0], 0: []}


def test_several_own_gpus_count_as_the_first() -> None:
    """CUDA's device 0, whatever the rank."""
    mine = replace(A100, visible=(4, 5))
    own = OwnGpus(named=(2, 3, 4, 5), own=(4, 5), on_node=4)
    plan = plan_for_rank(mine, Options.of(2), ranks(1, 2), COMMON, own, bus(A100))
    share = only_share(plan, 1)
    assert (share.gpu, share.cpus) == (4, parse_cpulist("112-119,240-247"))
    assert only_share(plan_for_rank(mine, Options.of(2), ranks(1, 2), UNKNOWN, own), 1).gpu == 4


def test_a_job_that_has_all_gpus_needs_no_names() -> None:
    own = OwnGpus(own=(3,), on_node=8)
    mine = shown_one(A100, 3, hidden=True)
    plan = plan_for_rank(mine, Options.of(8), ranks(0, 8), COMMON, own, bus(A100))
    assert only_share(plan, 0).cpus == parse_cpulist("24-31,152-159")


@pytest.mark.parametrize(
    "own",
    [
        OwnGpus(own=(3,), on_node=2),
        OwnGpus(named=(0, 1), own=(3,), on_node=2),
        OwnGpus(named=(3, 8), own=(3,), on_node=2),
        OwnGpus(named=(2, 3), own=(2,), on_node=2),
    ],
    ids=["not named", "named without it", "more than there are", "counted otherwise"],
)
def test_names_that_do_not_help(own: OwnGpus) -> None:
    mine = shown_one(A100, 3, hidden=False)
    plan = plan_for_rank(mine, Options.of(2), ranks(1, 2), COMMON, own, bus(A100))
    share = only_share(plan, 1)
    assert (share.gpu, share.cpus) == (3, parse_cpulist("16-31,144-159"))
    said = next(notice for notice in plan.warnings if notice.code == "gpus-unknown")
    assert said.rank == 1
    assert "GPU 3" in said.message


def test_a_gpu_without_address_is_not_found() -> None:
    mine = shown_one(A100, 3, hidden=False)
    mine = replace(mine, gpus=tuple(replace(gpu, pci_bus_id=None) for gpu in mine.gpus))
    own = OwnGpus(named=(2, 3), own=(3,), on_node=2)
    plan = plan_for_rank(mine, Options.of(2), ranks(1, 2), COMMON, own)
    assert codes(plan)[-1] == "gpus-unknown"


def test_several_ranks_on_each_own_gpu_keep_its_part() -> None:
    for rank, gpu in enumerate((0, 0, 1, 1)):
        plan = by_own_gpu((0, 1), gpu, rank=rank, size=4)
        expected = "48-55,176-183" if gpu == 0 else "56-63,184-191"
        assert only_share(plan, rank).cpus == parse_cpulist(expected)
        assert codes(plan)[-1] == "gpus-unknown"


@pytest.mark.case("D10")
@pytest.mark.parametrize("partition", ["job", "machine"])
def test_fewer_ranks_than_gpus_may_all_be_on_one(partition: str) -> None:
    """``--gpu-bind=map_gpu:2,2`` in a job that has GPU 2 and 3."""
    own = OwnGpus(named=(2, 3), own=(2,), on_node=2, shared=True)
    mine = shown_one(A100, 2, hidden=False)
    for rank in (0, 1):
        options = Options.of(2, partition=partition)
        plan = plan_for_rank(mine, options, ranks(rank, 2), COMMON, own, bus(A100))
        assert only_share(plan, rank).cpus == parse_cpulist("16-23,144-151")
        assert codes(plan).count("gpus-unknown") == 1


def test_unknown_masks_and_an_own_gpu() -> None:
    own = OwnGpus(named=(2, 3), own=(3,), on_node=2)
    mine = shown_one(A100.with_allowed(parse_cpulist("24-27")), 3, hidden=True)
    plan = plan_for_rank(mine, Options.of(2), ranks(1, 2), UNKNOWN, own, bus(A100))
    share = only_share(plan, 1)
    assert (share.gpu, share.cpus) == (0, parse_cpulist("24-27"))
    assert codes(plan)[-1] == "masks-unknown"


def test_one_gpu_that_is_nobodys_own_is_shared() -> None:
    mine = shown_one(A100, 3, hidden=False)
    shares = [
        plan_for_rank(mine, Options.of(2), ranks(rank, 2), COMMON).share_of(rank).cpus
        for rank in (0, 1)
    ]
    assert shares == [parse_cpulist("16-23,144-151"), parse_cpulist("24-31,152-159")]


def test_one_gpu_of_a_machine_with_more_may_be_a_wrappers_work() -> None:
    everywhere = named("0-255", "0-255")
    for masks in (COMMON, everywhere):
        plan = plan_for_rank(shown_one(A100, 3, hidden=False), Options.of(2), ranks(1, 2), masks)
        (said,) = (notice for notice in plan.warnings if notice.code == "one-gpu")
        assert (said.rank, said.message[:23]) == (None, "2 ranks see one GPU and")


def test_one_gpu_is_nothing_to_speak_of() -> None:
    plans = {
        "the others are hidden from the driver": plan_for_rank(
            shown_one(A100, 3, hidden=True), Options.of(2), ranks(1, 2), COMMON
        ),
        "one rank": plan_for_rank(
            shown_one(A100, 3, hidden=False), Options.of(1), ranks(0, 1), COMMON
        ),
        "two GPUs": plan_for_rank(
            replace(A100, visible=(2, 3)), Options.of(4), ranks(0, 4), COMMON
        ),
        "nothing is cut": plan_for_rank(
            shown_one(A100, 3, hidden=False), Options.of(2), ranks(1, 2), UNKNOWN
        ),
    }
    assert [why for why, plan in plans.items() if "one-gpu" in codes(plan)] == []


# partition="machine": what is inside the border of one's GPU is one's own, whoever the others are.


def machine_wide(nproc: int) -> Options:
    return Options.of(nproc, partition="machine")


@pytest.mark.case("B13", "B14")
def test_a_whole_border_needs_to_know_nobody() -> None:
    """The border of GPU 1 is 56-63 and a part of the free cores, 8-15, with their siblings."""
    mine = A100.with_allowed(parse_cpulist("8-15,56-63,136-143,184-191"))
    plan = plan_for_rank(mine, machine_wide(8), ranks(1, 8), UNKNOWN)
    assert only_share(plan, 1).cpus == parse_cpulist("56-63,184-191")
    assert "masks-unknown" not in codes(plan)
    assert plan.partition == "machine"


def test_a_part_of_a_border_is_no_ground() -> None:
    mine = A100.with_allowed(parse_cpulist("56-63,184-191"))
    plan = plan_for_rank(mine, machine_wide(8), ranks(1, 8), UNKNOWN)
    assert plan.partition == "job"
    assert {"border-unused", "masks-unknown"} <= set(codes(plan))


def test_ranks_on_one_gpu_cut_its_border() -> None:
    """Of 16 ranks 1 and 9 are on GPU 1: four of its eight near cores each."""
    shares = [
        only_share(plan_for_rank(A100, machine_wide(16), ranks(rank, 16), UNKNOWN), rank).cpus
        for rank in (1, 9)
    ]
    assert shares == [parse_cpulist("56-59,184-187"), parse_cpulist("60-63,188-191")]
    too_many = Options.of(16, partition="machine", min_physical_cores=7)
    with pytest.raises(GPUAffinityError, match="rank 1 on GPU 1"):
        plan_for_rank(A100, too_many, ranks(9, 16), UNKNOWN)


@pytest.mark.parametrize("masks", [COMMON, UNKNOWN])
def test_a_claimed_gpu_is_nobody_elses(masks: Masks) -> None:
    """Whatever the number of ranks; by ``job``, or without the border, only near it."""
    seen, own = A100.with_visible_devices("2"), OwnGpus(claimed=True)
    plan = plan_for_rank(seen, machine_wide(16), ranks(11, 16), masks, own)
    assert only_share(plan, 11).cpus == parse_cpulist("16-23,144-151")
    assert (plan.partition, {"gpus-unknown", "masks-unknown"} & set(codes(plan))) == (
        "machine",
        set(),
    )
    part = seen.with_allowed(parse_cpulist("16-23"))
    plan = plan_for_rank(part, machine_wide(16), ranks(11, 16), masks, own)
    assert only_share(plan, 11).cpus == parse_cpulist("16-23")
    assert plan.partition == "job"


def test_the_remedy_is_for_who_has_shown_one_gpu() -> None:
    """A launcher, or the rank's own claim, where its border is not known."""
    seen = A100.with_visible_devices("2")
    for own, remedy in (
        (OwnGpus(on_node=2), "srun --gpus-per-node"),
        (OwnGpus(claimed=True), "gpuaff run -n 2 -- torchrun"),
    ):
        said = plan_for_rank(seen, Options.of(2), ranks(1, 2), COMMON, own).warnings[-1]
        assert said.code == "gpus-unknown"
        assert remedy in said.message


@pytest.mark.case("D10")
def test_an_own_gpu_has_its_border() -> None:
    seen = A100.with_visible_devices("2")
    plan = plan_for_rank(seen, machine_wide(4), ranks(3, 4), COMMON, OwnGpus(on_node=4))
    assert only_share(plan, 3).cpus == parse_cpulist("16-23,144-151")
    assert (only_share(plan, 3).gpu, codes(plan).count("gpus-unknown")) == (2, 0)


def test_several_ranks_on_an_own_gpu_share_its_border_and_say_so() -> None:
    seen = A100.with_visible_devices("2")
    plan = plan_for_rank(seen, machine_wide(8), ranks(3, 8), COMMON, OwnGpus(named=(0, 1, 2, 3)))
    assert only_share(plan, 3).cpus == parse_cpulist("16-23,144-151")
    assert "gpus-unknown" in codes(plan)
