"""Hold signal handlers back while something is changed, so that Ctrl-C never divides a change.

One block is around the whole, with windows in it for what takes long::

    with uninterrupted():  # Ctrl-C is noted
        lease = take_lease()
        try:
            with interruptible():  # Ctrl-C raises here, and only here
                wait_for_driver()
        except BaseException:
            lease.release()
            raise
    # what was noted is delivered: its handler is called, and may raise

Two blocks, one to acquire and one to release, would leave a step between them where Ctrl-C loses
what was acquired. Only Python handlers are held back. Blocks nest: an inner one also holds in a
window of the outer one. In other threads, where Python never runs handlers, both do nothing.
"""

from __future__ import annotations

import os
import signal
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

_SIGNALS = (
    *(signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM),
    *(signal.SIGUSR1, signal.SIGUSR2),
    signal.SIGINT,  # last: its handler raises, and is put back when all others are
)

_block: _Block | None = None
"""The outermost block of the main thread."""


class _Block:
    """The handlers that are held back, and the signals that have come for them."""

    def __init__(self) -> None:
        self.holds = False
        self.pending: list[tuple[_Held, int, FrameType | None]] = []
        self._held: dict[int, _Held] = {}

    def replace_handlers(self) -> None:
        for number in _SIGNALS:
            handler: object = signal.getsignal(number)
            while isinstance(handler, _Held):  # a library saved that of a block that has ended
                handler = handler.handler
            if callable(handler):  # SIG_DFL, SIG_IGN and C's handlers are not
                self._held[number] = _Held(self, handler)
                signal.signal(number, self._held[number])
        self.holds = True

    def restore_handlers(self, *, again: bool = True) -> None:
        try:
            for number, held in self._held.items():
                current: object = signal.getsignal(number)
                if current is held:  # a handler that was set meanwhile stays
                    signal.signal(number, held.handler)
        finally:
            if again:  # one that was put back already may have raised
                self.restore_handlers(again=False)

    def switch(self, *, holds: bool) -> None:
        """Hold back what comes from now on, or deliver what has come and let the rest act."""
        self.holds = holds
        while self.pending and not holds:
            self.holds = True
            self.deliver()
            self.holds = False

    def deliver(self) -> None:
        """Call the handlers of all that has come, though the first of them may raise."""
        while self.pending:
            held, number, frame = self.pending.pop(0)
            try:
                held.handler(number, frame)
            finally:
                self.deliver()


class _Held:
    """Stands in for a handler. A library that saved it may call it long after the block."""

    def __init__(self, block: _Block, handler: Callable[[int, FrameType | None], object]) -> None:
        self.handler = handler
        self._block = block

    def __call__(self, number: int, frame: FrameType | None) -> None:
        block = self._block
        if block.holds:
            block.pending.append((self, number, frame))
            return
        block.holds = _block is block  # if the handler raises, its window is closed by then
        self.handler(number, frame)
        block.holds = False


class _Region:
    """What is held back in it, or acts at once, did as before outside of it."""

    __slots__ = ("_before", "_holds", "_outer", "_own")

    def __init__(self, *, holds: bool) -> None:
        self._holds = holds

    def __enter__(self) -> None:
        global _block
        self._own: _Block | None = None
        self._outer = _block if threading.current_thread() is threading.main_thread() else None
        if self._outer is not None:
            self._before = self._outer.holds
            self._outer.switch(holds=self._holds)
        elif self._holds and threading.current_thread() is threading.main_thread():
            block = _Block()
            try:
                block.replace_handlers()
            except ValueError:  # a subinterpreter has no signals
                return
            except BaseException:  # a handler raised before it was replaced
                block.restore_handlers()
                raise
            _block = self._own = block  # nothing raises between these steps any more

    def __exit__(self, *_: object) -> None:
        global _block
        if self._outer is not None:
            self._outer.switch(holds=self._before)
        block = self._own
        if block is None:
            return
        _block = None
        try:
            block.deliver()
        finally:
            try:
                block.restore_handlers()
            finally:
                block.holds = False  # from here on a stand-in that is left only passes on
                block.deliver()  # what came in the last steps


def uninterrupted() -> _Region:
    """A block that no signal handler divides; what came meanwhile is delivered at its end."""
    return _Region(holds=True)


def interruptible() -> _Region:
    """A window in such a block, for a wait, a callback or a call into the driver."""
    return _Region(holds=False)


def deliver_pending() -> None:
    """Call the handlers of what has come in this block so far; what they raise is raised here."""
    # Not an empty window: CPython 3.11 covers the only instruction of ``pass`` by no ``with``.
    if _block is not None and threading.current_thread() is threading.main_thread():
        _block.deliver()


def is_in_block() -> bool:
    """Whether the main thread is in a block, or in a window of one."""
    return _block is not None


def _forget_pending() -> None:
    if _block is not None:
        _block.pending.clear()


# A forked child does not answer for what came to its parent.
os.register_at_fork(after_in_child=_forget_pending)
