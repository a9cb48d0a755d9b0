"""The arguments that ``gpuaff`` takes; each command registers its own.

Only the module of the command that is asked for is imported: ``gpuaff run`` stands between a user
and their program.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from gpuaff._version import __version__
from gpuaff.notices import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from _typeshed import SupportsWrite

_COMMANDS = {
    "topo": "show the CPUs, NUMA nodes and GPUs of a machine",
    "plan": "show which cores each rank would get",
    "check": "check the CPUs of running processes",
    "status": "show who has which GPU, and who waits",
    "run": "claim GPUs, and become a command that has them to itself",
}
"""Each command, a module of this package, and what it does in a line."""

_EPILOG = """\
WHAT of --from is a file (saved by "gpuaff topo --save", or pasted output of nvidia-smi topo -m,
lscpu, lscpu -p, numactl -H), "-" for standard input, or a machine that ships with gpuaff.
"""


class Parser(argparse.ArgumentParser):
    """An argparse parser whose help is coloured where the ``cli`` extra is installed.

    Attributes:
        one_line: whether a wrong use is told in one line, without the usage.
        asked: whose help that line names; None is its own.
    """

    one_line = False
    asked: str | None = None

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and exit."""
        if self.one_line:
            asked = self.asked or self.prog
            self.exit(2, f"gpuaff: error: {printable(message)}; see {asked} --help\n")
        super().error(printable(message))

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        """Up to Python 3.11 argparse fails where nobody hears its errors; the exit code counts."""
        try:
            super()._print_message(message, file)
        except OSError:
            if file is not sys.stderr:
                raise

    def format_help(self) -> str:
        """The help text. Only here is the formatter chosen: it imports rich."""
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
        wanted: the first argument. If it is a command, the parser knows that one and no other;
            else it knows their names, for the help and for errors.
    """
    parser = Parser(
        prog="gpuaff",
        description="Claim GPUs on a shared machine, and put each training process on its own "
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
            parser.one_line, parser.asked = made.one_line, made.prog
    return parser
