"""Other programs: the only module that starts one and waits for what it prints."""

from __future__ import annotations

import os
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from subprocess import Popen

_MOST = 1 << 20
"""The most that is read of a program's output, in bytes."""


class ProgramError(Exception):
    """A program could not be asked; the text goes on after its name: ``is not on PATH``."""


def output_of(*command: str, seconds: float) -> str:
    """What a program prints, to either stream.

    It gets no input and none of our files. When it takes too long, it and all that it has started
    are killed.

    Args:
        command: the program, searched on PATH, and its arguments.
        seconds: how long it may take.

    Raises:
        ProgramError: it is not there, takes too long, prints too much or fails.
    """
    import subprocess
    import time

    end = time.monotonic() + seconds
    try:
        process = subprocess.Popen(  # noqa: S603 - no shell, and no argument is a stranger's
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
        text = _read(process, end, seconds)
        status = process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise _slow(seconds) from None
    finally:
        _end(process)
    if status:
        lines = text.strip().splitlines() or ["it says nothing"]
        raise ProgramError(f"failed with status {status} ({lines[0][:200]})")
    return text


def _read(process: Popen[bytes], end: float, seconds: float) -> str:
    import select
    import time

    assert process.stdout is not None  # noqa: S101 - for the type checker
    pipe, data = process.stdout.fileno(), b""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while poll.poll(max(0.0, end - time.monotonic()) * 1000):
        part = os.read(pipe, 65536)
        if not part:
            return data.decode("utf-8", "replace")
        data += part
        if len(data) > _MOST:
            raise ProgramError(f"prints more than {_MOST} bytes")
        if time.monotonic() > end:
            break
    raise _slow(seconds)


def _slow(seconds: float) -> ProgramError:
    return ProgramError(f"does not answer within {seconds:g} s")


def _end(process: Popen[bytes]) -> None:
    """End it with all that it has started; nothing where it has ended."""
    if process.returncode is None:
        import signal

        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
