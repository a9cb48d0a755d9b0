"""The planner against the rules' second implementation, on random regular machines."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gpuaff.allocator.plan import plan
from gpuaff.topology.model import Topology
from tests.allocator import oracle
from tests.allocator.random_machines import MODES, SCOPES, regular

QUESTIONS = st.fixed_dictionaries(
    {
        "mode": st.sampled_from(MODES),
        "scope": st.sampled_from(SCOPES),
        "balanced": st.booleans(),
    }
)


@pytest.mark.case(*(f"gpu-affinity-rule-{number}" for number in range(1, 6)))
@given(
    machine=regular(),
    question=QUESTIONS,
    nproc=st.integers(1, 6),
    most=st.none() | st.integers(1, 4),
    single=st.booleans(),
)
def test_same_answer_core_for_core(
    machine: Topology, question: dict[str, Any], nproc: int, most: int | None, single: bool
) -> None:
    nproc = min(nproc, len(machine.visible))
    expected = oracle.shares(machine, nproc, most=most, single_logical=single, **question)
    assume(expected is not None)
    found = plan(
        machine,
        nproc,
        max_physical_cores=most,
        multithreading="single_logical" if single else "all_logical",
        **question,
    )
    assert [set(share.cpus) for share in found.shares] == expected
    assert "too-few-cores" not in [warning.code for warning in found.warnings]
