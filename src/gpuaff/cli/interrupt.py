"""What Ctrl-C does to the process ``gpuaff``.

While modules are imported a KeyboardInterrupt ends in a traceback, or is swallowed by a callback of
the import system. Commands that only look have nothing to undo: Ctrl-C ends them at once.
"""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def exit_on_interrupt() -> None:
    """From here on Ctrl-C ends the process, unless it is ignored (a job in the background)."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def raise_on_interrupt() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt, so that a claim is undone."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(*_: object) -> NoReturn:
    os._exit(130)  # as a shell reports a process that SIGINT ended
