"""What holds for every machine, mask and question."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gpuaff.allocator.model import Plan
from gpuaff.allocator.plan import plan
from gpuaff.cpuset import CpuSet
from gpuaff.errors import GPUAffinityError
from gpuaff.topology.model import Source, Topology
from tests.allocator.random_machines import MODES, SCOPES, UNIQUE, any_machine, shuffled

NPROC = st.integers(1, 7)
QUESTIONS = st.fixed_dictionaries(
    {
        "mode": st.sampled_from(MODES),
        "scope": st.sampled_from(SCOPES),
        "balanced": st.booleans(),
    }
)
UNIQUE_QUESTIONS = st.fixed_dictionaries(
    {
        "mode": st.sampled_from(UNIQUE),
        "scope": st.sampled_from(SCOPES),
        "balanced": st.booleans(),
    }
)


def everyone_has_their_own(found: Plan) -> bool:
    return all(warning.code != "too-few-cores" for warning in found.warnings)


def cores_of(machine: Topology) -> list[CpuSet]:
    """The allowed siblings of each core."""
    cores = machine.cores or [frozenset((cpu,)) for cpu in machine.allowed]
    return [core & machine.allowed for core in cores if core & machine.allowed]


@given(any_machine(), NPROC, QUESTIONS)
def test_shares_are_inside_the_allowed_set(
    machine: Topology, nproc: int, question: dict[str, Any]
) -> None:
    found = plan(machine, nproc, **question)
    assert [share.rank for share in found.shares] == list(range(nproc))
    for share in found.shares:
        assert share.gpu == machine.visible[share.rank % len(machine.visible)]
        assert share.cpus
        assert share.cpus <= machine.allowed


@given(any_machine(), NPROC, UNIQUE_QUESTIONS)
def test_unique_shares_are_disjoint(
    machine: Topology, nproc: int, question: dict[str, Any]
) -> None:
    found = plan(machine, nproc, **question)
    together = frozenset().union(*(share.cpus for share in found.shares))
    if everyone_has_their_own(found):
        assert sum(len(share.cpus) for share in found.shares) == len(together)


@given(any_machine(), NPROC, QUESTIONS)
def test_too_few_cores_is_said_if_and_only_if_shares_meet(
    machine: Topology, nproc: int, question: dict[str, Any]
) -> None:
    found = plan(machine, nproc, **question)
    given_out = [cpu for share in found.shares for cpu in share.cpus]
    assert everyone_has_their_own(found) or len(set(given_out)) < len(given_out)


@given(any_machine(), NPROC, st.sampled_from(UNIQUE), st.sampled_from(SCOPES))
def test_balanced_shares_are_equal(machine: Topology, nproc: int, mode: str, scope: str) -> None:
    found = plan(machine, nproc, mode=mode, scope=scope)
    if everyone_has_their_own(found):
        assert len({share.cores for share in found.shares}) == 1


@given(any_machine(), NPROC, QUESTIONS)
def test_a_cores_siblings_are_never_split(
    machine: Topology, nproc: int, question: dict[str, Any]
) -> None:
    for share in plan(machine, nproc, **question).shares:
        held = [core for core in cores_of(machine) if core & share.cpus]
        assert frozenset().union(*held) == share.cpus
        assert len(held) == share.cores


@given(any_machine(), NPROC, QUESTIONS)
def test_single_logical_is_the_lowest_of_each_core(
    machine: Topology, nproc: int, question: dict[str, Any]
) -> None:
    every = plan(machine, nproc, **question)
    single = plan(machine, nproc, multithreading="single_logical", **question)
    for share, narrow in zip(every.shares, single.shares, strict=True):
        held = [core for core in cores_of(machine) if core & share.cpus]
        assert narrow.cpus == frozenset(map(min, held))
        assert narrow.cores == share.cores


@given(any_machine(), NPROC, QUESTIONS)
def test_the_plan_does_not_hang_on_how_the_machine_is_told(
    machine: Topology, nproc: int, question: dict[str, Any]
) -> None:
    assert plan(machine, nproc, **question) == plan(shuffled(machine), nproc, **question)


@given(any_machine(), NPROC, QUESTIONS)
def test_planning_again_inside_a_share_keeps_it(
    machine: Topology, nproc: int, question: dict[str, Any]
) -> None:
    for share in plan(machine, nproc, **question).shares:
        assume(share.source is not Source.NEAREST or question["scope"] == "node")
        seat = machine.visible.index(share.gpu if share.gpu is not None else -1)
        alone = Topology(
            **{
                **{name: getattr(machine, name) for name in machine.__dataclass_fields__},
                "allowed": share.cpus,
                "visible": machine.visible[seat : seat + 1],
            }
        )
        assert plan(alone, 1, **question).shares[0].cpus == share.cpus


@given(any_machine(), NPROC, QUESTIONS, st.integers(1, 5))
def test_max_trims_every_share(
    machine: Topology, nproc: int, question: dict[str, Any], most: int
) -> None:
    assume(not question["mode"].startswith("single"))
    every = plan(machine, nproc, **question)
    trimmed = plan(machine, nproc, max_physical_cores=most, **question)
    for share, short in zip(every.shares, trimmed.shares, strict=True):
        assert short.cpus <= share.cpus
        assert short.cores == min(most, share.cores)


@given(any_machine(), NPROC, UNIQUE_QUESTIONS, st.integers(1, 5))
def test_min_is_kept_or_refused(
    machine: Topology, nproc: int, question: dict[str, Any], least: int
) -> None:
    free = plan(machine, nproc, **question)
    assume(everyone_has_their_own(free))
    if all(share.cores >= least for share in free.shares):
        assert plan(machine, nproc, min_physical_cores=least, **question) == free
    else:
        with pytest.raises(GPUAffinityError, match=f"^requested min_physical_cores={least},"):
            plan(machine, nproc, min_physical_cores=least, **question)


@given(any_machine(), NPROC, st.sampled_from(SCOPES))
def test_unbalanced_interleaved_leaves_no_near_core_out(
    machine: Topology, nproc: int, scope: str
) -> None:
    near = plan(machine, nproc, mode="all", scope=scope)
    cut = plan(machine, nproc, mode="unique_interleaved", scope=scope, balanced=False)
    whole, given_out = (
        frozenset().union(*(share.cpus for share in found.shares)) for found in (near, cut)
    )
    assert given_out == whole


@given(any_machine(), NPROC, QUESTIONS)
def test_nodes_are_those_of_the_cpus(
    machine: Topology, nproc: int, question: dict[str, Any]
) -> None:
    for share in plan(machine, nproc, **question).shares:
        held = {node.id for node in machine.numa_nodes or () for cpu in node.cpus & share.cpus}
        assert set(share.numa_nodes) == held
