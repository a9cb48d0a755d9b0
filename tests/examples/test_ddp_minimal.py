"""``examples/ddp_minimal``: what each rank finds, and that a set-up that doesn't fit is refused."""

from __future__ import annotations

import re

import pytest

from example_runs import node, run_example, table
from fakedriver.driver import FakeDriver
from processes import CPUS

SCRIPT = "ddp_minimal/ddp_minimal.py"

pytestmark = [
    pytest.mark.fake_driver,
    pytest.mark.needs("torch", "two-cpus"),
    pytest.mark.timeout(120),
]


@pytest.mark.slow
@pytest.mark.needs("torchrun")
def test_two_ranks_find_their_gpus_and_cpus(driver: FakeDriver) -> None:
    done = run_example(SCRIPT, env=driver.env(), torchrun=node(2))
    assert "2 ranks on 1 node(s) by gloo; each node: 2 GPUs promised, 2 visible" in done.stdout
    first, second = table(done.stdout, "rank")
    assert [first["rank"], second["rank"]] == ["0", "1"]
    assert [first["GPU"], second["GPU"]] == ["0", "1"]
    assert first["CPUs"] != second["CPUs"]
    if len(CPUS) == 2:
        assert {first["CPUs"], second["CPUs"]} == {str(cpu) for cpu in CPUS}
    assert first["forward"] == second["forward"], "DDP gave both the weights of rank 0"
    assert "forward pass: the same on all ranks" in done.stdout


@pytest.mark.slow
def test_a_task_that_does_not_see_all_gpus_of_its_node_is_told(driver: FakeDriver) -> None:
    """As with ``--gpus-per-task=1``."""
    slurm = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_GPUS_ON_NODE": "2"}
    env = {**driver.env(), **slurm, "CUDA_VISIBLE_DEVICES": "0"}
    done = run_example(SCRIPT, env=env, fails=True)
    assert (
        "has 2 GPUs for this job, and this process sees 1 (CUDA_VISIBLE_DEVICES=0)" in done.stderr
    )


def test_one_process_meets_itself_in_a_file(driver: FakeDriver) -> None:
    done = run_example("ddp_minimal/one_process.py", env=driver.env())
    assert re.match(r"rank 0 of 1  GPU 0  CPUs [\d,-]+\n", done.stdout)
    found = re.search(r"loss (\S+), after one step (\S+)", done.stdout)
    assert found is not None
    before, after = map(float, found.groups())
    assert after < before
