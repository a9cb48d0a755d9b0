"""Other programs: the only module that starts one and waits for its output."""

from __future__ import annotations

import os
import signal
from contextlib import suppress


class ProgramError(Exception):
    """A program gave no output; the text continues its name: ``is not on PATH``."""


def output_of(*command: str, seconds: float) -> str:
    """What a program, searched on PATH, prints to either stream within so many seconds.

    It gets no input and none of our files. When it takes too long, it and all that it has started
    are killed. ProgramError: it is missing, takes too long or fails.
    """
    import subprocess  # most runs start no program

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
    with process:
        try:
            data, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise ProgramError(f"does not answer within {seconds:g} s") from None
        finally:
            if process.returncode is None:
                with suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)
    text = data.decode("utf-8", "replace")
    if process.returncode:
        first, *_ = text.strip().splitlines() or ["it prints nothing"]
        raise ProgramError(f"failed with status {process.returncode} ({first[:200]})")
    return text
