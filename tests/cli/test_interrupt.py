"""Ctrl-C ends a command with exit code 130 and no traceback, whenever it comes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

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

DELAYS = [0.0005, 0.002, 0.005, 0.01, 0.02, 0.05]
"""Seconds from the start of the program to Ctrl-C."""

COMMANDS = [
    "topo --from -",  # it waits for a paste
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
        stdin=subprocess.PIPE,
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


@pytest.mark.parametrize("before", [signal.SIG_IGN, signal.default_int_handler])
def test_ctrl_c_raises_where_something_is_to_be_undone(before: Any) -> None:
    """Unless it is ignored: a shell without job control starts a job in the background so."""
    kept = signal.signal(signal.SIGINT, before)
    try:
        cli.exit_on_interrupt()
        assert (signal.getsignal(signal.SIGINT) is before) == (before is signal.SIG_IGN)
        cli.raise_on_interrupt()
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGINT, kept)
