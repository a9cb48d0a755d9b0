"""Interrupt a block of ``uninterrupted()`` at each of its opcodes, and print what was left behind.

Prints one JSON object: how many interrupts there were, in how many runs Ctrl-C was raised, and how
many runs left the change half done, an open window, or a handler that is not the program's own.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from types import FrameType
from typing import Any

from gpuaff._system import interrupts
from gpuaff._system.interrupts import deliver_pending, interruptible, uninterrupted

HANDLER = signal.default_int_handler
OURS = (__file__, interrupts.__file__)


class Interrupt:
    """Sends SIGINT to this process when so many opcodes have been executed."""

    def __init__(self, after: int) -> None:
        self.after, self.count = after, 0

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in OURS:  # Python 3.10 crashes in the stdlib's
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.count += 1
            if self.count == self.after:
                os.kill(os.getpid(), signal.SIGINT)
        return self


def change(done: list[str]) -> None:
    """Two steps that belong together, with a window between them, and a delivery."""
    with uninterrupted():
        done.append("first")
        try:
            with interruptible():
                sum(range(3))
            deliver_pending()
            done.append("second")
        except BaseException:
            done.remove("first")
            raise


def interrupted(after: int) -> tuple[int, list[str], bool]:
    """Run ``change`` with Ctrl-C at one opcode: opcodes executed, what is done, was it raised."""
    done: list[str] = []
    interrupt = Interrupt(after)
    raised = False
    sys.settrace(interrupt)
    try:
        change(done)
    except KeyboardInterrupt:
        raised = True
    finally:
        sys.settrace(None)
    return interrupt.count, done, raised


def main() -> None:
    """Interrupt each opcode once."""
    signal.signal(signal.SIGINT, HANDLER)
    opcodes, _, _ = interrupted(0)
    counts = {"interrupts": opcodes, "raised": 0, "half done": 0, "open": 0, "wrong handler": 0}
    for after in range(1, opcodes + 1):
        _, done, raised = interrupted(after)
        counts["raised"] += raised
        counts["half done"] += done not in ([], ["first", "second"])
        counts["open"] += interrupts._block is not None
        counts["wrong handler"] += signal.getsignal(signal.SIGINT) is not HANDLER
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
