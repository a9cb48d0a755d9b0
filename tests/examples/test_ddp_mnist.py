"""``examples/ddp_mnist``: it learns, on one rank as on many, and each rank has its share."""

from __future__ import annotations

import csv
import gzip
import random
import re
import socket
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.example_runs import EXAMPLES, finished, node, run_example
from tests.fakedriver.driver import FakeDriver
from tests.processes import CPUS, environment

SCRIPT = "ddp_mnist/ddp_mnist.py"
MODULES = ("torch", "sklearn.datasets")

pytestmark = [
    pytest.mark.fake_driver,
    pytest.mark.needs("torch", "sklearn", "two-cpus"),
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.xdist_group("forks with torch"),
]


def forked(*options: str, driver: FakeDriver, cwd: Path | None = None) -> str:
    """What the script prints in a fork that has torch."""
    return run_example(SCRIPT, *options, env=driver.env(), cwd=cwd, modules=MODULES).stdout


def accuracies(printed: str) -> list[float]:
    """Of each test, from its counts."""
    tests = re.findall(
        r"^Test set: Average loss: \d+\.\d{4}, Accuracy: (\d+)/(\d+) \(\d+%\)$",
        printed,
        re.MULTILINE,
    )
    return [int(right) / int(count) for right, count in tests]


def shares(printed: str) -> dict[int, tuple[str, str]]:
    """The GPU and the CPUs of each rank."""
    found = re.findall(
        r"^rank (\d+) of \d+: cpu, GPU (\S+), CPUs (\S+), \d+ workers$", printed, re.MULTILINE
    )
    return {int(rank): (gpu, cpus) for rank, gpu, cpus in found}


def test_two_ranks_learn(driver: FakeDriver, tmp_path: Path) -> None:
    done = run_example(
        SCRIPT, "--no-cuda", "--epochs=4", "--batch-size=32", "--save-model", "--log-interval=5",
        env=driver.env(), torchrun=node(2), cwd=tmp_path,
    )  # fmt: skip
    found = shares(done.stdout)
    assert sorted(found) == [0, 1], done.stdout
    assert [found[rank][0] for rank in (0, 1)] == ["0", "1"]
    assert found[0][1] != found[1][1]
    tested = accuracies(done.stdout)
    assert len(tested) == 4, "rank 0 alone tells"
    assert tested[-1] > 0.7, "chance is 0.1"
    assert "Accuracy: " in done.stdout
    assert "/359 (" in done.stdout, "every fifth of 1797, each counted once"
    # 1438 images in steps of 2 x 32 are 23 steps: 0, 5, 10, 15, 20 are told.
    steps = re.findall(
        r"^Train Epoch: 2 \[(\d+)/1438 \(\d+%\)\]\tLoss: \d\.\d{6}$", done.stdout, re.MULTILINE
    )
    assert steps == ["0", "320", "640", "960", "1280"]
    assert [path.name for path in tmp_path.iterdir() if path.suffix] == ["mnist_cnn.pt"]


def test_one_process_needs_no_launcher(driver: FakeDriver, tmp_path: Path) -> None:
    options = ["--seed=7"], ["--seed=7", "--lr=0"], ["--seed=8", "--lr=0"]
    printed = [
        forked("--dry-run", "--no-cuda", *one, driver=driver, cwd=tmp_path) for one in options
    ]
    for one in printed:
        assert one.count("Train Epoch: ") == one.count("Test set: ") == 1
    assert [path for path in tmp_path.iterdir() if path.suffix == ".pt"] == []
    if len(CPUS) == 2:  # one trains, the other loads
        assert "CPUs 0-1, 1 workers" in printed[0]
    # The loss before the only step comes from the seed, the test after it from the rate as well.
    before = [re.findall(r"Loss: .*", one) for one in printed]
    after = [re.findall(r"Test set: .*", one) for one in printed]
    assert before[0] == before[1] != before[2]
    assert after[0] != after[1]


def test_the_rate_of_learning(driver: FakeDriver) -> None:
    """``--gamma`` 0 ends it with the first epoch, so the second test finds what the first found."""
    options = ["--no-cuda", "--gamma=0", "--epochs=2", "--batch-size=16"]
    printed = forked(*options, driver=driver)
    first, second = re.findall(r"^Test set: .*$", printed, re.MULTILINE)
    assert first == second
    assert accuracies(printed)[0] > 0.6, "chance is 0.1"


