"""Other programs: the only module that starts one and waits for its output."""

from __future__ import annotations


class ProgramError(Exception):
    """A program gave no output; the text continues its name: ``is not on PATH``."""


def output_of(*command: str, seconds: float) -> str:
    """What a program, searched on PATH, prints to either stream within so many seconds.

    It gets no input. ProgramError: it is missing, fails, or takes too long and is killed.
    """
    import subprocess  # most runs start no program

    try:
        done = subprocess.run(  # noqa: S603 - no shell; the caller chose each argument
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=seconds,
            check=False,
        )
    except FileNotFoundError:
        raise ProgramError("is not on PATH") from None
    except OSError as error:
        raise ProgramError(f"cannot be started ({error.strerror})") from None
    except subprocess.TimeoutExpired:
        raise ProgramError(f"does not answer within {seconds:g} s") from None
    text = done.stdout.decode("utf-8", "replace")
    if done.returncode:
        first, *_ = text.strip().splitlines() or ["it prints nothing"]
        raise ProgramError(f"failed with status {done.returncode} ({first[:200]})")
    return text
