"""gpu_affinity's recorded answers against ours; where they differ the data say why."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gpuaff.allocator.model import Plan
from gpuaff.allocator.plan import plan
from gpuaff.compat.gpu_affinity import refusal
from gpuaff.cpuset import format_cpulist
from gpuaff.errors import GPUAffinityError
from tests.compat.machines import CASES, OPTIONS, Case
from tests.compat.peer import TABLE, ask, recorded

REFUSED = "GPUAffinityError"

DIFFERENT: Mapping[str, Any] = json.loads(TABLE.with_name("differences.json").read_text("utf-8"))
"""Where our answers are others: why, and our answers ``by_hand`` to some of the questions;
``only``: to all others they are the same."""


def planned(case: Case, options: Mapping[str, Any]) -> Plan | None:
    """gpuaff's plan for a question as the drop-in asks it; None where gpuaff raises."""
    topology = case.machine.with_visible_devices(case.visible)
    try:
        return plan(topology, case.nproc, **{"min_physical_cores": 1, **options})
    except GPUAffinityError:
        return None


def answers(case: Case, question: str) -> list[str]:
    """Each rank's CPUs, or REFUSED."""
    found = planned(case, OPTIONS[question])
    if found is None:
        return [REFUSED] * case.nproc
    return [
        REFUSED if refusal(found, share.rank) else format_cpulist(share.cpus)
        for share in found.shares
    ]


def ours_for(theirs: str) -> str:
    """What we answer where they do so: their only error, where another one came through."""
    return REFUSED if theirs == "IndexError" else theirs


@pytest.mark.case("B7", "B11", "gpu-affinity-rule-1", "gpu-affinity-rule-2", "gpu-affinity-rule-3")
@pytest.mark.case("gpu-affinity-rule-4", "gpu-affinity-rule-5", "gpu-affinity-rule-6")
@pytest.mark.parametrize("called", CASES)
def test_the_answers_are_the_same_or_differ_for_a_reason(called: str) -> None:
    case, table, difference = CASES[called], recorded()[called], DIFFERENT.get(called)
    theirs = {question: [ours_for(one) for one in ranks] for question, ranks in table.items()}
    ours = {question: answers(case, question) for question in OPTIONS}
    differing = {question for question in OPTIONS if ours[question] != theirs[question]}
    if difference is None:
        assert not differing
        return
    by_hand = difference["by_hand"]
    assert differing
    assert not difference["only"] or differing == set(by_hand)
    assert {question: ours[question] for question in by_hand} == by_hand


def test_the_table_is_of_these_machines_and_questions() -> None:
    assert {called: set(rows) for called, rows in recorded().items()} == {
        called: set(OPTIONS) for called in CASES
    }
    assert set(DIFFERENT) <= set(CASES)


@pytest.mark.slow
@pytest.mark.fake_driver
@pytest.mark.needs("gpu_affinity")
@pytest.mark.parametrize("called", CASES)
def test_the_table_is_what_gpu_affinity_answers(called: str, tmp_path: Path) -> None:
    assert ask(CASES[called], tmp_path) == recorded()[called]
