"""For how long what is about to go from a GPU is looked at again. Pure.

The kernel ends a process in steps: it gives back memory, then files and with them locks and
contexts, and only then is it a zombie. The driver lists it for all that time, and a little longer.
"""

from __future__ import annotations

SETTLES = 1.0
"""How long GPUs are looked at again whose processes have just ended, in seconds: the driver lists
them for another 0.10 to 0.15 s, and their memory."""

EXITS = 10.0
"""How long, in seconds, while a process is still exiting. It takes 0.1 to 0.5 s on four H200, and
for each 16 GiB of the host's memory that it has in small pages about a second more. One that takes
longer hangs, in the driver or on a file system, and may do so for ever."""

STEP = 0.03
"""Seconds between two looks."""


class Settling:
    """Knows since when something is about to go, and whether to look again."""

    def __init__(self, settles: float = SETTLES) -> None:
        """Nothing is about to go yet.

        Args:
            settles: how long to look again when no process is exiting any more, in seconds.
        """
        self._settles = settles
        self._since: float | None = None
        self._exited = 0.0
        self._has_exiting = False

    def goes_on(self, now: float, *, leaving: bool, exiting: bool) -> bool:
        """Whether to look again.

        Once more, too, when what was exiting is there and not about to go: it may have ended while
        we looked, between what it held and itself.

        Args:
            now: seconds, by a clock that only goes forward.
            leaving: whether what was seen now is about to go.
            exiting: whether a process is exiting still.
        """
        had_exiting, self._has_exiting = self._has_exiting, leaving and exiting
        if not leaving:
            self._since = None
            return had_exiting
        if self._since is None:
            self._since = self._exited = now
        if exiting:
            self._exited = now
            return now < self._since + EXITS
        return now < self._exited + self._settles

    def is_short(self, now: float) -> bool:
        """Whether it has not lasted for longer yet than what has ended needs."""
        return self._since is not None and now < self._since + self._settles
