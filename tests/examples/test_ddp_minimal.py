"""``examples/ddp_minimal``: what each rank finds, and that a set-up that doesn't fit is refused."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.example_runs import EXAMPLES, finished, node, run_example, table
from tests.fakedriver.driver import FakeDriver, MakeDriver
from tests.fakedriver.play import this_machine
from tests.processes import CPUS, environment

SCRIPT = "ddp_minimal/ddp_minimal.py"

pytestmark = [
    pytest.mark.fake_driver,
    pytest.mark.needs("torch", "two-cpus"),
    pytest.mark.timeout(120),
    pytest.mark.xdist_group("forks with torch"),
]


@pytest.mark.needs("torchrun")
def test_two_ranks_find_their_gpus_and_cpus(fake_driver: MakeDriver) -> None:
    """On a machine with one GPU more, which is no fault."""
    env = fake_driver(this_machine(3)).env()
    done = run_example(SCRIPT, "--no-cuda", env=env, torchrun=node(2))
    assert "2 ranks on 1 node(s) by gloo; on the first node 2 ranks, 3 GPUs visible" in done.stdout
    first, second = table(done.stdout, "rank")
    assert [first["rank"], second["rank"]] == ["0", "1"]
    assert [first["GPU"], second["GPU"]] == ["0", "1"]
    assert first["CPUs"] != second["CPUs"]
    if len(CPUS) == 2:
        assert {first["CPUs"], second["CPUs"]} == {str(cpu) for cpu in CPUS}
    assert first["forward"] == second["forward"], "DDP gave both the weights of rank 0"
    assert "forward pass: the same on all ranks" in done.stdout


TASK = {
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_GPUS_ON_NODE": "2",
}
"""What srun tells the first of two tasks on a node with two GPUs for the job."""

GPUS_PER_TASK = {**TASK, "CUDA_VISIBLE_DEVICES": "0"}
FOUR_TASKS = {**TASK, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "4"}
HIDDEN = {**TASK, "CUDA_VISIBLE_DEVICES": ""}
OF_OTHER_JOBS = {**TASK, "SLURM_GPUS_ON_NODE": "1"}

REFUSED = [
    (GPUS_PER_TASK, ["has 2 GPUs for this job", "sees 1 (CUDA_VISIBLE_DEVICES=0): ask for GPUs"]),
    (HIDDEN, ["has 2 GPUs for this job", "sees 0 (CUDA"]),
    (OF_OTHER_JOBS, ["has 1 GPUs for this job", "sees 2 (CUDA_VISIBLE_DEVICES=(unset))"]),
    (FOUR_TASKS, ["has 4 processes, and this one sees 2 GPUs", "as many processes on a node as"]),
    ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, ["is not known: RANK and WORLD_SIZE are not"]),
    ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, ["is not known: LOCAL_RANK=2 is not below"]),
]
"""Variables of a rank, and what it is told."""


def test_what_does_not_fit_is_told(driver: FakeDriver) -> None:
    for variables, parts in REFUSED:
        env = {**driver.env(), **variables}
        done = run_example(SCRIPT, "--no-cuda", env=env, fails=True, modules=("torch",))
        last = done.stderr.splitlines()[-1]
        assert all(part in last for part in parts), done.stderr
    # GPUs of the fake driver are visible, and no CUDA starts there.
    done = run_example(SCRIPT, env={**driver.env(), **TASK}, fails=True, modules=("torch",))
    assert "cannot use the 2 GPUs that are visible: install a build of it for CUDA" in done.stderr
    assert "--no-cuda" in done.stderr


@pytest.mark.needs("torchrun")
def test_ranks_that_differ_fail(driver: FakeDriver, tmp_path: Path) -> None:
    """Where DDP does not hand the weights of rank 0 round, as it is told here."""
    broken = tmp_path / "broken.py"
    broken.write_text(
        "import functools, runpy, torch.nn.parallel as parallel\n"
        "DDP = parallel.DistributedDataParallel\n"
        "parallel.DistributedDataParallel = functools.partial(DDP, init_sync=False)\n"
        f"runpy.run_path({str(EXAMPLES / SCRIPT)!r}, run_name='__main__')\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", *node(2)]
    done = finished([*torchrun, str(broken), "--no-cuda"], environment(driver.env()))
    assert "forward pass: THE RANKS DIFFER" in done.stdout
    assert done.returncode == 1


def test_one_process_meets_itself_in_a_file(driver: FakeDriver) -> None:
    done = run_example("ddp_minimal/one_process.py", env=driver.env(), modules=("torch",))
    assert re.match(r"rank 0 of 1  cpu  GPU 0  CPUs [\d,-]+\n", done.stdout)
    found = re.search(r"loss (\S+), after one step (\S+)", done.stdout)
    assert found is not None
    before, after = map(float, found.groups())
    assert after < before