def test_claimed_gpus_are_the_ranks_gpus(driver: FakeDriver, lock_folder: Path) -> None:
    """Inside ``gpuaff run``, as the script's first lines have it."""
    command = [
        sys.executable, "-m", "gpuaff", "run", "-n", "1", "--",
        sys.executable, "-m", "torch.distributed.run", *node(1),
        str(EXAMPLES / SCRIPT), "--dry-run", "--no-cuda",
    ]  # fmt: skip
    env = environment({**driver.env(), "GPUAFF_LOCK_DIR": str(lock_folder)})
    with subprocess.Popen(["sleep", "100"]) as somebody:
        driver.use(0, somebody.pid)
        done = finished(command, env)
        somebody.kill()
    assert shares(done.stdout)[0][0] == "1"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_two_nodes_meet_at_an_address(driver: FakeDriver, tmp_path: Path) -> None:
    """The README's lines for two nodes, both on this machine."""
    meeting = ["--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]

    def start(rank: int) -> str:
        torchrun = [*meeting, "--nproc-per-node=1", f"--node-rank={rank}"]
        options = ["--dry-run", "--no-cuda", f"--csv={tmp_path}/epochs.csv"]
        return run_example(SCRIPT, *options, env=driver.env(), torchrun=torchrun).stdout

    with ThreadPoolExecutor() as nodes:
        first, second = nodes.map(start, (0, 1))
    # Rank 1 is the first one of its node: local rank 0, and so that node's GPU 0.
    assert shares(first)[0][0] == "0"
    assert shares(second)[1][0] == "0"
    assert len(accuracies(first)) == 1
    assert accuracies(second) == [], "only rank 0 tells"
    # The CSV has the mean over both ranks' images; printed is what rank 0 found for its own.
    (own,) = re.findall(r"Loss: (\S+)", first)
    with (tmp_path / "epochs.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert f"{float(row['train_loss']):.6f}" != own
    assert float(row["train_loss"]) == pytest.approx(float(own), abs=0.3)


REFUSED = [
    ({"SLURM_GPUS_ON_NODE": "2"}, [], "cannot use a GPU here (2 visible, 2 promised by Slurm)"),
    ({"CUDA_VISIBLE_DEVICES": "", "SLURM_GPUS_ON_NODE": "2"}, [], "(0 visible, 2 promised by"),
    ({}, [], "cannot use a GPU here (2 visible, 0 promised by Slurm)"),
    ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, ["--no-cuda"], "RANK and WORLD_SIZE are not"),
    # A rank of a job that is smaller: each of them would train alone.
    (
        {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "RANK": "3", "WORLD_SIZE": "2"},
        ["--no-cuda"],
        "is not known: RANK='3', WORLD_SIZE='2' is impossible",
    ),
]
"""Variables of a process, its options, and what it is told."""


def test_what_would_train_elsewhere_than_meant_is_refused(driver: FakeDriver) -> None:
    for variables, options, part in REFUSED:
        env = {**driver.env(), **variables}
        done = run_example(SCRIPT, "--dry-run", *options, env=env, fails=True, modules=MODULES)
        assert part in done.stderr.splitlines()[-1], done.stderr


def write_idx(path: Path, sizes: tuple[int, ...], content: bytes, *, packed: bool) -> None:
    """As the format is described: two zeros, the type, how many sizes; big-endian sizes; bytes."""
    whole = struct.pack(f">HBB{len(sizes)}I", 0, 8, len(sizes), *sizes) + content
    if packed:
        Path(f"{path}.gz").write_bytes(gzip.compress(whole))
    else:
        path.write_bytes(whole)


def test_mnist_from_a_folder(driver: FakeDriver, tmp_path: Path) -> None:
    """Images of 28 x 28 whose rows tell the label: two of them are white."""
    source = random.Random(0)
    for part, count in ("train", 320), ("t10k", 100):
        labels = bytes(source.randrange(10) for _ in range(count))
        images = b"".join(
            bytes(
                255 if row in (2 * label + 4, 2 * label + 5) else 0
                for row in range(28)
                for _ in range(28)
            )
            for label in labels
        )
        packed = part == "train"
        write_idx(tmp_path / f"{part}-images-idx3-ubyte", (count, 28, 28), images, packed=packed)
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte", (count,), labels, packed=packed)
    options = [f"--data={tmp_path}", "--no-cuda", "--batch-size=16", "--test-batch-size=33"]
    printed = forked("--epochs=1", *options, driver=driver)
    assert "/320 (" in printed
    assert accuracies(printed)[-1] > 0.5, "chance is 0.1"
    assert "/100 (" in printed
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(b"<html>")
    done = run_example(SCRIPT, *options, env=driver.env(), fails=True, modules=MODULES)
    assert "t10k-labels-idx1-ubyte does not begin as an idx file of bytes does" in done.stderr
