"""What ``gpuaff run --wait`` says while it waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from gpuaff.cli.output import print_stderr
from gpuaff.formatting import counted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuaff.claims.model import Waiting

_PAUSE = 3.0
"""Seconds between two lines, at least."""


@contextmanager
def telling(pause: float = _PAUSE) -> Iterator[Teller]:
    """Tell how the wait stands, as long as it lasts."""
    teller = Teller(pause)
    try:
        yield teller
    finally:
        teller.end()


class Teller:
    """Says how the wait stands: at once, but not more often than each few seconds.

    What comes too early is said when the time has come, unless something newer is known by then.
    """

    def __init__(self, pause: float) -> None:
        """Nothing is said yet."""
        self._pause = pause
        self._lock = threading.Lock()
        self._latest: str | None = None
        self._timer: threading.Timer | None = None
        self._is_over = False

    def __call__(self, standing: Waiting) -> None:
        """Tell it, now or soon."""
        with self._lock:
            self._latest = in_words(standing)
            if self._timer is None:
                self._say()

    def end(self) -> None:
        """The wait is over: what was not said yet is of no interest any more."""
        with self._lock:
            self._is_over = True
            if self._timer is not None:
                self._timer.cancel()

    def _say(self) -> None:
        said, self._latest, self._timer = self._latest, None, None
        if self._is_over or said is None:
            return
        print_stderr(said)
        timer = threading.Timer(self._pause, self._when_due)
        timer.daemon = True
        with suppress(RuntimeError):  # no more threads can be had: then each is said at once
            timer.start()
            self._timer = timer

    def _when_due(self) -> None:
        with self._lock:
            self._say()


def in_words(standing: Waiting) -> str:
    """How a wait stands, in one line."""
    place = f"{standing.position} before us" if standing.position else "next in line"
    why = "".join(f"; {reason}" for reason in standing.reasons)
    free = standing.free or "none"
    return f"waiting for {counted(standing.wanted, 'GPU')}, {place}, {free} free{why}"
