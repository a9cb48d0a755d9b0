"""torchrun with four processes, on two CPUs with two GPUs near each."""

from __future__ import annotations

import pytest

from tests.schedulers.jobs import FIRST, GPUAFF, SECOND, Stage, by

TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node", "4")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.fake_driver,
    pytest.mark.needs("torch", "torchrun", "two-cpus"),
]


@pytest.mark.case("B1", "B5")
def test_four_processes(stage: Stage) -> None:
    _, script, *words = stage.rank("pin")
    with stage.ranks(*TORCHRUN, script, *words, count=4) as ranks:
        ranks = by(ranks, "LOCAL_RANK")
        assert [rank.gpu for rank in ranks] == [0, 1, 2, 3]
        assert [rank.cpus for rank in ranks] == [FIRST, SECOND] * 2


def test_run_inside(stage: Stage) -> None:
    command = (*TORCHRUN, "--no-python", *GPUAFF, "--", *stage.rank())
    with stage.ranks(*command, count=4) as ranks:
        assert [rank.cpus for rank in by(ranks, "LOCAL_RANK")] == [FIRST, SECOND] * 2


@pytest.mark.parametrize("shown", ["0,1,2,3", "3,1,0,2"])
def test_what_was_granted_is_divided(stage: Stage, shown: str) -> None:
    _, script, *words = stage.rank("claim=auto", "pin")
    env = {"CUDA_VISIBLE_DEVICES": shown, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    with stage.ranks(*TORCHRUN, script, *words, count=4, env=env) as ranks:
        ranks = by(ranks, "LOCAL_RANK")
        assert [rank.claim for rank in ranks] == [[int(gpu)] for gpu in shown.split(",")]
        assert [rank.cpus for rank in ranks] == [
            (FIRST, SECOND)[rank.claim[0] % 2] for rank in ranks
        ]


def test_a_claim_around(stage: Stage) -> None:
    _, script, *words = stage.rank("claim=1")
    with stage.ranks(*GPUAFF, "-n", "4", "--", *TORCHRUN, script, *words, count=4) as ranks:
        assert sorted(rank.claim for rank in ranks) == [[0], [1], [2], [3]]
