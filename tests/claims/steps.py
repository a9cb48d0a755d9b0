"""A claim that is killed or interrupted at each of its steps, one after the other.

    python steps.py --play claim --how kill --every 7

runs inside the fake driver's environment (``FakeDriver.env()``), with GPUAFF_LOCK_DIR set and no
other claimer about. A step is a line of gpuaff's own that a good run comes to: its first time and
its last. Each try is a forked child, so that it costs no imports. Prints what came of it as JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import gpuaff
from gpuaff._system import locks
from gpuaff.claims.locking import registry

Step: TypeAlias = "tuple[str, int, int]"
"""A file, a line, and the how-manieth time."""

LIMIT = 20.0
"""Seconds that a child may take."""
TRACED = (
    *("gpuaff/claims/", "gpuaff/pinning/grant.py"),
    *(f"gpuaff/_system/{name}.py" for name in ("locks", "descriptors", "cuda", "env")),
    "gpuaff/_system/nvml_prewarm.py",
)


class Tracer:
    """Follows the calling thread line by line, and does something at one step."""

    def __init__(self, at: Step | None = None, act: Callable[[], None] | None = None) -> None:
        self.seen: Counter[tuple[str, int]] = Counter()
        self.at, self.act = at, act

    def follow(self, work: Callable[[], object]) -> None:
        """Do some work, and follow it."""
        sys.settrace(self._enter)
        try:
            work()
        finally:
            sys.settrace(None)

    def _enter(self, frame: FrameType, _event: str, _: Any) -> Any:
        ours = any(part in frame.f_code.co_filename for part in TRACED)
        return self._line if ours else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            place = (frame.f_code.co_filename, frame.f_lineno)
            self.seen[place] += 1
            if self.at == (*place, self.seen[place]) and self.act is not None:
                self.act()
        return self._line

    def steps(self) -> list[Step]:
        """The first and the last time that each line was come to."""
        return sorted({(*place, n) for place, last in self.seen.items() for n in (1, last)})


class Play:
    """What is tried on a machine, and for how long another process holds one GPU meanwhile."""

    def __init__(self, name: str, gpus: int) -> None:
        self.name, self.gpus = name, gpus
        self.held = {"refused": LIMIT, "wait": 0.05, "vain": LIMIT}.get(name, 0.0)

    def prepare(self) -> None:
        """What comes before the steps."""
        if self.name == "release":
            gpuaff.claim_gpus(2)

    def work(self) -> None:
        """The steps."""
        if self.name == "release":
            held = gpuaff.current_claim()
            assert held is not None
            held.release()
        elif self.name == "pin":
            before = os.sched_getaffinity(0)
            gpuaff.claim_gpus(1, pin=True)
            assert os.sched_getaffinity(0) < before, "nothing is pinned here, so nothing is tried"
        elif self.name == "refused":
            with suppress(gpuaff.GpusBusyError):
                gpuaff.claim_gpus(self.gpus)
            gpuaff.claim_gpus(self.gpus - 1)
        elif self.name == "vain":
            with suppress(gpuaff.ClaimTimeoutError):
                gpuaff.claim_gpus(self.gpus, wait=0.03)
        elif self.name == "wait":
            gpuaff.claim_gpus(self.gpus, wait=LIMIT)
        else:
            gpuaff.claim_gpus(2, placeholder=None if self.name == "lease" else "context")

    @contextmanager
    def other_holder(self) -> Iterator[None]:
        """Another process holds one GPU, for so long, if this is about one that waits."""
        if not self.held:
            yield
            return
        reader, writer = os.pipe()

        def hold() -> None:
            gpuaff.claim_gpus(1, placeholder=None)
            os.write(writer, b"1")
            time.sleep(self.held)

        made = Child(hold)
        os.read(reader, 1)
        os.close(reader)
        os.close(writer)
        try:
            yield
        finally:
            made.kill()
            made.said()

    def steps(self) -> list[Step]:
        """The steps of a good run."""

        def good() -> object:
            self.prepare()
            tracer = Tracer()
            tracer.follow(self.work)
            return tracer.steps()

        with self.other_holder():
            steps = Child(good).said()
        if isinstance(steps, str):
            raise SystemExit(steps)
        return [(file, line, n) for file, line, n in steps]

    def run_to(self, step: Step, act: Callable[[], None]) -> object:
        """Do something at a step, and go on."""
        self.prepare()
        Tracer(step, act).follow(self.work)
        return "done"

    # The two ways: what is wrong then.

    def kill(self, step: Step) -> list[str]:
        """Kill it there; then nothing is left, and another gets all."""
        with self.other_holder():
            said = Child(partial(self.run_to, step, kill_me)).said()
        return [*([] if said in (None, "done") else [str(said)]), *self.left()]

    def interrupt(self, step: Step) -> list[str]:
        """Ctrl-C there: all is as it was."""

        def interrupted() -> object:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            before, found, out = state(), [], False
            try:
                self.run_to(step, partial(signal.raise_signal, signal.SIGINT))
            except KeyboardInterrupt:
                out = True
            held = gpuaff.current_claim()
            if held is not None and out and self.name != "release":
                found.append("there is a claim")
            if held is not None:
                held.release()
            after = state()
            return [*found, *(f"{key} changed" for key in before if before[key] != after[key])]

        with self.other_holder():
            said = Child(interrupted).said()
        return [*(said if isinstance(said, list) else [str(said)]), *self.left()]

    def left(self) -> list[str]:
        """What the dead have left; then another process gets all GPUs."""
        found = held_locks()
        found += [f"slot {entry.slot} of the registry" for entry in registry.entries()]
        got = Child(lambda: len(gpuaff.claim_gpus(self.gpus, wait=2).gpus)).said()
        return found if got == self.gpus else [*found, f"then {got}"]


def kill_me() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Child:
    """A forked child that says one thing, or dies."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._reader)
            os.dup2(writer, 3)
            said: object
            try:
                said = work()
            except BaseException as error:  # noqa: BLE001 - told to the parent
                import traceback

                said = f"! {type(error).__name__}: {error} {traceback.format_exc()[-800:]}"
            with suppress(OSError):
                os.write(writer, json.dumps(said).encode())
            os._exit(0)
        os.close(writer)

    def said(self, limit: float = LIMIT) -> Any:
        """Wait for its end; what it said, None when it was killed before."""
        text, end = b"", time.monotonic() + limit
        while True:
            if not select.select([self._reader], [], [], max(0, end - time.monotonic()))[0]:
                self.kill()
                text = json.dumps(f"! it has not come to its end in {limit} s").encode()
                break
            piece = os.read(self._reader, 1 << 16)
            if not piece:
                break
            text += piece
        os.close(self._reader)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        return json.loads(text) if text else None

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def held_locks() -> list[str]:
    """The locks on files of the lock directory, and of safe_gpu."""
    folders = [Path(os.environ["GPUAFF_LOCK_DIR"])]
    if os.environ["GPUAFF_SAFE_GPU"] != "off":
        folders.append(Path(os.environ["GPUAFF_SAFE_GPU"]).parent)
    files = [file for folder in folders if folder.is_dir() for file in folder.iterdir()]
    names = {locks.identity(str(file)): file.name for file in files}
    return sorted(
        f"{names[lock.file]}: {lock.kind} {lock.pid}{' waits' if lock.is_waiting else ''}"
        for lock in locks.held_locks()
        if lock.file in names
    )


def state() -> dict[str, object]:
    """What a claim may change of this process."""
    gc.collect()
    files = {}
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            at = str(link.readlink())
            if "/fd" not in at and "/state" not in at:
                files[link.name] = at
    return {
        "environment": dict(os.environ),
        "files": files,
        "locks": [lock for lock in held_locks() if f" {os.getpid()}" in lock],
        "CPUs": os.sched_getaffinity(0),
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--play", required=True)
    parser.add_argument("--how", choices=("kill", "interrupt"), required=True)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--gpus", type=int, default=4, help="how many the machine has")
    args = parser.parse_args()
    sys.path.append(str(Path(__file__).parents[2]))
    from tests.claims.everything import import_all

    import_all()
    play = Play(args.play, args.gpus)
    steps = play.steps()
    tried = steps[args.first :: args.every]
    failures = {}
    for step in tried:
        found = getattr(play, args.how)(step)
        if found:
            file, line, n = step
            failures[f"{file.rpartition('gpuaff/')[2]}:{line} ({n})"] = found
    print(json.dumps({"steps": len(steps), "tried": len(tried), "failures": failures}))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
