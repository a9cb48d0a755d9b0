"""Which plan a rank makes: what several ranks decide apart must fit together."""

from __future__ import annotations

from collections.abc import Sequence
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
from gpuaff.pinning.rank_plan import plan_for_rank, plan_inside_share
from gpuaff.topology.model import Gpu

COMMON = Masks()
UNKNOWN = Masks(unknown="its parent may use CPUs 0-255")

A100 = Topology.named("dgx-a100")
"""GPU 0 and 1 are near cores 48-63 (CPUs 48-63,176-191), GPU 2 and 3 near 16-31."""

BUS = tuple(gpu._replace(uuid=None, socket_cpus=None) for gpu in A100.gpus)
"""What sysfs tells of its GPUs."""


def named(*cpulists: str) -> Masks:
    sets = tuple(map(parse_cpulist, cpulists))
    return Masks(named=sets, bound=True)


def codes(plan: Plan) -> list[str]:
    return [notice.code for notice in plan.warnings]


def message(plan: Plan, code: str) -> str:
    (found,) = [notice.message for notice in plan.warnings if notice.code == code]
    return found


def own(*gpus: int, named: str | None = None, **more: Any) -> OwnGpus:
    """This rank's own GPUs, as the launcher counts, and all those that it names."""
    of_all = None if named is None else tuple(sorted(parse_cpulist(named)))
    return OwnGpus(named=of_all, own=gpus or None, **more)


def only_share(plan: Plan, rank: int) -> Share:
    assert [share.rank for share in plan.shares] == [rank]
    return plan.share_of(rank)


