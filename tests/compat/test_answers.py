"""gpu_affinity's recorded answers against ours; where they differ the reason stands here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gpuaff.allocator.model import Plan
from gpuaff.allocator.plan import plan
from gpuaff.compat.gpu_affinity import refusal
from gpuaff.cpuset import format_cpulist
from gpuaff.errors import GPUAffinityError
from tests.compat.machines import CASES, OPTIONS, Case
from tests.compat.peer import ask, recorded

REFUSED = "GPUAffinityError"
CONTIGUOUS = "mode=unique_contiguous scope=node"


@dataclass(frozen=True)
class Difference:
    """Where our answers are others.

    Attributes:
        why: the reason.
        by_hand: our answers to some of the questions.
        only: the only questions where they differ; empty: any.
    """

    why: str
    by_hand: Mapping[str, list[str]]
    only: frozenset[str] = field(default_factory=frozenset)


def _only(why: str, by_hand: Mapping[str, list[str]]) -> Difference:
    return Difference(why, by_hand, only=frozenset(by_hand))


DIFFERENT: Mapping[str, Difference] = {
    "four threads a core": Difference(
        "rule 6: cores of four threads are broken into pairs",
        {
            CONTIGUOUS: ["0-7", "8-15"],
            "mode=single scope=node": ["0-3", "0-3"],
            "mode=unique_interleaved scope=node": ["0-3,8-11", "4-7,12-15"],
            "mode=unique_contiguous multithreading=single_logical": ["0,4", "8,12"],
            "mode=unique_contiguous min_physical_cores=5": [REFUSED, REFUSED],
        },
    ),
    "overlapping": Difference(
        "rule 6: near sets that overlap are refused",
        {
            CONTIGUOUS: ["0-1", "2-3"],
            "mode=all scope=node": ["0-2", "1-3"],
            "mode=single scope=node": ["0", "1"],
            "mode=all min_physical_cores=5": [REFUSED, REFUSED],
        },
    ),
    "ids above the count": Difference(
        "rule 6: CPU ids above cpu_count are lost",
        {CONTIGUOUS: ["0-3", "64-67"], "mode=single_unique scope=node": ["0", "64"]},
    ),
    "no near CPU allowed": Difference(
        "rule 6: a mask that holds only some ranks' near CPUs is refused by all ranks",
        {
            "mode=all scope=node": ["0-55"] * 4 + [REFUSED] * 4,
            "mode=single scope=node": ["0"] * 4 + [REFUSED] * 4,
        },
    ),
    "visible: empty": Difference(
        "rule 6: an empty CUDA_VISIBLE_DEVICES hides every GPU", {CONTIGUOUS: [REFUSED]}
    ),
    "visible: doubled": Difference(
        "rule 6: CUDA does not start with a device named twice", {CONTIGUOUS: [REFUSED, REFUSED]}
    ),
    "uneven": _only(
        "rule 2: unbalanced blocks leave no core out",
        {
            # Ten cores for three GPUs: 4, 3 and 3.
            f"mode=unique_contiguous scope={scope} balanced=False": ["0-3", "4-6", "7-9", "10-13"]
            for scope in ("node", "socket")
        },
    ),
    "uneven deal": _only(
        "rule 4: every core is dealt, and what makes no full round goes to the smallest shares",
        {
            # Node cores 0-3 are dealt 4-7; 8 and 9 go to one GPU each.
            "mode=unique_contiguous scope=socket": ["0-1,4-5,8", "2-3,6-7,9"],
            "mode=unique_contiguous scope=socket balanced=False": ["0-1,4-5,8", "2-3,6-7,9"],
            "mode=unique_interleaved scope=socket": ["0,2,4,6,8", "1,3,5,7,9"],
            "mode=unique_interleaved scope=socket balanced=False": ["0,2,4,6,8", "1,3,5,7,9"],
        },
    ),
    "upper siblings": _only(
        "rule 1: cores are in order of their lowest CPU, allowed or not; gpu_affinity orders them "
        "otherwise when it trims in mode all",
        {
            # Cores (0,4) (1,5) (2,6) (3,7), of which 0 and 1 are not allowed.
            "mode=all max_physical_cores=1": ["4", "4"],
            "mode=all max_physical_cores=3 scope=socket": ["2,4-6", "2,4-6"],
        },
    ),
}


def planned(case: Case, options: Mapping[str, Any]) -> Plan | None:
    """gpuaff's plan for a question as the drop-in asks it; None where gpuaff raises."""
    topology = case.machine.with_visible_devices(case.visible)
    asked = {"min_physical_cores": 1, **options}
    if asked["min_physical_cores"] > asked.get("max_physical_cores", 1 << 15):
        most = asked.pop("max_physical_cores")
        if planned(case, asked) is None:
            return None
        asked = {**options, "min_physical_cores": 1, "max_physical_cores": most}
    try:
        return plan(topology, case.nproc, **asked)
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
    assert differing
    assert differing == (difference.only or differing)
    assert {question: ours[question] for question in difference.by_hand} == difference.by_hand


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
