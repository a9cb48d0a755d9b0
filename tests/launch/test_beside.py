"""Whether the ranks in use fit what launchers say of this node."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpuaff.launch.binding import consistency
from gpuaff.launch.ranks import Ranks
from gpuaff.notices import Notice
from tests.environments import FOLDER, started, variables

TORCHRUN = "TORCHELASTIC_RUN_ID=none LOCAL_RANK=1 LOCAL_WORLD_SIZE=2"
CASES: dict[str, Any] = json.loads((FOLDER.parent / "ranks_beside.json").read_text("utf-8"))
"""Variables, or where those of a second rank are recorded; the ranks in use; and the codes."""


def found(case: str) -> tuple[Notice, ...]:
    env: dict[str, str] = {}
    text, (rank, size), _ = CASES[case]
    for word in text.replace("TORCHRUN", TORCHRUN).split():
        launcher, is_record, name = word.partition("/")
        env |= started(launcher, name)[1].environ if is_record else variables(word)
        if launcher == "slurm":
            env["SLURM_PROCID"] = "1"
    return consistency(Ranks(local_rank=rank, local_size=size), env.get)


@pytest.mark.parametrize("case", CASES)
def test_ranks_and_launchers(case: str) -> None:
    _, (rank, _), codes = CASES[case]
    assert [(notice.code, notice.rank) for notice in found(case)] == [(one, rank) for one in codes]


def test_the_warning_names_both() -> None:
    (notice,) = found("another rank than torchrun's")
    assert "local_rank 0 of 2, but torchrun set LOCAL_RANK=1" in notice.message
    (notice,) = found("one beside mpirun's")
    assert "mpirun started 2 processes" in notice.message
