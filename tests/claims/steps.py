"""A claim that is killed or interrupted at random steps of the interpreter, one after the other.

    python -m tests.claims.steps --play claim --how kill --turns 30

runs inside the fake driver's environment (``FakeDriver.env()``), with GPUAFF_LOCK_DIR set and no
other claimer about. Each turn is a forked child, so that it costs no imports.
Prints what was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import gpuaff
from gpuaff._system import locks
from gpuaff.claims.locking import registry
from tests.claims.everything import import_all
from tests.programs.claiming import differs, locked, state
from tests.programs.occupying import on_gpus

LIMIT = 20
"""Seconds that a child may take."""


def nothing() -> None:
    pass


def claim(n: int = 2, **options: Any) -> None:
    gpuaff.claim_gpus(n, **options)


def pinned_claim() -> None:
    before = os.sched_getaffinity(0)
    claim(1, pin=True)
    assert os.sched_getaffinity(0) < before, "nothing is pinned here, so nothing is tried"


def release() -> None:
    held = gpuaff.current_claim()
    assert held is not None
    held.release()


def claim_in_block() -> None:
    with gpuaff.claim_gpus(2):
        pass


def refused_claim(**options: Any) -> None:
    with suppress(gpuaff.GpusBusyError, gpuaff.ClaimTimeoutError):
        claim(4, **options)


class Play(NamedTuple):
    """What is tried, and for how many seconds another process holds one GPU meanwhile."""

    work: Callable[[], object]
    prepare: Callable[[], object] = nothing
    held: float = 0.0


PLAYS = {
    "claim": Play(claim),
    "lease": Play(partial(claim, placeholder=None)),
    "pin": Play(pinned_claim),
    "release": Play(release, prepare=claim),
    "block": Play(claim_in_block),
    "refused": Play(refused_claim, held=LIMIT),
    "vain": Play(partial(refused_claim, wait=0.03), held=LIMIT),
    "wait": Play(partial(claim, 4, wait=LIMIT), held=0.05),
}


class Steps:
    """Counts the interpreter's steps in our code, and does something at one of them."""

    def __init__(self, at: int = 0, act: Callable[[], object] = nothing) -> None:
        self.count, self._at, self._act = 0, at, act

    def follow(self, work: Callable[[], object]) -> int:
        sys.settrace(self._enter)
        try:
            work()
        finally:
            sys.settrace(None)
        return self.count

    def _enter(self, frame: FrameType, _event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if "/gpuaff/" not in file and not file.endswith(("contextlib.py", "steps.py")):
            return None
        if frame.f_code is Steps.follow.__code__:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, _frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode":
            self.count += 1
            if self.count == self._at:
                self._act()
        return self._step


# ---- the two ways: what is wrong then --------------------------------------------------------


def kill(play: Play, at: int) -> list[str]:
    """Kill it there; then nothing is left."""

    def killed() -> None:
        play.prepare()
        Steps(at, partial(os.kill, os.getpid(), signal.SIGKILL)).follow(play.work)

    said = child(killed)
    return [str(said)] if said else []


def interrupt(play: Play, at: int) -> list[str]:
    """Ctrl-C there: all of a claim is there, or nothing of it."""

    def interrupted() -> list[str]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        before = state()
        play.prepare()
        steps, was_interrupted = Steps(at, partial(signal.raise_signal, signal.SIGINT)), False
        try:
            steps.follow(play.work)
        except KeyboardInterrupt:
            was_interrupted = True
        wrong = [] if was_interrupted or steps.count < at else ["not interrupted"]
        if held := gpuaff.current_claim():
            wrong += [] if is_whole(held) else ["half a claim"]
            held.release()
        return [*wrong, *map(str, differs(before, state())), *map(str, on_gpus())]

    said = child(interrupted)
    return said if isinstance(said, list) else [str(said)]


def is_whole(held: gpuaff.Claim) -> bool:
    """Whether it has its leases, its variables, its slot and, with a placeholder, its contexts."""
    shown = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    return (
        not held.is_released
        and [str(gpu.index) for gpu in held.gpus] == shown
        and len(on_gpus()) == len(held.placeholders)
        and len(locked()) > len(shown)
    )


def left(all_gpus: int) -> list[str]:
    """What the dead have left; then another process gets all GPUs."""
    found = held_locks()
    found += [f"slot {entry.slot} of the registry" for entry in registry.entries()]
    got = child(lambda: len(gpuaff.claim_gpus(all_gpus, wait=2).gpus))
    return found if got == all_gpus else [*found, f"then {got}"]


def child(work: Callable[[], object]) -> Any:
    """What a forked child says at its end; None where it was killed before."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(LIMIT)
        try:
            said: object = work()
        except BaseException:  # noqa: BLE001 - told to the parent
            said = f"! {traceback.format_exc()[-800:]}"
        os.write(writer, json.dumps(said).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    _, status = os.waitpid(pid, 0)
    if text or status == signal.SIGKILL:
        return json.loads(text or "null")
    return f"! it has ended by signal {status}"


@contextmanager
def other_holder(seconds: float) -> Iterator[None]:
    """Another process holds one GPU, for so long."""
    reader, writer = os.pipe()
    pid = os.fork() if seconds else 0
    if seconds and pid == 0:
        claim(1, placeholder=None)
        os.write(writer, b"1")
        time.sleep(seconds)
        os._exit(0)
    os.close(writer)
    if seconds:
        os.read(reader, 1)
    os.close(reader)
    try:
        yield
    finally:
        if seconds:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def held_locks() -> list[str]:
    """The locks on files of the lock directory, and of safe_gpu."""
    folders = Path(os.environ["GPUAFF_LOCK_DIR"]), Path(os.environ["GPUAFF_SAFE_GPU"]).parent
    files = [file for folder in folders for file in folder.glob("*")]
    names = {locks.identity(str(file)): file.name for file in files}
    return [f"{names[one.file]}: {one}" for one in locks.held_locks() if one.file in names]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--play", choices=PLAYS, required=True)
    parser.add_argument("--how", choices=("kill", "interrupt"), required=True)
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--gpus", type=int, default=4, help="how many the machine has")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    import_all()
    play, rng, failures = PLAYS[args.play], random.Random(args.seed), {}

    def good() -> int:
        play.prepare()
        return Steps().follow(play.work)

    with other_holder(play.held):
        count = child(good)
    assert isinstance(count, int), count
    for _ in range(args.turns):
        # Every second one near the end or the beginning, where a block has just begun or ended.
        edge = rng.choice([rng.randint(1, 150), count - rng.randint(0, 150)])
        at = rng.choice([rng.randint(1, count), min(max(edge, 1), count)])
        with other_holder(play.held):
            found = kill(play, at) if args.how == "kill" else interrupt(play, at)
        found += left(args.gpus) if args.how == "kill" else []
        if found:
            failures[at] = found
    print(json.dumps({"steps": count, "failures": failures}))


if __name__ == "__main__":
    main()
