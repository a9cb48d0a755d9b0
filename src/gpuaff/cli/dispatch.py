"""From arguments to an exit code: whatever goes wrong becomes one line, never a traceback."""

from __future__ import annotations

import os
import sys

from gpuaff.cli.parser import build_parser
from gpuaff.errors import (
    ClaimTimeoutError,
    CommandError,
    GpuaffError,
    GpusBusyError,
    InvalidOptionError,
    NoDriverError,
    NotEnoughGpusError,
)

TYPE_CHECKING = False  # `gpuaff run` stands between a user and their program
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TextIO

FAILED = 1
WRONG_USE = 2
NO_DRIVER = 3
NOT_ENOUGH = 4
BUSY = 75
"""``EX_TEMPFAIL`` of ``sysexits.h``: trying again later may help."""
NOT_EXECUTABLE = 126
NOT_FOUND = 127
"""These two as ``env`` and shells have them."""
READER_GONE = 141
"""As a shell reports a process that SIGPIPE ended (``gpuaff topo | head``)."""

_CODES: tuple[tuple[type[GpuaffError], int], ...] = (
    (InvalidOptionError, WRONG_USE),
    (NoDriverError, NO_DRIVER),
    (NotEnoughGpusError, NOT_ENOUGH),
    (GpusBusyError, BUSY),
    (ClaimTimeoutError, BUSY),
)


def dispatch(argv: Sequence[str] | None) -> int:
    """Run the command that the arguments name; returns the exit code."""
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except BrokenPipeError:
        _drop_unwritten(sys.stdout)
        return READER_GONE
    except GpuaffError as error:
        return _fail(str(error), code_of(error))
    except OSError as error:
        return _fail(_in_words(error), FAILED)
    finally:
        _drop_unwritten(sys.stderr)


def code_of(error: GpuaffError) -> int:
    """The exit code of a command that failed so: ``docs/cli.md`` lists them."""
    if isinstance(error, CommandError):
        return NOT_EXECUTABLE if error.found else NOT_FOUND
    return next((code for kind, code in _CODES if isinstance(error, kind)), FAILED)


def _run(argv: list[str]) -> int:
    ours, words = _parted(argv)
    try:
        args = build_parser(ours[0] if ours else None).parse_args(ours)
        args.words = words
        code: int = args.run(args)
    except SystemExit as stop:  # argparse has said why
        code = stop.code if isinstance(stop.code, int) else FAILED
    if sys.stdout is not None:
        sys.stdout.flush()  # here, where a full disk or a gone reader can still be told
    return code


def _parted(argv: list[str]) -> tuple[list[str], list[str]]:
    """Our arguments, and the words of the command of ``run``, which may be anything.

    argparse would read options in it, and treats ``--`` differently from release to release.
    """
    if argv[:1] != ["run"] or "--" not in argv:
        return argv, []
    place = argv.index("--")
    return argv[:place], argv[place + 1 :]


def _fail(problem: str, code: int) -> int:
    from gpuaff.cli.render import say

    _drop_unwritten(sys.stdout)
    say(problem)
    return code


def _in_words(error: OSError) -> str:
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename else f"output: {reason}"


def _drop_unwritten(stream: TextIO | None) -> None:
    """Throw away what cannot be written, or Python complains as it ends, by an exit code of 120."""
    if stream is None:
        return
    try:
        stream.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
