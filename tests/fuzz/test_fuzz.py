"""Fuzzing, a little of it; how to run more is in CONTRIBUTING.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from fuzz import fuzz
from fuzz.fuzz import Tally, random_of
from fuzz.guided import mangled
from fuzz.seeds import Printer
from fuzz.targets import TARGETS, Refused, Target

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it bounds memory as Linux does")


def fuzzed(folder: Path, *arguments: str, hash_seed: str = "0") -> str:
    """What the command says; it must not find anything."""
    command = [sys.executable, fuzz.__file__, "--failures", str(folder), *arguments]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    # Processor time is bounded loosely: coverage is measured here, and machines are slow.
    done = subprocess.run(
        [*command, "--seconds", "20"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def digests(said: str) -> list[str]:
    return re.findall(r"digest (\w+)", said)


def test_nothing_is_found(tmp_path: Path) -> None:
    said = fuzzed(tmp_path, "--count", "1500", "--jobs", "2")
    assert len(digests(said)) == len(TARGETS)


def test_the_same_comes_of_the_same_in_every_process(tmp_path: Path) -> None:
    """Whatever the hashes of strings are, and however the inputs are spread."""
    one = fuzzed(tmp_path, "--count", "500", "--jobs", "1", hash_seed="1")
    assert digests(one) == digests(fuzzed(tmp_path, "--count", "500", "--jobs", "3", hash_seed="2"))


@pytest.mark.slow
def test_nothing_is_found_in_more(tmp_path: Path) -> None:
    fuzzed(tmp_path, "--count", "12000", "--seed", "3")
