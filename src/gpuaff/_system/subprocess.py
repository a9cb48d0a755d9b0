"""Other programs: the only module that starts one and waits for its output."""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from subprocess import Popen

_MOST_OUTPUT = 1 << 20
"""The most that is read of a program's output, in bytes."""


class ProgramError(Exception):
    """A program gave no output; the text continues its name: ``is not on PATH``."""


def output_of(*command: str, seconds: float) -> str:
    """What a program, searched on PATH, prints to either stream within so many seconds.

    It gets no input and none of our files. When it takes too long, it and all that it has started
    are killed.

    Raises:
        ProgramError: it is missing, takes too long, prints too much or fails.
    """
    import subprocess  # most runs start no program

    end = time.monotonic() + seconds
    try:
        process = subprocess.Popen(  # noqa: S603 - no shell; the caller chose each argument
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise ProgramError("is not on PATH") from None
    except OSError as error:
        raise ProgramError(f"cannot be started ({error.strerror})") from None
    try:
        text = _read_until(end, process)
        status = process.wait(max(0.0, end - time.monotonic()))
    except (TimeoutError, subprocess.TimeoutExpired):
        raise ProgramError(f"does not answer within {seconds:g} s") from None
    finally:
        _end(process)
    if status:
        first, *_ = text.strip().splitlines() or ["it prints nothing"]
        raise ProgramError(f"failed with status {status} ({first[:200]})")
    return text


def _read_until(end: float, process: Popen[bytes]) -> str:
    assert process.stdout is not None  # noqa: S101 - for the type checker
    pipe, data = process.stdout.fileno(), b""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while poll.poll(max(0.0, end - time.monotonic()) * 1000):
        part = os.read(pipe, 65536)
        if not part:
            return data.decode("utf-8", "replace")
        data += part
        if len(data) > _MOST_OUTPUT:
            raise ProgramError(f"prints more than {_MOST_OUTPUT} bytes")
    raise TimeoutError


def _end(process: Popen[bytes]) -> None:
    """Kill it with all that it has started, unless it has ended."""
    if process.returncode is None:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
