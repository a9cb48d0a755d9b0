"""What holds for every machine, mask and question."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations, combinations_with_replacement
from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gpuaff.allocator.cores import allowed_cores
from gpuaff.allocator.model import Plan
from gpuaff.allocator.plan import plan
from gpuaff.cpuset import CpuSet
from gpuaff.errors import GPUAffinityError
from gpuaff.topology.model import Gpu, Source, Topology
from gpuaff.topology.serialize import machine_names
from tests.allocator import oracle
from tests.allocator.described import codes, one_node, spread_cores, union
from tests.allocator.random_machines import MODES, SCOPES, any_machine, regular, shuffled, some_of

UNIQUE = ("unique_interleaved", "unique_contiguous", "core_complex")
SMALL = ((1, 4), (2, 4), (3, 3))
LARGER = [
    pytest.param(*sizes, marks=[pytest.mark.slow, pytest.mark.timeout(600)])
    for sizes in ((3, 5), (4, 4))
]
LIMITS = st.integers(1, 4)


class Job(NamedTuple):
    """A question: a machine, the CPUs that each rank may use, and options."""

    machine: Topology
    masks: Sequence[CpuSet]
    options: dict[str, Any]

    def plan(self, machine: Topology | None = None, **more: Any) -> Plan:
        asked = {**self.options, **more}
        return plan(machine or self.machine, len(self.masks), **asked)

    @property
    def cores(self) -> Sequence[CpuSet]:
        return self.machine.cores or [frozenset((cpu,)) for cpu in sorted(self.machine.cpus)]


@st.composite
def with_l3(draw: st.DrawFn, machine: Topology) -> Topology:
    cores = machine.cores or tuple(frozenset((cpu,)) for cpu in sorted(machine.cpus))
    domains = [draw(st.integers(0, 4)) for _ in cores]
    parts = [
        union(core for core, own in zip(cores, domains, strict=True) if own == at)
        for at in range(5)
    ]
    return machine._replace(l3=tuple(sorted(filter(None, parts), key=min)))


@st.composite
def jobs(
    draw: st.DrawFn, *, modes: Sequence[str] = (*MODES, "core_complex"), masked: bool | None = None
) -> Job:
    """Ranks that may all use the same CPUs, or have masks of their own."""
    machine = draw(any_machine())
    if draw(st.booleans()):
        machine = draw(with_l3(machine))
    nproc = draw(st.integers(1, 6))
    options: dict[str, Any] = {
        "mode": draw(st.sampled_from(modes)),
        "scope": draw(st.sampled_from(SCOPES)),
        "balanced": draw(st.booleans()),
    }
    if not (draw(st.booleans()) if masked is None else masked):
        return Job(machine, [machine.allowed & machine.cpus] * nproc, options)
    few = draw(st.lists(some_of(machine.cpus), min_size=1, max_size=3))
    if draw(st.booleans()):  # whole cores, which is what schedulers give
        known = Job(machine, [], {}).cores
        few = [union(core for core in known if core & mask) for mask in few]
    masks = draw(st.lists(st.sampled_from(few), min_size=nproc, max_size=nproc))
    return Job(machine, masks, {**options, "rank_allowed": masks})


def each_has_its_own(found: Plan) -> bool:
    return "too-few-cores" not in codes(found)


@settings(max_examples=100)
@given(jobs())
def test_shares_are_whole_cores_inside_the_masks_and_apart(job: Job) -> None:
    found = job.plan()
    assert [share.rank for share in found.shares] == list(range(len(job.masks)))
    for share, mask in zip(found.shares, job.masks, strict=True):
        assert share.gpu == job.machine.visible[share.rank % len(job.machine.visible)]
        assert share.cpus, "no share is empty"
        assert share.cpus <= mask
        held = [core for core in job.cores if core & share.cpus]
        assert share.cores == len(held)
        if all(core & other in (frozenset(), core & mask) for core in held for other in job.masks):
            assert share.cpus == union(core & mask for core in held), "siblings stay together"
        nodes = job.machine.numa_nodes or ()
        assert share.numa_nodes == tuple(node.id for node in nodes if node.cpus & share.cpus)
    if job.options["mode"] in (*UNIQUE, "single_unique") and each_has_its_own(found):
        assert_apart(job, found)
    if job.options["mode"] in UNIQUE and job.options["balanced"] and each_has_its_own(found):
        assert len({share.cores for share in found.shares}) == 1, "balanced"


def assert_apart(job: Job, found: Plan) -> None:
    for one, other in combinations(found.shares, 2):
        assert not one.cpus & other.cpus
        for core in job.cores:
            if core <= job.masks[one.rank] & job.masks[other.rank]:
                assert not (core & one.cpus and core & other.cpus)


@given(jobs())
def test_single_logical_is_the_lowest_of_each_core(job: Job) -> None:
    every, single = job.plan(), job.plan(multithreading="single_logical")
    for share, narrow in zip(every.shares, single.shares, strict=True):
        held = [core & share.cpus for core in job.cores if core & share.cpus]
        assert narrow.cpus == frozenset(map(min, held))
        assert narrow.cores == share.cores


@given(jobs())
def test_equal_inputs_give_equal_plans_in_whatever_order_they_come(job: Job) -> None:
    dice, more = Random(0), dict[str, Any]()
    if "rank_allowed" in job.options:
        stirred = [dice.sample(sorted(mask), len(mask)) for mask in job.masks]
        more["rank_allowed"] = iter(stirred)
    assert job.plan(shuffled(job.machine), **more) == job.plan()


@given(jobs(masked=False))
def test_one_mask_for_all_is_the_allowed_set(job: Job) -> None:
    named = job.plan(rank_allowed=[job.machine.allowed] * len(job.masks))
    assert named.shares == job.plan().shares
    assert codes(named) == codes(job.plan())


@pytest.mark.case("B11")
@given(jobs(masked=False), st.data())
def test_chosen_cpus_are_as_if_only_these_were_allowed(job: Job, data: st.DataObject) -> None:
    few = data.draw(some_of(job.machine.allowed & job.machine.cpus))
    narrow = job.plan(job.machine.with_allowed(few))
    assert job.plan(cpus=few).shares == narrow.shares


@given(jobs(masked=False, modes=MODES))
def test_planning_again_inside_a_share_keeps_it(job: Job) -> None:
    for share in job.plan().shares:
        assume(share.source is not Source.NEAREST or job.options["scope"] == "node")
        seat = job.machine.visible.index(share.gpu if share.gpu is not None else -1)
        visible = job.machine.visible[seat : seat + 1]
        alone = job.machine._replace(allowed=share.cpus, visible=visible)
        assert plan(alone, 1, **job.options).shares[0].cpus == share.cpus


@given(jobs(modes=("all", *UNIQUE)), LIMITS)
def test_max_trims_every_share(job: Job, most: int) -> None:
    trimmed = job.plan(max_physical_cores=most)
    for share, short in zip(job.plan().shares, trimmed.shares, strict=True):
        assert short.cpus <= share.cpus
        assert short.cores == min(most, share.cores)


@given(jobs(modes=UNIQUE), LIMITS)
def test_min_is_kept_or_refused(job: Job, least: int) -> None:
    free = job.plan()
    assume(each_has_its_own(free))
    if all(share.cores >= least for share in free.shares):
        assert job.plan(min_physical_cores=least) == free
    else:
        with pytest.raises(GPUAffinityError, match=f"^requested min_physical_cores={least},"):
            job.plan(min_physical_cores=least)


@given(jobs(modes=UNIQUE))
def test_unbalanced_leaves_no_near_core_out(job: Job) -> None:
    assume(job.options["mode"] == "unique_interleaved" or "rank_allowed" not in job.options)
    near, cut = job.plan(mode="all"), job.plan(balanced=False)
    assert union(share.cpus for share in cut.shares) == union(share.cpus for share in near.shares)


@given(jobs())
def test_no_balanced_share_is_smaller_than_all_unbalanced_ones(job: Job) -> None:
    even, uneven = (
        min(share.cores for share in job.plan(balanced=balanced).shares)
        for balanced in (True, False)
    )
    assert even >= uneven


@given(jobs(masked=False))
def test_core_complex_shares_are_as_large_as_contiguous_ones(job: Job) -> None:
    machine = job.machine if job.machine.l3 else job.machine._replace(l3=(job.machine.cpus,))
    plain = job.plan(machine, mode="unique_contiguous")
    found = job.plan(machine, mode="core_complex")
    assert [share.cores for share in found.shares] == [share.cores for share in plain.shares]
    assert codes(found) == codes(plain)


@given(
    st.one_of(regular(), st.sampled_from(machine_names()).map(Topology.named)),
    st.integers(1, 40),
    st.sampled_from(UNIQUE),
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
    found = plan(machine, nproc, mode=mode, scope=scope)
    assert min(share.cores for share in found.shares) == min(sizes)


@pytest.mark.case("G5")
@given(
    kinds=st.lists(st.booleans(), min_size=1, max_size=24),
    gpus=st.integers(1, 4),
    ranks=st.integers(1, 9),
    mode=st.sampled_from(UNIQUE),
    scope=st.sampled_from(SCOPES),
    balanced=st.booleans(),
)
def test_shares_have_an_even_part_of_fast_and_of_slow_cores(
    kinds: list[bool], gpus: int, ranks: int, mode: str, scope: str, balanced: bool
) -> None:
    cores = [frozenset((cpu,)) for cpu in range(len(kinds))]
    slow = frozenset(cpu for cpu, is_slow in enumerate(kinds) if is_slow)
    machine = one_node(cores, gpus)._replace(efficiency_cpus=slow)
    fast = len(kinds) - len(slow)
    for share in plan(machine, ranks, mode=mode, scope=scope, balanced=balanced).shares:
        if balanced:
            assert share.cores >= fast // ranks + len(slow) // ranks
            assert len(share.cpus - slow) >= fast // ranks
        assert share.cpus - slow or fast < ranks, "a fast core for each, if there are enough"


@pytest.mark.case("B10")
@given(jobs(masked=False), st.integers(1, 3))
def test_what_is_reserved_is_the_end_of_a_part_and_in_no_share(job: Job, count: int) -> None:
    whole, unique = job.plan(), job.options["mode"] in UNIQUE
    part_of = {share.rank: share for share in whole.shares}
    if unique and (
        not each_has_its_own(whole) or min(share.cores for share in whole.shares) <= count
    ):
        with pytest.raises(GPUAffinityError, match=f"^requested reserve={count},"):
            job.plan(reserve=count)
        return
    try:
        found = job.plan(reserve=count)
    except GPUAffinityError:
        assert not unique
        return
    taken = union(share.cpus for share in found.shares)
    near = job.plan(mode="all")
    for share in found.shares:
        assert not share.reserved & taken
        assert share.reserved <= near.shares[share.rank].cpus
        if unique:
            assert share.cpus | share.reserved == part_of[share.rank].cpus
            assert share.cores == part_of[share.rank].cores - count


@pytest.mark.parametrize("smt", [1, 2])
@given(data=st.data())
def test_sizes_are_max_min_fair(smt: int, data: st.DataObject) -> None:
    """A GPU for each rank, near some cores; a mask of whole cores for each rank. A rank wants
    what is near of its mask, or all of it when none is. Every way to share is tried."""
    cores = spread_cores(data.draw(st.integers(1, 6)), smt=smt)
    ranks = data.draw(st.integers(1, 4))
    some = some_of(range(len(cores)))
    near, masks = (data.draw(st.lists(some, min_size=ranks, max_size=ranks)) for _ in range(2))
    gpus = tuple(
        Gpu(index=rank, node_cpus=union(cores[at] for at in own), source=Source.NVML)
        for rank, own in enumerate(near)
    )
    known = one_node(cores, gpus=ranks)
    machine = known._replace(gpus=gpus, numa_nodes=None, packages=None)
    wanted = [mask & here or mask for mask, here in zip(masks, near, strict=True)]
    check_fair(machine, wanted, [union(cores[at] for at in mask) for mask in masks])


def check_fair(
    machine: Topology, wanted: Sequence[frozenset[int]], allowed: Sequence[CpuSet]
) -> None:
    best, ranks = oracle.fair_sizes(wanted), len(wanted)
    found = plan(machine, ranks, mode="unique_interleaved", balanced=False, rank_allowed=allowed)
    assert each_has_its_own(found) == (best[0] > 0)
    if best[0]:
        assert sorted(share.cores for share in found.shares) == best
        for mode in ("unique_interleaved", "unique_contiguous", "core_complex"):
            even = plan(machine, ranks, mode=mode, rank_allowed=allowed)
            assert [share.cores for share in even.shares] == [best[0]] * ranks


@pytest.mark.parametrize(("ranks", "cores"), [*SMALL, *LARGER])
def test_all_masks_on_small_machines(ranks: int, cores: int) -> None:
    """Every choice of masks, but for the order of ranks."""
    machine = one_node(spread_cores(cores, smt=1), gpus=ranks)
    every = [
        frozenset(some) for size in range(1, cores + 1) for some in combinations(range(cores), size)
    ]
    for masks in combinations_with_replacement(every, ranks):
        check_fair(machine, masks, masks)
