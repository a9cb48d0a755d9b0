"""``examples/dp_vs_ddp``: both ways learn the same, each on what its row says."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tests.example_runs import run_example, table
from tests.fakedriver.driver import FakeDriver
from tests.processes import CPUS

SCRIPT = "dp_vs_ddp/compare.py"
TINY = ["--no-cuda", "--", "--samples=2048", "--width=64", "--batch-size=64", "--epochs=2"]

pytestmark = [
    pytest.mark.fake_driver,
    pytest.mark.needs("torch", "two-cpus"),
    pytest.mark.slow,
    pytest.mark.timeout(300),
]


def losses(row: dict[str, str]) -> list[float]:
    return [float(loss) for loss in row["loss by epoch"].split()]


def test_one_and_two_gpus(driver: FakeDriver, lock_folder: Path, tmp_path: Path) -> None:
    """What was measured is shown, and kept, also where the next claim fails."""
    env = {**driver.env(), "GPUAFF_LOCK_DIR": str(lock_folder)}
    files = [f"--json={tmp_path}/found.json", f"--csv={tmp_path}/found.csv"]
    counts = ["--gpus", "1", "2", "3"]
    done = run_example(SCRIPT, *counts, *files, *TINY, env=env, timeout=250, fails=True)
    assert "NotEnoughGpusError" in done.stderr
    rows = table(done.stdout, "method")
    kinds = [(row["method"], row["visible GPUs"], row["processes"]) for row in rows]
    assert kinds == [
        ("dp", "0", "1"),
        ("ddp", "0", "1"),
        ("dp", "0,1", "1"),
        ("ddp", "0,1", "2"),
    ]
    for row in rows:
        assert losses(row)[-1] < losses(row)[0]
        assert (row["epochs"], len(losses(row))) == ("2", 2)
        assert float(row["samples/s"]) > 0
    # The same steps with the same samples, but in another order.
    for dp, ddp in (rows[:2], rows[2:]):
        assert losses(dp) == pytest.approx(losses(ddp), abs=0.03)
    if len(CPUS) == 2:
        assert [row["CPUs each"] for row in rows] == ["2", "2", "2", "1 1"]
        assert [row["OMP threads"] for row in rows[2:]] == ["2", "1"]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found[0]["losses"] == pytest.approx(losses(rows[0]), abs=0.001)
    with (tmp_path / "found.csv").open(newline="") as file:
        assert list(csv.DictReader(file)) == rows


def test_without_a_gpu_it_trains_on_the_cpu() -> None:
    """Also inside a rank of some launcher: DataParallel stays one process."""
    around = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "RANK": "3", "WORLD_SIZE": "4"}
    done = run_example(SCRIPT, "--gpus=1", *TINY[1:], env=around, timeout=250)
    rows = table(done.stdout, "method")
    found = [(row["visible GPUs"], row["processes"], row["MiB by GPU"]) for row in rows]
    assert found == [("-", "1", "-")] * 2
