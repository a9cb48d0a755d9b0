"""``examples/dp_vs_ddp``: both ways learn the same, each on what its row says."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from example_runs import run_example, table
from fakedriver.driver import FakeDriver
from processes import CPUS

SCRIPT = "dp_vs_ddp/compare.py"
TINY = ["--", "--samples=4096", "--width=64", "--batch-size=64"]

pytestmark = [
    pytest.mark.fake_driver,
    pytest.mark.needs("torch", "two-cpus"),
    pytest.mark.slow,
    pytest.mark.timeout(300),
]


def losses(row: dict[str, str]) -> list[float]:
    return [float(loss) for loss in row["loss by epoch"].split()]


def test_one_and_two_gpus(driver: FakeDriver, lock_folder: Path, tmp_path: Path) -> None:
    env = {**driver.env(), "GPUAFF_LOCK_DIR": str(lock_folder)}
    files = [f"--json={tmp_path}/found.json", f"--csv={tmp_path}/found.csv"]
    done = run_example(SCRIPT, *files, *TINY, env=env, timeout=250)
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
        assert row["epochs"] == "4"
        assert len(losses(row)) == 4
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
    done = run_example(SCRIPT, "--gpus=1", *TINY, timeout=250)
    rows = table(done.stdout, "method")
    assert [(row["visible GPUs"], row["MiB by GPU"]) for row in rows] == [("-", "-")] * 2


def test_gpus_that_others_have_are_not_measured_on(driver: FakeDriver, lock_folder: Path) -> None:
    env = {**driver.env(), "GPUAFF_LOCK_DIR": str(lock_folder)}
    done = run_example(SCRIPT, "--gpus=3", *TINY, env=env, fails=True)
    assert "NotEnoughGpusError" in done.stderr
