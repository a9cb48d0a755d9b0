"""``examples/sweep``: a row for each epoch of each run, and a picture."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from tests.example_runs import run_example
from tests.fakedriver.driver import FakeDriver
from tests.processes import CPUS

pytestmark = [
    pytest.mark.fake_driver,
    pytest.mark.needs("torch", "sklearn", "matplotlib", "two-cpus"),
    pytest.mark.slow,
    pytest.mark.timeout(300),
]


def test_two_numbers_of_gpus(driver: FakeDriver, lock_folder: Path, tmp_path: Path) -> None:
    env = {**driver.env(), "GPUAFF_LOCK_DIR": str(lock_folder)}
    done = run_example(
        "sweep/sweep.py", "--cores", "1", "2", "--plot=sweep.svg",
        "--", "--no-cuda", "--epochs=3", "--batch-size=32",
        env=env, cwd=tmp_path, timeout=250,
    )  # fmt: skip
    with (tmp_path / "sweep.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    runs = [("1", "1"), ("1", "2"), ("2", "1"), ("2", "2")]
    assert [(row["gpus"], row["cores_asked"], row["epoch"]) for row in rows] == [
        (*run, str(epoch)) for run in runs for epoch in (1, 2, 3)
    ]
    last = [row for row in rows if row["epoch"] == "3"]
    assert min(float(row["accuracy"]) for row in last) > 0.5, "chance is 0.1"
    first = [row for row in rows if row["epoch"] == "1"]
    for before, after in zip(first, last, strict=True):
        assert float(after["test_loss"]) < float(before["test_loss"])
    # The first run's share was cut to one core, the second's was not.
    assert "rank 0 of 1: cpu, GPU 0, CPUs 0, 0 workers" in done.stdout
    assert done.stdout.count("rank 1 of 2: cpu, GPU 1, ") == 2
    # matplotlib writes what it draws as a comment, too. Two GPUs on two cores have one each.
    drawn = re.findall(r"<!-- (.* each.*) -->", (tmp_path / "sweep.svg").read_text())
    assert drawn[:2] == ["1 GPU, 1 core each", "1 GPU, 2 cores each"]
    if len(CPUS) == 2:
        assert [row["cores"] for row in last] == ["1", "2", "1", "1"]
        assert drawn[2:] == ["2 GPUs, 1 core each", "2 GPUs, 1 core each (2 asked for)"]
