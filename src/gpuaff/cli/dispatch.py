"""From arguments to an exit code: whatever goes wrong becomes one line, never a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from gpuaff.cli.parser import build_parser
from gpuaff.cli.render import say
from gpuaff.errors import GpuaffError, InvalidOptionError

FAILED = 1
WRONG_USE = 2
READER_GONE = 141
"""As a shell reports a process that SIGPIPE ended (``gpuaff topo | head``)."""


def dispatch(argv: Sequence[str] | None) -> int:
    """Run the command that the arguments name; returns the exit code."""
    try:
        return _run(argv)
    except BrokenPipeError:
        _drop_output()
        return READER_GONE
    except InvalidOptionError as error:
        return _fail(str(error), WRONG_USE)
    except GpuaffError as error:
        return _fail(str(error), FAILED)
    except OSError as error:
        return _fail(_in_words(error), FAILED)


def _run(argv: Sequence[str] | None) -> int:
    try:
        args = build_parser().parse_args(argv)
        code: int = args.run(args)
    except SystemExit as stop:  # argparse has said why
        code = stop.code if isinstance(stop.code, int) else FAILED
    if sys.stdout is not None:
        sys.stdout.flush()  # here, where a full disk or a gone reader can still be told
    return code


def _fail(problem: str, code: int) -> int:
    _drop_output()
    say(problem)
    return code


def _in_words(error: OSError) -> str:
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename else f"output: {reason}"


def _drop_output() -> None:
    """Throw away what could not be written, or Python complains about it as it ends."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
