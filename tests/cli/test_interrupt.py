"""Ctrl-C ends a command with exit code 130 and no traceback, whenever it comes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpuaff import cli
from tests.processes import environment

START = """
import sys
from gpuaff.__main__ import program
from gpuaff.cli import exit_on_interrupt
sys.argv = ["gpuaff", *sys.argv[1:]]
exit_on_interrupt()  # the first thing that the program does
print("started", flush=True)
program()
"""

DELAYS = [0.0005, 0.001, 0.002, 0.003, 0.005, 0.007, 0.01, 0.014, 0.02, 0.027, 0.035, 0.05]
"""Seconds from the start of the program to Ctrl-C."""

COMMANDS = [
    "topo --from dgx-a100",
    "plan --from dgx-a100",
    "check",
    "status",
    "run --no-claim --no-pin -- sleep 60",
    "run --wait -- sleep 60",
    "--help",
]


def interrupted(words: list[str], delay: float, folder: Path) -> tuple[int, str]:
    """The exit code and standard error of a command that gets Ctrl-C after a delay."""
    env = environment({"GPUAFF_LOCK_DIR": str(folder / "locks"), "GPUAFF_SAFE_GPU": "off"})
    with subprocess.Popen(
        [sys.executable, "-c", START, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "started\n"
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        errors = process.stderr.read()
    return process.returncode, errors


@pytest.mark.parametrize("command", COMMANDS)
def test_no_traceback_whenever_it_comes(command: str, tmp_path: Path) -> None:
    for delay in DELAYS:
        code, errors = interrupted(command.split(), delay, tmp_path)
        assert "Traceback" not in errors, (delay, errors)
        # The command may have failed, or ended, before; or `run` may have become `sleep`.
        assert code == 130 or delay > DELAYS[0], (delay, code, errors)
        assert code in (130, 0, 3, 4, -signal.SIGINT), (delay, code, errors)


def test_a_job_in_the_background_goes_on() -> None:
    """A shell without job control starts it with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        cli.exit_on_interrupt()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        cli.raise_on_interrupt()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_it_raises_where_something_is_to_be_undone() -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        cli.exit_on_interrupt()
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        cli.raise_on_interrupt()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
