"""The whole way: torchrun starts the example, and another process reads the masks."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpuaff.cpuset import parse_cpulist
from tests.fakedriver.driver import FakeDriver
from tests.processes import environment, masks

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/pin.py"

pytestmark = [
    pytest.mark.fake_driver,
    pytest.mark.needs("two-cpus"),
]


def shares(printed: str) -> dict[int, str]:
    """What the example printed: the cpulist of each rank."""
    return {
        int(rank): cpus
        for rank, cpus in re.findall(r"^(\d+): core affinity: (\S+)$", printed, re.MULTILINE)
    }


# The example, and then the process stays until a file is there.
STAYS = """
import runpy, sys, time
from pathlib import Path
runpy.run_path({example!r}, run_name="__main__")
folder = Path({folder!r})
import os
(folder / ("pid" + os.environ["LOCAL_RANK"])).write_text(str(os.getpid()))
while not (folder / "end").exists():
    time.sleep(0.05)
"""


@pytest.mark.needs("torch", "torchrun")
@pytest.mark.timeout(120)
@pytest.mark.case("B1", "B5")
def test_the_example_under_torchrun(driver: FakeDriver, tmp_path: Path) -> None:
    script = tmp_path / "stays.py"
    script.write_text(STAYS.format(example=str(EXAMPLE), folder=str(tmp_path)))
    command = ["torchrun", "--nproc-per-node", "2", str(script)]
    out, err = tmp_path / "out", tmp_path / "err"
    with (
        out.open("w") as stdout,
        err.open("w") as stderr,
        subprocess.Popen(
            command, env=environment(driver.env()), stdout=stdout, stderr=stderr
        ) as process,
    ):
        try:
            pids = [tmp_path / f"pid{rank}" for rank in (0, 1)]
            while not all(path.exists() and path.read_text() for path in pids):
                assert process.poll() is None, err.read_text()
                time.sleep(0.1)
            seen = [masks(int(path.read_text())) for path in pids]  # read from outside
        finally:
            (tmp_path / "end").touch()
    assert process.returncode == 0
    first, second = (set(one.values()) for one in seen)
    assert len(first) == len(second) == 1
    one, two = first.pop(), second.pop()
    assert one
    assert two
    assert not one & two
    found = shares(out.read_text())
    assert {rank: parse_cpulist(cpus) for rank, cpus in found.items()} == {0: one, 1: two}
    assert err.read_text().count("gpuaff: rank ") == 2, "the one line of each rank"


def example(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLE), *words],
        capture_output=True,
        text=True,
        env=environment(env),
        check=True,
    )


def test_the_example_without_torchrun(driver: FakeDriver) -> None:
    found = [example(**driver.env(), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2") for rank in (0, 1)]
    assert shares(found[0].stdout)[0] != shares(found[1].stdout)[1]


@pytest.mark.case("A4")
def test_the_example_without_a_gpu() -> None:
    done = example("--local_rank", "0")
    assert shares(done.stdout)[0]
    assert "not pinned" in done.stderr
