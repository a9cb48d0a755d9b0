"""``examples/sweep``: a row for each epoch of each run, and a picture."""

from __future__ import annotations

import csv
import re
import runpy
from pathlib import Path

import pytest

from tests.example_runs import EXAMPLES, run_example
from tests.fakedriver.driver import FakeDriver
from tests.processes import CPUS

SCRIPT = "sweep/sweep.py"

pytestmark = [
    pytest.mark.fake_driver,
    pytest.mark.needs("torch", "sklearn", "matplotlib", "two-cpus"),
    pytest.mark.slow,
    pytest.mark.timeout(300),
]


def labels(picture: Path) -> list[str]:
    """The runs' names: matplotlib writes what it draws as a comment, too."""
    return re.findall(r"<!-- (.* each.*) -->", picture.read_text())


def test_two_numbers_of_gpus(driver: FakeDriver, lock_folder: Path, tmp_path: Path) -> None:
    env = {**driver.env(), "GPUAFF_LOCK_DIR": str(lock_folder)}
    options = ["--cores=1", "--plot=sweep.svg", "--", "--no-cuda", "--epochs=2", "--batch-size=16"]
    done = run_example(SCRIPT, *options, env=env, cwd=tmp_path, timeout=250)
    with (tmp_path / "sweep.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = [(row["gpus"], row["cores_asked"], row["cores"], row["epoch"]) for row in rows]
    assert found == [(gpus, "1", "1", epoch) for gpus in "12" for epoch in "12"]
    for first, last in (rows[:2], rows[2:]):
        assert float(last["accuracy"]) > 0.5, "chance is 0.1"
        assert float(last["test_loss"]) < float(first["test_loss"])
    assert f"rank 0 of 1: cpu, GPU 0, CPUs {CPUS[0]}, 0 workers" in done.stdout, "cut to one core"
    assert done.stdout.count("rank 1 of 2: cpu, GPU 1, ") == 1
    assert labels(tmp_path / "sweep.svg") == ["1 GPU, 1 core each", "2 GPUs, 1 core each"]


def test_fewer_cores_than_were_asked_for_are_named(tmp_path: Path) -> None:
    drawn = {"epoch": 1, "test_loss": 0.5, "accuracy": 0.9, "seconds": 2.0}
    runs = [(1, 2, 2), (2, 2, 1)]
    rows = [{"gpus": gpus, "cores_asked": asked, "cores": c, **drawn} for gpus, asked, c in runs]
    runpy.run_path(str(EXAMPLES / SCRIPT))["draw"](rows, tmp_path / "it.svg")
    expected = ["1 GPU, 2 cores each", "2 GPUs, 1 core each (2 asked for)"]
    assert labels(tmp_path / "it.svg") == expected
