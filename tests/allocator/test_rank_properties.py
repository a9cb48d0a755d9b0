"""What holds for ranks with allowed sets of their own, on every machine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, combinations_with_replacement
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuaff.allocator.model import Plan
from gpuaff.allocator.plan import plan
from gpuaff.cpuset import CpuSet
from gpuaff.topology.model import Gpu, Source, Topology
from tests.allocator import oracle
from tests.allocator.described import codes, one_node, packed_cores, spread_cores, union
from tests.allocator.random_machines import MODES, SCOPES, UNIQUE, any_machine, shuffled, some_of

QUESTIONS = st.fixed_dictionaries(
    {
        "mode": st.sampled_from((*MODES, "core_complex")),
        "scope": st.sampled_from(SCOPES),
        "balanced": st.booleans(),
    }
)
UNIQUE_MODES = (*UNIQUE, "core_complex")


@st.composite
def masked(draw: st.DrawFn, *, whole: bool = False) -> tuple[Topology, list[CpuSet]]:
    """A machine, and a mask for each of some ranks; perhaps of whole cores only."""
    machine = draw(any_machine())
    nproc = draw(st.integers(1, 5))
    mask = some_of(machine.cpus)
    masks = draw(
        st.lists(mask, min_size=1, max_size=3).flatmap(
            lambda few: st.lists(st.sampled_from(few), min_size=nproc, max_size=nproc)
        )
    )
    if whole:
        masks = [union(core for core in cores_of(machine) if core & mask) for mask in masks]
    return machine, masks


def cores_of(machine: Topology) -> Sequence[CpuSet]:
    return machine.cores or [frozenset((cpu,)) for cpu in sorted(machine.cpus)]


def everyone_has_their_own(found: Plan) -> bool:
    return "too-few-cores" not in codes(found)


@given(masked(), QUESTIONS)
def test_nobody_leaves_its_mask(
    asked: tuple[Topology, list[CpuSet]], question: dict[str, Any]
) -> None:
    machine, masks = asked
    found = plan(machine, len(masks), rank_allowed=masks, **question)
    for share, mask in zip(found.shares, masks, strict=True):
        assert share.cpus
        assert share.cpus <= mask
        assert share.cores == sum(1 for core in cores_of(machine) if core & share.cpus)
        assert share.gpu == machine.visible[share.rank % len(machine.visible)]


@given(masked(), QUESTIONS)
def test_unique_shares_are_apart(
    asked: tuple[Topology, list[CpuSet]], question: dict[str, Any]
) -> None:
    machine, masks = asked
    found = plan(machine, len(masks), rank_allowed=masks, **question)
    if question["mode"] not in (*UNIQUE_MODES, "single_unique") or not everyone_has_their_own(
        found
    ):
        return
    for one, other in combinations(found.shares, 2):
        assert not one.cpus & other.cpus
        for core in cores_of(machine):
            if core <= masks[one.rank] & masks[other.rank]:
                assert not (core & one.cpus and core & other.cpus)


@settings(max_examples=50)
@given(masked(), QUESTIONS)
def test_too_few_cores_is_said_if_shares_meet(
    asked: tuple[Topology, list[CpuSet]], question: dict[str, Any]
) -> None:
    machine, masks = asked
    found = plan(machine, len(masks), rank_allowed=masks, **question)
    if question["mode"] in UNIQUE_MODES and not everyone_has_their_own(found):
        held = [cpu for share in found.shares for cpu in share.cpus]
        split = any(
            core & mask not in (core, frozenset()) for core in cores_of(machine) for mask in masks
        )
        assert len(held) > len(set(held)) or split


@given(masked(), st.sampled_from(UNIQUE_MODES), st.sampled_from(SCOPES))
def test_balanced_shares_are_equal(
    asked: tuple[Topology, list[CpuSet]], mode: str, scope: str
) -> None:
    machine, masks = asked
    found = plan(machine, len(masks), rank_allowed=masks, mode=mode, scope=scope)
    if everyone_has_their_own(found):
        assert len({share.cores for share in found.shares}) == 1


@settings(max_examples=50)
@given(masked(whole=True), QUESTIONS)
def test_masks_of_whole_cores_split_none(
    asked: tuple[Topology, list[CpuSet]], question: dict[str, Any]
) -> None:
    machine, masks = asked
    for share in plan(machine, len(masks), rank_allowed=masks, **question).shares:
        assert share.cpus == union(core for core in cores_of(machine) if core & share.cpus)


@settings(max_examples=50)
@given(masked(), QUESTIONS)
def test_equal_inputs_give_equal_plans(
    asked: tuple[Topology, list[CpuSet]], question: dict[str, Any]
) -> None:
    """However the machine is told, and in whatever order sets were made."""
    machine, masks = asked
    found = plan(machine, len(masks), rank_allowed=masks, **question)
    dice = random.Random(0)
    stirred = [dice.sample(sorted(mask), len(mask)) for mask in masks]
    again = plan(shuffled(machine), len(masks), rank_allowed=iter(stirred), **question)
    assert again == found


@settings(max_examples=50)
@given(any_machine(), st.integers(1, 6), QUESTIONS)
def test_one_mask_for_all_is_the_allowed_set(
    machine: Topology, nproc: int, question: dict[str, Any]
) -> None:
    plain = plan(machine, nproc, **question)
    named = plan(machine, nproc, rank_allowed=[machine.allowed] * nproc, **question)
    assert named.shares == plain.shares
    assert codes(named) == codes(plain)


@settings(max_examples=50)
@given(masked(), st.sampled_from(UNIQUE_MODES), st.booleans(), st.integers(1, 3))
def test_max_trims(
    asked: tuple[Topology, list[CpuSet]], mode: str, balanced: bool, most: int
) -> None:
    machine, masks = asked
    question: dict[str, Any] = {"mode": mode, "balanced": balanced, "rank_allowed": masks}
    every = plan(machine, len(masks), **question)
    trimmed = plan(machine, len(masks), max_physical_cores=most, **question)
    for share, short in zip(every.shares, trimmed.shares, strict=True):
        assert short.cpus <= share.cpus
        assert short.cores == min(most, share.cores)


@settings(max_examples=50)
@given(masked(), st.sampled_from(SCOPES))
def test_unbalanced_interleaved_leaves_nothing_out(
    asked: tuple[Topology, list[CpuSet]], scope: str
) -> None:
    machine, masks = asked
    near = plan(machine, len(masks), mode="all", scope=scope, rank_allowed=masks)
    cut = plan(
        machine,
        len(masks),
        mode="unique_interleaved",
        scope=scope,
        balanced=False,
        rank_allowed=masks,
    )
    assert union(share.cpus for share in cut.shares) == union(share.cpus for share in near.shares)


@pytest.mark.parametrize("smt", [1, 2])
@given(data=st.data())
def test_sizes_are_max_min_fair(smt: int, data: st.DataObject) -> None:
    """A GPU for each rank, near some cores; a mask of whole cores for each rank. A rank wants
    what is near of its mask, or all of it when none is. Every way to share is tried."""
    cores = spread_cores(data.draw(st.integers(1, 6)), smt=smt)
    ranks = data.draw(st.integers(1, 4))
    some = some_of(range(len(cores)))
    near, masks = (data.draw(st.lists(some, min_size=ranks, max_size=ranks)) for _ in range(2))
    machine = one_node(cores, gpus=ranks)
    gpus = tuple(
        Gpu(index=rank, node_cpus=union(cores[at] for at in near[rank]), source=Source.NVML)
        for rank in range(ranks)
    )
    machine = replace(machine, gpus=gpus, numa_nodes=None, packages=None)
    wanted = [mask & here or mask for mask, here in zip(masks, near, strict=True)]
    best = oracle.fair_sizes(wanted)
    allowed = [union(cores[at] for at in mask) for mask in masks]

    uneven = plan(machine, ranks, mode="unique_interleaved", balanced=False, rank_allowed=allowed)
    assert everyone_has_their_own(uneven) == (best[0] > 0)
    if best[0]:
        assert sorted(share.cores for share in uneven.shares) == best
        for mode in UNIQUE_MODES:
            even = plan(machine, ranks, mode=mode, rank_allowed=allowed)
            assert [share.cores for share in even.shares] == [best[0]] * ranks


def all_masks(ranks: int, cores: int) -> list[tuple[frozenset[int], ...]]:
    """Every choice of masks of so many cores, but for the order of ranks."""
    every = [
        frozenset(some) for size in range(1, cores + 1) for some in combinations(range(cores), size)
    ]
    return list(combinations_with_replacement(every, ranks))


def check_masks(ranks: int, cores: int) -> None:
    machine = one_node(spread_cores(cores, smt=1), gpus=ranks)
    for masks in all_masks(ranks, cores):
        best = oracle.fair_sizes(masks)
        found = plan(machine, ranks, mode="unique_interleaved", balanced=False, rank_allowed=masks)
        assert everyone_has_their_own(found) == (best[0] > 0)
        if best[0]:
            assert sorted(share.cores for share in found.shares) == best


@pytest.mark.parametrize(("ranks", "cores"), [(1, 4), (2, 4), (3, 3)])
def test_all_masks_on_small_machines(ranks: int, cores: int) -> None:
    check_masks(ranks, cores)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("ranks", "cores"), [(3, 5), (4, 4)])
def test_all_masks_on_larger_machines(ranks: int, cores: int) -> None:
    check_masks(ranks, cores)


@pytest.mark.parametrize("make", [spread_cores, packed_cores])
@given(data=st.data())
def test_masks_of_single_siblings(make: Any, data: st.DataObject) -> None:
    """Masks that are apart but split cores: each rank has all of its own, and nobody else's."""
    cores = make(4, 2)
    owner = data.draw(st.lists(st.integers(0, 2), min_size=8, max_size=8))
    masks = [frozenset(cpu for cpu in range(8) if owner[cpu] == rank) for rank in range(3)]
    masks = [mask for mask in masks if mask]
    machine = one_node(cores, gpus=3)
    found = plan(machine, len(masks), balanced=False, rank_allowed=masks)
    assert [share.cpus for share in found.shares] == masks
