"""Interrupt calls that pin and unpin at random opcodes, and print what was left behind.

Each trial is a forked child with three threads: Ctrl-C comes at one opcode of the modules that
change it. Prints one JSON object: the seed, how many interrupts were sent and raised, in how many
trials all was as before, and as after the call, and the trials that left anything else.

    python interrupted_pin.py SEED TRIALS
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pynvml  # noqa: F401 - as all modules, so that no trial has to import them

import gpuaff
import gpuaff.pinning.memory
import gpuaff.pinning.pin
from gpuaff._system import interrupts, mempolicy
from gpuaff.pinning.state import known_process
from tests.programs.threads import Helper

CPUS = os.sched_getaffinity(0)
PINNING = Path(gpuaff.__file__).parent / "pinning"
CHANGING = {str(PINNING / f"{name}.py") for name in ("state", "threads", "restore", "memory")}
"""The modules that change the process; those that only look execute far more opcodes."""


class Interrupt:
    """Sends SIGINT to this process when so many opcodes have changed it."""

    def __init__(self, after: int) -> None:
        self.after, self.count = after, 0

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in CHANGING:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.count += 1
            if self.count == self.after:
                os.kill(os.getpid(), signal.SIGINT)
        return self


def first_call() -> Callable[[], object]:
    """Nothing is set before."""
    return lambda: gpuaff.set_affinity(0, 2, memory="bind", openmp=True)


def second_call() -> Callable[[], object]:
    """Another share, policy and number of threads are set before."""
    gpuaff.set_affinity(0, 2, memory="interleave")
    return lambda: gpuaff.set_affinity(1, 2, memory="bind", openmp=True)


def reapply() -> Callable[[], object]:
    """A framework has moved the main thread out of the share."""
    affinity = first_call()()
    os.sched_setaffinity(0, CPUS - affinity)  # type: ignore[operator]
    return affinity.reapply  # type: ignore[attr-defined, no-any-return]


def restore() -> Callable[[], object]:
    """A share is set."""
    return first_call()().restore  # type: ignore[attr-defined, no-any-return]


def end_of_block() -> Callable[[], object]:
    """The inner one of two blocks."""
    gpuaff.set_affinity(1, 2, memory="interleave", openmp=True)
    inner = gpuaff.set_affinity(0, 2, memory="bind")

    def leave() -> None:
        with inner:
            pass

    return leave


ACTIONS = (first_call, second_call, reapply, restore, end_of_block)


def trial(prepare: Callable[[], Callable[[], object]], after: int) -> dict[str, Any]:
    """Interrupt one call: the state before and after it, and what else was left behind."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    free, bound = Helper(), Helper()
    bound.do(lambda: os.sched_setaffinity(0, {max(CPUS)}))
    act = prepare()

    def state() -> list[str]:
        tids = (0, free.native_id or 0, bound.native_id or 0)
        masks = [str(sorted(os.sched_getaffinity(tid))) for tid in tids]
        names = ("OMP_NUM_THREADS", "GPUAFF_PINNED")
        variables = [str(os.environ.get(name)) for name in names]
        expected = str(sorted(gpuaff.check().expected or ()))
        return [*masks, str(mempolicy.get_policy()), *variables, expected]

    before, raised, interrupt = state(), False, Interrupt(after)
    sys.settrace(interrupt)
    try:
        act()
    except KeyboardInterrupt:
        raised = True
    finally:
        sys.settrace(None)
    process = known_process()
    is_locked = process is not None and not free.do(lambda: process.lock.acquire(timeout=5))
    return {
        "opcodes": interrupt.count,
        "raised": raised,
        "before": before,
        "after": state(),
        "left": {
            "block": interrupts._block is not None,
            "lock": is_locked,
            "handler": signal.getsignal(signal.SIGINT) is not signal.default_int_handler,
        },
    }


def in_child(prepare: Callable[[], Callable[[], object]], after: int) -> dict[str, Any]:
    """A trial in a forked child."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, json.dumps(trial(prepare, after)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(text)  # type: ignore[no-any-return]


def main() -> None:
    """Interrupt each kind of call at random opcodes."""
    seed, trials = int(sys.argv[1]), int(sys.argv[2])
    randomly = random.Random(seed)
    counts: dict[str, Any] = {"seed": seed, "sent": 0, "raised": 0, "old": 0, "new": 0}
    mixed = []
    for action in ACTIONS:
        calm = in_child(action, 0)
        for _ in range(trials):
            after = randomly.randint(1, calm["opcodes"])
            found = in_child(action, after)
            counts["sent"] += found["opcodes"] >= after
            counts["raised"] += found["raised"]
            is_old = found["after"] == found["before"] == calm["before"]
            is_new = found["after"] == calm["after"]
            counts["old"] += is_old
            counts["new"] += is_new
            if not (is_old or is_new) or any(found["left"].values()):
                mixed.append([action.__name__, after, found])
    print(json.dumps({**counts, "mixed": mixed}))


if __name__ == "__main__":
    main()