def planned(
    rank: int,
    size: int,
    masks: Masks = COMMON,
    gpus: OwnGpus | None = None,
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
        seen = seen._replace(visible=visible)
    if hidden:
        (gpu,) = visible or ()
        seen = seen._replace(gpus=(seen.gpu_by_index[gpu]._replace(index=0),), visible=(0,))
    ranks = Ranks(local_rank=rank, local_size=size)
    return plan_for_rank(
        seen, Options.of(size, **options), ranks, masks, gpus, () if gpus is None else bus
    )


MACHINE = {"partition": "machine"}
BORDER_1 = "8-15,56-63,136-143,184-191"
"""The domain of GPU 1: its near cores and a part of the free ones, with their siblings."""

BOUND_APART = {"allowed": "16-23,144-151", "visible": (3,)}
Row = tuple[int, int, Masks, OwnGpus | None, dict[str, Any], int, str, str]

# Rank, number of ranks, masks, own GPUs, what else is given: the GPU and the CPUs of the only share
# of the plan, and the warnings.
ROWS: dict[str, Row] = {
    "unknown masks": (
        1, 2, UNKNOWN, None, {"allowed": "0-15,58-63,186-191"}, 1, "58-63,186-191", "masks-unknown",
    ),
    "a single core": (
        1, 2, UNKNOWN, None, {"mode": "single", "multithreading": "single_logical"},
        1, "48", "masks-unknown",
    ),
    "at most three cores": (
        0, 2, UNKNOWN, None, {"max_physical_cores": 3}, 0, "48-50,176-178", "masks-unknown",
    ),
    "more ranks than GPUs": (10, 20, UNKNOWN, None, {}, 2, "16-31,144-159", "masks-unknown"),
    "unknown masks and an own GPU": (
        1, 2, UNKNOWN, own(3, named="2-3", on_node=2),
        {"allowed": "24-27", "visible": (3,), "hidden": True}, 0, "24-27", "masks-unknown",
    ),
    "an own GPU in a mask that no other rank has": (
        1, 2, named("48-55", "16-23,144-151"), own(3, on_node=2), BOUND_APART,
        3, "16-23,144-151", "",
    ),
    "an own GPU in a mask that others have, too": (
        1, 2, named("16-31", "24-47"), own(3, on_node=2), {"allowed": "24-47", "visible": (3,)},
        3, "24-31", "gpus-unknown",
    ),
    "several own GPUs: the first": (
        1, 2, COMMON, own(4, 5, named="2-5", on_node=4), {"visible": (4, 5)},
        4, "112-119,240-247", "",
    ),
    "all GPUs need no names": (
        0, 8, COMMON, own(3, on_node=8), {"visible": (3,), "hidden": True}, 0, "24-31,152-159", "",
    ),
    "several ranks on each GPU": (
        2, 4, COMMON, own(1, named="0-1", on_node=2), {"visible": (1,)},
        1, "56-63,184-191", "gpus-unknown",
    ),
    "several ranks may be on one GPU": (  # --gpu-bind=map_gpu:2,2
        0, 2, COMMON, own(2, named="2-3", on_node=2, shared=True), {"visible": (2,)},
        2, "16-23,144-151", "gpus-unknown",
    ),
    # partition="machine": what is inside the domain of one's GPU is one's own.
    "a domain that several ranks may have": (
        1, 2, COMMON, own(2, named="2-3", on_node=2, shared=True), {"visible": (2,), **MACHINE},
        2, "16-23,144-151", "gpus-unknown",
    ),
    "a whole domain": (
        1, 8, UNKNOWN, None, {"allowed": BORDER_1, **MACHINE}, 1, "56-63,184-191", "",
    ),
    "a part of a domain": (
        1, 8, UNKNOWN, None, {"allowed": "56-63,184-191", **MACHINE},
        1, "56-63,184-191", "border-unused masks-unknown",
    ),
    "a claimed GPU": (
        11, 16, COMMON, own(claimed=True), {"visible": (2,), **MACHINE}, 2, "16-23,144-151", "",
    ),
    "a claimed GPU and unknown masks": (
        11, 16, UNKNOWN, own(claimed=True), {"visible": (2,), **MACHINE}, 2, "16-23,144-151", "",
    ),
    "a claimed GPU without its domain": (
        11, 16, COMMON, own(claimed=True), {"allowed": "16-23", "visible": (2,), **MACHINE},
        2, "16-23", "border-unused gpus-unknown",
    ),
    "an own GPU's domain": (
        3, 4, COMMON, own(on_node=4), {"visible": (2,), **MACHINE}, 2, "16-23,144-151", "",
    ),
    "more ranks than GPUs of their own": (
        3, 8, COMMON, own(named="0-3"), {"visible": (2,), **MACHINE},
        2, "16-23,144-151", "gpus-unknown",
    ),
}  # fmt: skip


@pytest.mark.case("A23", "B13", "B14", "D10", "F8")
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_rank_that_plans_for_itself(row: Row) -> None:
    rank, size, masks, gpus, given, gpu, cpus, warnings = row
    plan = planned(rank, size, masks, gpus, **given)
    share = only_share(plan, rank)
    assert (share.gpu, share.cpus) == (gpu, parse_cpulist(cpus))
    noted = {"border-unused", "gpus-unknown", "masks-unknown"} & {*codes(plan)}
    assert noted == set(warnings.split())
    is_inside = "partition" in given and "border-unused" not in noted
    assert plan.partition == ("machine" if is_inside else "job")


def test_common_masks_are_shared_out() -> None:
    assert planned(3, 8) == plan_with(A100, Options.of(8))
    plan = planned(1, 2, UNKNOWN, visible=())
    assert codes(plan) == ["no-gpu"], "without GPUs nothing is cut whatever the masks"
    assert plan.share_of(1).cpus == A100.allowed


def test_unknown_masks_are_said_with_the_remedy() -> None:
    plan = planned(1, 2, UNKNOWN._replace(unbound="torchrun plainly"), allowed="58-63")
    for part in ("its parent may use CPUs 0-255", "58-63", "unbound (torchrun plainly)"):
        assert part in message(plan, "masks-unknown")


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


def test_remarks_about_a_rank_follow_it() -> None:
    """Of the CPUs near GPU 3 none is allowed; that is left to the rank that is on it."""

    def ranks(plan: Plan) -> list[int | None]:
        return [notice.rank for notice in plan.warnings if notice.code == "near-not-allowed"]

    assert ranks(planned(3, 8, UNKNOWN, allowed="0-15")) == [3]
    for rank, gpu in enumerate((3, 0)):
        gpus = own(gpu, named="0,3", on_node=2)
        plan = planned(rank, 2, COMMON, gpus, allowed="48-63", visible=(gpu,))
        assert ranks(plan) == ([0] if gpu == 3 else [])


# A share that is there already.


def inside_share(share: Pinned, **options: Any) -> Share:
    """What rank 3 of 8 has that was started with this share."""
    machine, ranks = A100.with_allowed(share.cpus), Ranks(local_rank=3, local_size=8)
    return only_share(plan_inside_share(machine, Options.of(8, **options), ranks, None, share), 3)


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


@pytest.mark.case("B19", "A17")
def test_named_masks_are_cut_among_those_that_have_them() -> None:
    """In every rank the same plan, each share inside the rank's own mask."""
    sets = ("56-63,184-191", "48-55,176-183", "16-31,144-159", "16-31,144-159")
    plans = [
        planned(rank, 4, named(*sets), allowed=mine, visible=(0, 1, 2, 3))
        for rank, mine in enumerate(sets)
    ]
    expected = ("56-63,184-191", "48-55,176-183", "16-23,144-151", "24-31,152-159")
    assert {tuple(share.cpus for share in plan.shares) for plan in plans} == {
        tuple(map(parse_cpulist, expected))
    }


def test_sets_that_the_caller_gives() -> None:
    sets = ["48-55", "56-63"]
    plan = planned(1, 2, allowed="58-70", rank_allowed=sets)
    assert plan.share_of(1).cpus == parse_cpulist("58-63")
    assert "56-57" in message(plan, "mask-cut")
    assert "mask-cut" not in codes(planned(1, 2, allowed="48-63", rank_allowed=sets))
    assert "mask-cut" not in codes(planned(1, 2, named(*sets), allowed="58-63")), "a launcher's"
    for masks in (UNKNOWN, named("0-1", "2-3")):  # the caller knows better
        plan = planned(0, 2, masks, allowed="48-55", rank_allowed=["48-51", "52-55"])
        assert "masks-unknown" not in codes(plan)
    with pytest.raises(GPUAffinityError, match=r"rank 1 the CPUs 4-7.*48-51 only"):
        planned(1, 2, allowed="48-51", rank_allowed=["0-3", "4-7"])


# GPUs of one's own.


@given(st.permutations(range(8)), st.integers(2, 8), st.booleans())
@pytest.mark.case("D10")
def test_own_parts_are_disjoint_and_near(order: list[int], count: int, hidden: bool) -> None:
    """As if every rank saw all of the job's GPUs, whichever rank has which."""
    job = frozenset(order[:count])
    is_crowded = any(gpu ^ 1 in job for gpu in job)  # GPU 2i and 2i + 1 share cores
    parts: list[CpuSet] = []
    for rank, gpu in enumerate(order[:count]):
        gpus = OwnGpus(named=tuple(sorted(job)), own=(gpu,), on_node=count)
        plan = planned(rank, count, COMMON, gpus, visible=(gpu,), hidden=hidden)
        share = only_share(plan, rank)
        assert share.cpus <= (A100.gpu_by_index[gpu].node_cpus or frozenset())
        assert share.gpu == (0 if hidden else gpu), "as this rank's driver counts"
        assert "gpus-unknown" not in codes(plan)
        assert len(share.cpus) == (16 if is_crowded else 32)
        parts.append(share.cpus)
    assert sum(map(len, parts)) == len(frozenset().union(*parts))


def test_every_rank_has_the_same_description() -> None:
    """Where the driver knows what sysfs does not, but only of the rank's own GPU."""
    vague = tuple(g._replace(node_cpus=None, local_cpus=None, numa_node=None) for g in BUS)
    shares = []
    for gpu in range(4):
        gpus = own(gpu, named="0-3", on_node=4)
        plan = planned(gpu, 4, COMMON, gpus, visible=(gpu,), hidden=True, bus=vague)
        shares.append(only_share(plan, gpu).cpus)
    assert sum(map(len, shares)) == len(frozenset().union(*shares)) == 256


WITHOUT_ADDRESSES = A100._replace(gpus=tuple(g._replace(pci_bus_id=None) for g in A100.gpus))
LOST = A100._replace(gpus=(Gpu(index=0), *A100.gpus[1:]))
"""Sysfs has lost GPU 0 too: the scheduler's 2 and 3 would be those that are left."""


@pytest.mark.parametrize(
    ("gpus", "machine", "bus"),
    [
        pytest.param(own(3, on_node=2), A100, BUS, id="not named"),
        pytest.param(own(3, named="0-1", on_node=2), A100, BUS, id="without it"),
        pytest.param(own(3, named="3,8", on_node=2), A100, BUS, id="too many"),
        pytest.param(own(2, named="2-3", on_node=2), A100, BUS, id="other numbers"),
        pytest.param(own(3, named="2-3"), WITHOUT_ADDRESSES, (), id="no address"),
        pytest.param(own(named="2-3", on_node=2), LOST, BUS[1:], id="a lost GPU"),
    ],
)
def test_names_that_do_not_help(gpus: OwnGpus, machine: Topology, bus: Sequence[Gpu]) -> None:
    plan = planned(1, 2, COMMON, gpus, visible=(3,), machine=machine, bus=bus)
    share = only_share(plan, 1)
    assert (share.gpu, share.cpus) == (3, parse_cpulist("16-31,144-159"))
    assert "GPU 3" in message(plan, "gpus-unknown")
    assert plan.warnings[-1].rank == 1


def test_the_remedy_is_for_what_has_shown_one_gpu() -> None:
    """A launcher, or the rank's own claim, where its domain is not known."""
    remedies = {"srun --gpus-per-node": own(on_node=2), "gpuaff run -n 2": own(claimed=True)}
    for remedy, gpus in remedies.items():
        assert remedy in message(planned(1, 2, COMMON, gpus, visible=(2,)), "gpus-unknown")


def test_one_gpu_that_is_no_ranks_own_is_shared_and_may_be_a_wrappers_work() -> None:
    shares = [planned(rank, 2, visible=(3,)).share_of(rank).cpus for rank in (0, 1)]
    assert shares == [parse_cpulist("16-23,144-151"), parse_cpulist("24-31,152-159")]
    for masks in (COMMON, named("0-255", "0-255")):
        plan = planned(1, 2, masks, visible=(3,))
        assert message(plan, "one-gpu").startswith("2 ranks see one GPU and")
    harmless = {
        "the others are hidden from the driver": planned(1, 2, visible=(3,), hidden=True),
        "one rank": planned(0, 1, visible=(3,)),
        "two GPUs": planned(0, 4, visible=(2, 3)),
        "nothing is cut": planned(1, 2, UNKNOWN, visible=(3,)),
    }
    assert [why for why, plan in harmless.items() if "one-gpu" in codes(plan)] == []


def test_ranks_on_one_gpu_cut_its_domain() -> None:
    """Of 16 ranks 1 and 9 are on GPU 1: four of its eight near cores each."""
    for rank, part in ((1, "56-59,184-187"), (9, "60-63,188-191")):
        plan = planned(rank, 16, UNKNOWN, partition="machine")
        assert only_share(plan, rank).cpus == parse_cpulist(part)
    with pytest.raises(GPUAffinityError, match="rank 1 on GPU 1"):
        planned(9, 16, UNKNOWN, partition="machine", min_physical_cores=7)
