"""Runs a scheduler of this machine alone, below one folder, until its standard input ends.

python tests/schedulers/bed.py slurm|grid_engine FOLDER -- COMMAND ...     for a command, by hand

Needs root, and the programs of Debian's packages; touches none of their files, ports and daemons.
All that is started, also what makes itself a daemon, is this process's descendant, and is ended by
it: at the end of the command or of standard input, by whatever that comes.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Python looks first in the folder of its script; what it is to find is two above.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import psutil

_SUBREAPER, _DEATH_SIGNAL = 36, 1  # PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG of linux/prctl.h
_SECONDS = 60.0
_FILES = Path(__file__).resolve().parents[1] / "data/beds"


class Bed:
    """Starts what belongs to a scheduler."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []

    def write(self, name: str, text: str) -> Path:
        """Write a file below the folder."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def call(self, *command: str, env: Mapping[str, str] | None = None, check: bool = True) -> str:
        """Run a program to its end; what it printed."""
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(env or {})},
            timeout=_SECONDS,
            check=False,
        )
        if check and done.returncode:
            said = done.stdout + done.stderr
            raise RuntimeError(f"{' '.join(command)}: {done.returncode}\n{said}")
        return done.stdout

    def daemon(self, *command: str, env: Mapping[str, str] | None = None) -> None:
        """Start a daemon that stays in the foreground; what it says goes to a file."""
        log = self.folder / f"{Path(command[0]).name}-{len(self._daemons)}.out"
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=self.folder,
                env={**os.environ, **(env or {})},
                preexec_fn=ends_with_us,
            )
        self._daemons.append(process)

    def until(self, wanted: str, *command: str, env: Mapping[str, str] | None = None) -> None:
        """Wait until a program prints a word."""
        ends = time.monotonic() + _SECONDS
        while wanted not in self.call(*command, env=env, check=False).split():
            ended = [one.args for one in self._daemons if one.poll() is not None]
            if ended or time.monotonic() > ends:
                raise RuntimeError(f"{' '.join(command)} does not say {wanted}; ended: {ended}")
            time.sleep(0.1)


def text_of(name: str, **values: object) -> str:
    """A file of a scheduler, with values in its gaps."""
    return (_FILES / name).read_text("utf-8").format(**values)


def ends_with_us() -> None:
    """Let a child be told to end when this process is gone, however it went."""
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGTERM)


def free_ports(count: int) -> list[str]:
    """Ports that nobody listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [str(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


@contextmanager
def running(name: str, folder: Path) -> Iterator[dict[str, str]]:
    """Start a scheduler; gives the variables by which its commands find it, and ends it."""
    command = [sys.executable, __file__, name, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                paths = sorted({*folder.rglob("*.out"), *folder.rglob("*.log*")})
                logs = [path.read_text("utf-8", "replace")[-2000:] for path in paths]
                raise AssertionError("\n".join([f"{name} did not start", *logs]))
            found: dict[str, str] = json.loads(line)
            yield found
        finally:
            process.stdin.close()
            process.wait(_SECONDS)
    assert process.returncode == 0


def _end_all() -> None:
    """End all that has been started, until nothing is left."""
    us, ends = psutil.Process(), time.monotonic() + _SECONDS / 2
    for sign in (signal.SIGTERM, signal.SIGKILL):
        patience = time.monotonic() + 3
        while left := us.children(recursive=True):
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(sign)
            psutil.wait_procs(left, timeout=0.2)
            if time.monotonic() > (patience if sign == signal.SIGTERM else ends):
                break


def main(name: str, folder: str, *command: str) -> int:
    """Start the scheduler, and end it."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    bed = Bed(Path(folder).resolve())
    bed.folder.mkdir(parents=True, exist_ok=True)
    started: Any = import_module(f"tests.schedulers.{name}_bed")
    try:
        variables: dict[str, str] = started.start(bed)
        if command:
            return subprocess.run(command, env={**os.environ, **variables}, check=False).returncode
        print(json.dumps(variables), flush=True)
        sys.stdin.buffer.read()
        return 0
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _end_all()


if __name__ == "__main__":
    sys.exit(main(*(word for word in sys.argv[1:] if word != "--")))
