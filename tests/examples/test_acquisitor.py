"""``examples/acquisitor``: processes that take GPUs at the same moment."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.example_runs import EXAMPLES
from tests.fakedriver.driver import FakeDriver
from tests.processes import environment

SCRIPT = EXAMPLES / "acquisitor/acquisitor.py"

pytestmark = pytest.mark.fake_driver


@pytest.fixture
def env(driver: FakeDriver, tmp_path: Path) -> dict[str, str]:
    lock = {"GPUAFF_LOCK_DIR": str(tmp_path / "locks"), "GPUAFF_SAFE_GPU": str(tmp_path / "s/lock")}
    return environment({**driver.env(smi=True), **lock})


def start(env: Mapping[str, str], *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPT), *words]
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def said(process: subprocess.Popen[str], code: int = 0) -> list[str]:
    out, _ = process.communicate(timeout=60)
    assert process.returncode == code, out
    return out.splitlines()


def gpus(lines: list[str]) -> list[str]:
    return [found.group(1) for line in lines if (found := re.search(r"has GPU (\S+?);? ", line))]


@pytest.mark.slow
def test_two_at_once_have_different_gpus(driver: FakeDriver, env: dict[str, str]) -> None:
    """Each takes a second between choosing and occupying; who only looks would collide."""
    options = ("--delay", "1", "--sleep", "4")
    first = start(env, "--id", "A", *options)
    second = start(env, "--id", "B", *options, "--explicit-owner-object")
    lines = said(first), said(second)
    assert sorted(gpus(lines[0]) + gpus(lines[1])) == ["0", "1"]
    assert lines[1][-1] == "B: gave it back"
    assert driver.double_holdings() == []


@pytest.mark.slow
@pytest.mark.needs("safe_gpu")
def test_a_safe_gpu_user_waits_for_ours(driver: FakeDriver, env: dict[str, str]) -> None:
    options = ("--id", "ours", "--delay", "3", "--sleep", "2", "--peer", "safe_gpu")
    lines = said(start(env, *options))
    who = [line.partition(": ")[0] for line in lines]
    assert who == ["ours", "safe_gpu", "ours", "safe_gpu"], "it asks meanwhile, and has to wait"
    assert lines[1] == "safe_gpu: asks"
    assert gpus(lines) == ["0", "1"]
    assert driver.double_holdings() == []


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--nb-gpus 3", "NotEnoughGpusError: requested 3 GPUs"),
        ("--backend cupy", "PlaceholderError: placeholder='cupy'"),
    ],
)
def test_what_cannot_be_had_is_one_line(env: dict[str, str], words: str, error: str) -> None:
    [line] = said(start(env, *words.split()), 1)
    assert line.startswith(f"A: {error}")


BACKENDS = {"pytorch": "torch", "tf": "tensorflow", "pycuda": "pycuda", "cupy": "cupy"}


@pytest.mark.parametrize(("backend", "module"), BACKENDS.items())
def test_backends_by_their_names(
    driver: FakeDriver, env: dict[str, str], backend: str, module: str
) -> None:
    """Over as much of each framework as a placeholder uses."""
    stand_in = Path(__file__).parents[1] / "claims/stand_in"
    assert any(stand_in.glob(f"{module}*"))
    env = {**env, "PYTHONPATH": f"{stand_in}:{env['PYTHONPATH']}"}
    lines = said(start(env, "--backend", backend, "--nb-gpus", "2", "--sleep", "0"))
    assert lines == ["A: has GPU 0,1; CUDA_VISIBLE_DEVICES=0,1"]
    assert driver.contexts_made(0) > 0
    assert driver.contexts_made(1) > 0
