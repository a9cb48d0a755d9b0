"""Bounds on what one input may cost: processor time, memory, and hanging where nothing looks."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

HANGING = 120
"""After so many seconds by the clock the process is ended, wherever it is."""


class TooSlowError(BaseException):
    """An input took more than its processor time. Nothing that catches exceptions catches it."""


def bound_memory(megabytes: int) -> None:
    """Let this process have so much memory more than it has now; beyond it is a MemoryError."""
    pages, *_ = Path("/proc/self/statm").read_text("ascii").split()
    now = int(pages) * resource.getpagesize()
    most = now + (megabytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


@contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """Raise where the block takes more processor time.

    Processor time, since on a busy machine the clock says nothing of us. C code that never
    returns to the interpreter is ended by a signal that has no handler.

    Raises:
        TooSlowError: it took more.
    """
    signal.signal(signal.SIGVTALRM, _stop)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, HANGING)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _stop(number: int, frame: FrameType | None) -> None:
    raise TooSlowError
