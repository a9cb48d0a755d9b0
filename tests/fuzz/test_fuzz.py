"""Fuzzing, a little of it; docs/testing.md tells how to do more."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz import fuzz
from tests.fuzz.targets import TARGETS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it bounds memory as Linux does")


def python(*arguments: str, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def fuzzed(*arguments: str, hash_seed: str = "0") -> str:
    """What the command says where it finds nothing."""
    # The bound on time is loose, for coverage is measured meanwhile.
    done = python(fuzz.__file__, "--seconds", "20", *arguments, hash_seed=hash_seed)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def digests(said: str) -> list[str]:
    return re.findall(r"digest (\w+)", said)


def test_nothing_is_found_and_the_same_comes_of_the_same_in_every_process(tmp_path: Path) -> None:
    """Whatever the hashes of strings are, and however the inputs are spread."""
    asked = ("--count", "300", "--failures", str(tmp_path))
    one = digests(fuzzed(*asked, "--jobs", "1", hash_seed="1"))
    assert len(one) == len(TARGETS)
    assert one == digests(fuzzed(*asked, "--jobs", "3", hash_seed="2"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_nothing_is_found_in_more(tmp_path: Path) -> None:
    fuzzed("--count", "8000", "--jobs", "2", "--seed", "3", "--failures", str(tmp_path))


BAD = """
import os, sys
sys.path[:0] = {paths!r}
from tests.fuzz import fuzz
from tests.fuzz.targets import TARGETS, Refused, Target

def check(number):
    if number == 3:
        raise KeyError(number)
    if number == 5:
        while True:
            number += 1  # Python 3.10 looks for signals here, and not just before a try
            try:
                number -= 1
            except Exception:
                pass
    if number == 6:
        bytearray(1 << 30)
    if number == 7:
        os._exit(9)
    if number % 2:
        raise Refused("odd")
    return "even"

TARGETS["bad"] = Target(1, lambda random: int(random.random() * 1000), check)

class Fixed:
    def __init__(self, target, seed, number):
        self.random = lambda: number / 1000 + 1e-6

fuzz.random_of = Fixed
fuzz._AT_ONCE = 1
sys.exit(fuzz.main(sys.argv[1:]))
"""


@pytest.fixture
def said(tmp_path: Path) -> str:
    """What the command says of a target that fails in every way that there is."""
    script = BAD.format(paths=[str(fuzz.ROOT), str(fuzz.ROOT / "src")])
    done = python(
        *("-c", script, "--target", "bad", "--count", "12", "--jobs", "2", "--seconds", "0.2"),
        *("--megabytes", "256", "--failures", str(tmp_path)),
    )
    assert done.returncode == 1, done.stderr
    return done.stdout


def test_what_fails_is_told(said: str, tmp_path: Path) -> None:
    """The odd inputs 9 and 11 come after the one that kills; of 1, 3 and 5, 1 is refused."""
    assert re.search(r"^bad +9 inputs .* 89 % taken, .* 4 failures$", said, re.MULTILINE)
    for number, what in (
        (3, "KeyError at <string>:"),
        (5, "took too long"),
        (6, "MemoryError at <string>:"),
        (7, "the process died with 9"),
    ):
        again = f"--target bad --seed 1 --only {number}"
        assert re.search(f"^FAILED {what}.* again by: {again}$", said, re.MULTILINE)
        text = (tmp_path / f"bad-1-{number}.txt").read_text("utf-8")
        assert text.startswith(f"{number}\n")
    assert len(list(tmp_path.iterdir())) == 4
