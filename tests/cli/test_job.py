"""What a call of ``gpuaff run`` means."""

from __future__ import annotations

import argparse
from itertools import combinations

import pytest

from gpuaff.cli.dispatch import build_parser
from gpuaff.cli.run import Job, settle
from gpuaff.errors import InvalidOptionError
from gpuaff.launch.ranks import Ranks

RANK = Ranks(local_rank=2, local_size=8)
NOTHING_SAID = {
    "n": 1,
    "gpus": None,
    "candidates": None,
    "wait": 0,
    "min_free_memory": None,
    "max_utilization": None,
    "pin": True,
}


def asked(*words: str) -> argparse.Namespace:
    return build_parser("run").parse_args(["run", *words])


class TestOutsideOfALauncher:
    def test_claims_one(self) -> None:
        assert settle(asked(), None) == Job(claim=NOTHING_SAID, pin=False)

    def test_claims_what_is_asked_for(self) -> None:
        words = "-n 4 --candidates 0-7 --wait 10m --min-free-memory 40G --max-utilization 5%"
        assert settle(asked(*words.split(), "--no-pin"), None).claim == {
            "n": 4,
            "gpus": None,
            "candidates": (0, 1, 2, 3, 4, 5, 6, 7),
            "wait": 600,
            "min_free_memory": 40 << 30,
            "max_utilization": 5,
            "pin": False,
        }

    def test_named_ones(self) -> None:
        claim = settle(asked("--gpus", "3,GPU-1"), None).claim
        assert claim == {**NOTHING_SAID, "gpus": (3, "GPU-1")}

    @pytest.mark.parametrize(
        ("words", "wait"),
        [([], 0), (["--wait"], None), (["--wait", "0"], 0), (["--wait=90"], 90)],
    )
    def test_waits(self, words: list[str], wait: float | None) -> None:
        assert settle(asked(*words), None).claim == {**NOTHING_SAID, "wait": wait}

    def test_as_many_as_granted(self) -> None:
        assert settle(asked("-n", "auto"), None).claim == {**NOTHING_SAID, "n": "auto"}

    def test_per_rank_is_the_only_rank(self) -> None:
        """A script that claims in each rank can also be tried without a launcher."""
        assert settle(asked("--per-rank", "-n", "1"), None) == Job(claim=NOTHING_SAID, pin=False)

    def test_pins_alone(self) -> None:
        assert settle(asked("--no-claim"), None) == Job(claim=None, pin=True)

    def test_does_nothing(self) -> None:
        assert settle(asked("--no-claim", "--no-pin"), None) == Job(claim=None, pin=False)


class TestInsideOfALauncher:
    @pytest.mark.parametrize("words", [[], ["--no-claim"], ["--wait", "0"]])
    def test_pins_the_rank(self, words: list[str]) -> None:
        assert settle(asked(*words), RANK) == Job(claim=None, pin=True)

    def test_does_nothing(self) -> None:
        assert settle(asked("--no-pin"), RANK) == Job(claim=None, pin=False)

    def test_claims_in_each_rank(self) -> None:
        job = settle(asked("--per-rank", "-n", "2"), RANK)
        assert job == Job(claim={**NOTHING_SAID, "n": 2}, pin=False)

    @pytest.mark.parametrize(
        "option",
        ["-n 4", "--gpus 1", "--candidates 0-3", "--wait", "--wait 5", "--max-utilization 0"],
    )
    def test_would_claim_in_each_by_mistake(self, option: str) -> None:
        with pytest.raises(InvalidOptionError, match="this is rank 2 of 8") as caught:
            settle(asked(*option.split()), RANK)
        assert "--per-rank" in str(caught.value)

    def test_the_way_out_is_shown(self) -> None:
        with pytest.raises(InvalidOptionError, match=r"gpuaff run -n 4 -- torchrun"):
            settle(asked("-n", "4"), RANK)
        with pytest.raises(InvalidOptionError, match=r"gpuaff run --gpus 0,2 -- torchrun"):
            settle(asked("--gpus", "0,2"), RANK)
        with pytest.raises(InvalidOptionError, match=r"gpuaff run --wait -- torchrun"):
            settle(asked("--wait"), RANK)

    def test_ranks_cannot_all_have_the_same(self) -> None:
        with pytest.raises(InvalidOptionError, match="--candidates instead"):
            settle(asked("--per-rank", "--gpus", "0"), RANK)
        only = Ranks(local_rank=0, local_size=1)
        claim = settle(asked("--per-rank", "--gpus", "0"), only).claim
        assert claim == {**NOTHING_SAID, "gpus": (0,)}


def test_no_claim_takes_no_word_about_one() -> None:
    words = [["-n", "1"], ["--candidates", "0"], ["--wait"], ["--max-utilization", "0"]]
    words += [["--min-free-memory", "0"], ["--per-rank"]]
    for some in combinations(words, 2):
        for ranks in (None, RANK):
            with pytest.raises(InvalidOptionError, match="no --no-claim beside it"):
                settle(asked("--no-claim", *some[0], *some[1]), ranks)
