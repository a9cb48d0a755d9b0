"""The arguments that ``gpuaff`` takes; each command registers its own."""

from __future__ import annotations

import argparse

from gpuaff._version import __version__
from gpuaff.cli import check, plan, topo

_EPILOG = """\
WHAT of --from is a file (saved by "gpuaff topo --save", or pasted output of nvidia-smi topo -m,
lscpu, lscpu -p, numactl -H), "-" for standard input, or a machine that ships with gpuaff.
"""


class Parser(argparse.ArgumentParser):
    """An argparse parser whose help is coloured where the ``cli`` extra is installed."""

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


def build_parser() -> Parser:
    """The parser; what it returns has ``run``, which takes it and returns the exit code."""
    parser = Parser(
        prog="gpuaff",
        description="Put each training process on its own share of the CPU cores next to its GPU.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"gpuaff {__version__}")
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", dest="command", required=True, prog="gpuaff"
    )
    topo.register(commands)
    plan.register(commands)
    check.register(commands)
    return parser
