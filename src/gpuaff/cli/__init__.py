"""The command line, one module a command; and what Ctrl-C does to the process ``gpuaff``.

While modules are imported a KeyboardInterrupt ends in a traceback, or is swallowed by a callback of
the import system. Commands that only look have nothing to undo: Ctrl-C ends them at once.
"""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False  # `gpuaff run` delays the user's program by whatever is imported here
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

_INTERRUPTED = 130  # as a shell reports a process that SIGINT ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``gpuaff`` with these arguments, else the process's own; returns the exit code."""
    try:
        from gpuaff.cli.dispatch import dispatch

        return dispatch(argv)
    except KeyboardInterrupt:
        return _INTERRUPTED


def exit_on_interrupt() -> None:
    """From here on Ctrl-C ends the process, unless it is ignored (a job in the background)."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def raise_on_interrupt() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt, so that a claim is undone."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(*_: object) -> NoReturn:
    os._exit(_INTERRUPTED)
