"""Ways back: what has been done is noted step by step, and undone in the reverse order."""

from __future__ import annotations

from collections.abc import Callable

from gpuaff.system import kernel


class Undo:
    """Ways back, until they are taken.

    Ctrl-C may come at any moment, also while they are taken. So each way can be taken twice, and
    is forgotten only when it has come to its end; who must be sure calls the whole twice::

        try:
            undo()
        finally:
            undo()  # nothing, unless Ctrl-C came in the first
    """

    def __init__(self) -> None:
        """None yet; they are this process's, and no forked child's."""
        self._ways: list[Callable[[], object]] = []
        self.pid = kernel.process_id()

    @property
    def is_done(self) -> bool:
        """Whether none is left."""
        return not self._ways

    def add(self, way: Callable[[], object]) -> None:
        """Note a way back; may be taken twice, and before what it undoes has been done."""
        self._ways.append(way)

    def __call__(self) -> None:
        """Take them all, the last one first.

        A forked child that comes here (a callback has forked, and the child has raised) has
        nothing to take back: what it shares is its parent's.

        Raises:
            Exception: what the first has raised that failed, when all have been tried.
        """
        if kernel.process_id() != self.pid:
            return
        failed: Exception | None = None
        while self._ways:
            way = self._ways[-1]
            try:
                way()
            except Exception as error:  # noqa: BLE001 - raised when all have been tried
                failed = failed or error
            if self._ways and self._ways[-1] is way:  # a way may have taken all the others
                del self._ways[-1]
        if failed is not None:
            raise failed
