"""What a call of ``gpuaff run`` means."""

from __future__ import annotations

from itertools import combinations

import pytest

from gpuaff.cli.dispatch import command_parser
from gpuaff.cli.run import Job, settle
from gpuaff.errors import InvalidOptionError
from gpuaff.launch.ranks import Ranks

RANK, ONLY_RANK = Ranks(local_rank=2, local_size=8), Ranks(local_rank=0, local_size=1)


def asked(words: str, here: Ranks | None = None) -> Job:
    return settle(command_parser("run").parse_args(words.split()), here)


CLAIMS: dict[str, dict[str, object]] = {
    "": {},
    "-n 4 --candidates 0-2 --wait 10m --min-free-memory 40G --max-utilization 5% --no-pin": {
        "n": 4,
        "candidates": (0, 1, 2),
        "wait": 600,
        "min_free_memory": 40 << 30,
        "max_utilization": 5,
        "pin": False,
    },
    "--gpus 3,GPU-1": {"gpus": (3, "GPU-1")},
    "--wait": {"wait": None},
    "--wait 0": {"wait": 0},
    "--wait=90": {"wait": 90},
    "-n auto": {"n": "auto"},
    "--per-rank -n 1": {},  # a script that claims in each rank can be tried without a launcher
}


@pytest.mark.parametrize("words", CLAIMS)
def test_outside_of_a_launcher_it_claims(words: str) -> None:
    assert asked(words) == Job(claim={"n": 1, "pin": True, **CLAIMS[words]}, pin=False)


@pytest.mark.parametrize(
    ("words", "here", "pin"),
    [
        ("--no-claim", None, True),
        ("--no-claim --no-pin", None, False),
        ("", RANK, True),
        ("--no-claim", RANK, True),
        ("--no-pin", RANK, False),
    ],
)
def test_it_claims_nothing(words: str, here: Ranks | None, pin: bool) -> None:
    assert asked(words, here) == Job(claim=None, pin=pin)


def test_each_rank_claims_on_request() -> None:
    assert asked("--per-rank -n 2", RANK) == Job(claim={"n": 2, "pin": True}, pin=False)
    assert asked("--per-rank --gpus 0", ONLY_RANK).claim == {"n": 1, "gpus": (0,), "pin": True}
    with pytest.raises(InvalidOptionError, match="--candidates instead"):
        asked("--per-rank --gpus 0", RANK)


@pytest.mark.parametrize(
    "option",
    [
        *("-n 4", "--gpus 0,2", "--candidates 0-3", "--wait", "--wait 0.0", "--wait 5.0"),
        *("--max-utilization 0", "--min-free-memory 1"),
    ],
)
def test_no_rank_claims_by_mistake(option: str) -> None:
    """The way out is shown."""
    shown = option.replace("0-3", "0,1,2,3")
    with pytest.raises(InvalidOptionError, match="--per-rank beside it: this is rank 2 of 8") as it:
        asked(option, RANK)
    assert f"gpuaff run {shown} -- torchrun" in str(it.value)


def test_no_claim_takes_no_word_about_one() -> None:
    words = ["-n 1", "--candidates 0", "--wait", "--max-utilization 0", "--min-free-memory 0"]
    for some in combinations([*words, "--per-rank"], 2):
        for here in (None, RANK):
            with pytest.raises(InvalidOptionError, match="no --no-claim beside it"):
                asked(f"--no-claim {' '.join(some)}", here)
