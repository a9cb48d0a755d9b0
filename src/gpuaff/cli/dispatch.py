"""From arguments to an exit code: every failure becomes one line, never a traceback."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module

from gpuaff._version import __version__
from gpuaff.errors import (
    ClaimTimeoutError,
    CommandError,
    GpuaffError,
    GpusBusyError,
    InvalidOptionError,
    NoDriverError,
    NotEnoughGpusError,
)
from gpuaff.formatting import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn, TextIO

    from _typeshed import SupportsWrite

_COMMANDS = {
    "topo": "show the CPUs, NUMA nodes and GPUs of a machine",
    "plan": "show which cores each rank would get",
    "check": "check the CPUs of running processes",
    "status": "show which GPUs are free, leased or in use, and the waiters",
    "run": "claim GPUs, and become a command that uses them alone",
}
"""Each command, a module of this package, and what it does in a line."""

_EPILOG = """\
WHAT of --from is a file (saved by "gpuaff topo --save", or pasted output of nvidia-smi topo -m,
lscpu, lscpu -p, numactl -H), "-" for standard input, or a machine that ships with gpuaff.
"""

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


class Parser(argparse.ArgumentParser):
    """An argparse parser whose help is coloured where the ``cli`` extra is installed.

    Attributes:
        one_line: whether errors take one line, without the usage.
        help_of: the command whose help such an error names; None is this one.
    """

    one_line = False
    help_of: str | None = None

    def error(self, message: str) -> NoReturn:
        """Print what is wrong, and exit."""
        if self.one_line:
            command = self.help_of or self.prog
            self.exit(2, f"gpuaff: error: {printable(message)}; see {command} --help\n")
        super().error(printable(message))

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        """Up to Python 3.11 argparse fails where standard error is closed; the code counts."""
        try:
            super()._print_message(message, file)
        except OSError:
            if file is not sys.stderr:
                raise

    def format_help(self) -> str:
        """The help text. The formatter is chosen here because it imports rich."""
        self.formatter_class = _help_formatter()
        return super().format_help()


def _help_formatter() -> type[argparse.HelpFormatter]:
    try:
        from rich_argparse import RichHelpFormatter
    except ImportError:
        return argparse.HelpFormatter
    return RichHelpFormatter


def build_parser(wanted: str | None) -> Parser:
    """The parser; what it returns has ``run``, which takes it and returns the exit code.

    Args:
        wanted: the first argument. If it is a command, only its module is imported and only it is
            known: ``gpuaff run`` delays the user's program by what is imported. Else the parser
            knows the names of all, for the help and for errors.
    """
    parser = Parser(
        prog="gpuaff",
        description="Claim GPUs on a shared machine, and pin each training process to its own "
        "share of the CPU cores next to its GPU.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"gpuaff {__version__}")
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", dest="command", required=True, prog="gpuaff"
    )
    for name in [wanted] if wanted in _COMMANDS else _COMMANDS:
        made = commands.add_parser(name, help=_COMMANDS[name], allow_abbrev=False)
        if name == wanted:
            import_module(f"gpuaff.cli.{name}").register(made)
            parser.one_line, parser.help_of = made.one_line, made.prog
    return parser


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
        reason = error.strerror or str(error)
        return _fail(f"{error.filename or 'output'}: {reason}", FAILED)
    finally:
        _drop_unwritten(sys.stderr)


def code_of(error: GpuaffError) -> int:
    """The exit code for an error: ``docs/cli.md`` lists them."""
    if isinstance(error, CommandError):
        return NOT_EXECUTABLE if error.found else NOT_FOUND
    return next((code for kind, code in _CODES if isinstance(error, kind)), FAILED)


def _run(argv: list[str]) -> int:
    own, words = _split(argv)
    try:
        args = build_parser(own[0] if own else None).parse_args(own)
        args.words = words
        code: int = args.run(args)
    except SystemExit as stop:  # argparse has printed why
        code = stop.code if isinstance(stop.code, int) else FAILED
    if sys.stdout is not None:
        sys.stdout.flush()  # here a full disk or a closed pipe can still be reported
    return code


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Our arguments, and the words of the command of ``run``, which may be anything.

    argparse would read options in it, and treats ``--`` differently from release to release.
    """
    if argv[:1] != ["run"] or "--" not in argv:
        return argv, []
    place = argv.index("--")
    return argv[:place], argv[place + 1 :]


def _fail(problem: str, code: int) -> int:
    from gpuaff.cli.output import print_stderr

    _drop_unwritten(sys.stdout)
    print_stderr(problem)
    return code


def _drop_unwritten(stream: TextIO | None) -> None:
    """Drop what cannot be written, or Python complains as it ends, by an exit code of 120."""
    if stream is None:
        return
    try:
        stream.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
