"""From arguments to an exit code: every failure becomes one line, never a traceback."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NoReturn, TextIO

from gpuaff import __version__, errors
from gpuaff.cli.output import print_stderr
from gpuaff.formatting import one_line

_COMMANDS = {
    "topo": "show the CPUs, NUMA nodes and GPUs of a machine",
    "plan": "show which cores each rank would get",
    "check": "check the CPUs of running processes",
    "status": "show which GPUs are free, leased or in use, and the waiters",
    "run": "claim GPUs, and become a command that uses them alone",
}
"""Each command, a module of this package, and what it does in a line."""

_DESCRIPTION = (
    "Claim GPUs on a shared machine, and pin each training process to its own share of the CPU "
    "cores next to its GPU."
)
_EPILOG = """\
WHAT of --from is a file (saved by "gpuaff topo --save", or pasted output of nvidia-smi topo -m,
lscpu, lscpu -p, numactl -H), "-" for standard input, or a machine that ships with gpuaff.
"""

_CODES = {
    errors.InvalidOptionError: 2,
    errors.NoDriverError: 3,
    errors.NotEnoughGpusError: 4,
    errors.GpusBusyError: 75,  # EX_TEMPFAIL of sysexits.h: trying again later may help
    errors.ClaimTimeoutError: 75,
}
_FAILED, _NOT_EXECUTABLE, _NOT_FOUND = 1, 126, 127  # the latter two as ``env`` and shells have them
_READER_GONE = 141  # as a shell reports a process that SIGPIPE ended (``gpuaff topo | head``)


class Parser(argparse.ArgumentParser):
    """An argparse parser whose help is coloured where the ``cli`` extra is installed."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong in one line, and exit."""
        print_stderr(f"error: {message}; see {self.prog} --help")
        raise SystemExit(2)

    def format_help(self) -> str:
        """The help text. The formatter is chosen here because it imports rich."""
        try:
            from rich_argparse import RichHelpFormatter
        except ImportError:
            return super().format_help()
        self.formatter_class = RichHelpFormatter
        return super().format_help()


def add_option(
    parser: argparse._ActionsContainer,
    name: str,
    metavar: str,
    read: Callable[[str, str], object],
    meaning: str,
    **how: Any,
) -> None:
    """Add an option; ``read`` takes its name and its text, and its error is argparse's."""

    def convert(text: str) -> object:
        try:
            return read("", text)  # argparse itself names the argument
        except errors.InvalidOptionError as error:
            problem = f"{one_line(text, 60)!r}: expected {error.expected}"
            raise argparse.ArgumentTypeError(problem) from None

    parser.add_argument(name, metavar=metavar, type=convert, help=meaning, **how)


def command_parser(command: str) -> Parser:
    """A command's parser; what it returns has ``run``, which takes it and returns the exit code."""
    module = import_module(f"gpuaff.cli.{command}")
    parser = Parser(prog=f"gpuaff {command}", allow_abbrev=False)
    module.register(parser)
    parser.set_defaults(run=module.run)
    return parser


def _refuse(argv: Sequence[str]) -> NoReturn:
    """Print the help or the version, or that the first argument is no command, and exit."""
    parser = Parser(prog="gpuaff", description=_DESCRIPTION, epilog=_EPILOG, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"gpuaff {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, meaning in _COMMANDS.items():
        commands.add_parser(name, help=meaning)
    parser.parse_args(argv)
    parser.error("the command comes first")


def dispatch(argv: Sequence[str] | None) -> int:
    """Run the command that the arguments name; returns the exit code."""
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except BrokenPipeError:
        return _READER_GONE
    except errors.GpuaffError as error:
        print_stderr(str(error))
        if isinstance(error, errors.CommandError):
            return _NOT_EXECUTABLE if error.found else _NOT_FOUND
        return next((code for kind, code in _CODES.items() if isinstance(error, kind)), _FAILED)
    except OSError as error:
        print_stderr(f"{error.filename or 'output'}: {error.strerror or error}")
        return _FAILED
    finally:
        _drop_unwritten(sys.stdout)
        _drop_unwritten(sys.stderr)


def _run(argv: list[str]) -> int:
    words: list[str] = []
    if argv[:1] == ["run"] and "--" in argv:
        # The words of the command may be anything: argparse would read options in them, and treats
        # ``--`` differently from release to release.
        place = argv.index("--")
        argv, words = argv[:place], argv[place + 1 :]
    try:
        if not argv or argv[0] not in _COMMANDS:
            _refuse(argv)
        args = command_parser(argv[0]).parse_args(argv[1:])
        args.words = words
        code: int = args.run(args)
    except SystemExit as stop:  # argparse has printed why
        code = stop.code if isinstance(stop.code, int) else _FAILED
    if sys.stdout is not None:
        sys.stdout.flush()  # here a full disk or a closed pipe can still be reported
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
