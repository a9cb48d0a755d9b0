"""``uninterrupted()`` and ``interruptible()``, with real signals in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuaff._system.interrupts import interruptible, uninterrupted

PROGRAM = Path(__file__).parents[1] / "programs/interrupted_block.py"


class Recorder:
    """A handler that notes what it is called with, and may raise."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.calls: list[int] = []
        self.error = error

    def __call__(self, number: int, _: object) -> None:
        self.calls.append(number)
        if self.error is not None:
            raise self.error


@pytest.fixture
def usr1() -> Iterator[Recorder]:
    """A recorder that handles SIGUSR1 during the test."""
    recorder = Recorder()
    before = signal.signal(signal.SIGUSR1, recorder)
    yield recorder
    signal.signal(signal.SIGUSR1, before)


def send(number: int = signal.SIGUSR1) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0)  # the handler, if it runs, runs before the next line


def test_an_interrupt_at_any_opcode_leaves_all_or_nothing() -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], capture_output=True, text=True, timeout=60, check=True
    )
    counts = json.loads(done.stdout)
    count = counts.pop("interrupts")
    assert count > 100
    assert counts == {"raised": count, "half done": 0, "open": 0, "wrong handler": 0}


def test_a_signal_acts_in_a_window(usr1: Recorder) -> None:
    with uninterrupted():
        send()
        with interruptible():
            assert usr1.calls == [signal.SIGUSR1], "what came before"
            send()
            assert usr1.calls == [signal.SIGUSR1] * 2
        with uninterrupted():  # an inner block changes nothing
            send()
        assert usr1.calls == [signal.SIGUSR1] * 2
    assert usr1.calls == [signal.SIGUSR1] * 3


def test_an_inner_block_holds_in_a_window_of_the_outer_one(usr1: Recorder) -> None:
    with uninterrupted(), interruptible():
        with uninterrupted():
            send()
            assert usr1.calls == []
        assert usr1.calls == [signal.SIGUSR1]
        send()
        assert usr1.calls == [signal.SIGUSR1] * 2


def test_every_signal_is_delivered_though_the_first_raises(usr1: Recorder) -> None:
    usr1.error = RuntimeError("from the handler")

    def block() -> None:
        with uninterrupted():
            send()
            send()

    with pytest.raises(RuntimeError, match="from the handler"):
        block()
    assert usr1.calls == [signal.SIGUSR1] * 2
    assert signal.getsignal(signal.SIGUSR1) is usr1


def test_a_window_is_closed_after_its_handler_has_raised(usr1: Recorder) -> None:
    usr1.error = RuntimeError("from the handler")
    with uninterrupted():
        with pytest.raises(RuntimeError), interruptible():
            send()
        usr1.error = None
        send()
        assert usr1.calls == [signal.SIGUSR1]
    assert usr1.calls == [signal.SIGUSR1] * 2


def test_a_handler_that_is_set_inside_stays(usr1: Recorder) -> None:
    other = Recorder()
    with uninterrupted():
        signal.signal(signal.SIGUSR1, other)
    assert signal.getsignal(signal.SIGUSR1) is other


def test_a_library_that_saved_the_stand_in_still_reaches_the_handler(usr1: Recorder) -> None:
    with uninterrupted():
        saved = signal.getsignal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, saved)
    send()
    with uninterrupted():
        send()
        assert usr1.calls == [signal.SIGUSR1]
    assert usr1.calls == [signal.SIGUSR1] * 2


def test_the_default_action_of_sigterm_stays() -> None:
    text = (
        "import os, signal, gpuaff._system.interrupts as i\n"
        "signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"  # coverage handles it
        "with i.uninterrupted():\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('alive')\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, timeout=30)
    assert done.returncode == -signal.SIGTERM
    assert done.stdout == b""


def test_other_threads_do_nothing(usr1: Recorder) -> None:
    inside, end = threading.Event(), threading.Event()

    def block() -> None:
        with uninterrupted(), interruptible():
            inside.set()
            end.wait(10)

    thread = threading.Thread(target=block)
    thread.start()
    assert inside.wait(10)
    send()
    end.set()
    thread.join(10)
    assert usr1.calls == [signal.SIGUSR1]


def test_a_forked_child_forgets_what_came_to_its_parent(usr1: Recorder) -> None:
    with uninterrupted():
        send()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with interruptible():
                    code = len(usr1.calls)
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert usr1.calls == [signal.SIGUSR1]
