"""A claim that is killed, stopped or interrupted at each of its steps, one after the other.

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
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import gpuaff
from gpuaff._system import locks
from gpuaff._system.nvml import open_session
from gpuaff.claims.locking import registry
from gpuaff.errors import CudaInitializedError

Step: TypeAlias = "tuple[str, int, int]"
"""A file, a line, and the how-manieth time."""

GPUS = 4
SAFE = os.environ.get("GPUAFF_SAFE_GPU", "off").rpartition("/")[0] or "off"
LIMIT = 20.0
"""Seconds that a child may take."""
TRACED = (
    "gpuaff/claims/",
    "gpuaff/pinning/grant.py",
    "gpuaff/_system/locks.py",
    "gpuaff/_system/descriptors.py",
    "gpuaff/_system/cuda.py",
    "gpuaff/_system/env.py",
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


# ---- what is tried: before the steps, and the steps ------------------------------------------

HELD: list[gpuaff.Claim] = []
"""What a play has claimed before its steps."""


def nothing() -> None:
    """No step comes before."""


def claim() -> None:
    gpuaff.claim_gpus(2)


def claim_one_without_context() -> None:
    gpuaff.claim_gpus(1, placeholder=None)


def claim_before() -> None:
    HELD.append(gpuaff.claim_gpus(2))


def release() -> None:
    HELD.pop().release()


def claim_pinned() -> None:
    before = os.sched_getaffinity(0)
    gpuaff.claim_gpus(1, pin=True)
    assert os.sched_getaffinity(0) < before, "nothing is pinned here, so nothing is tried"


def refused() -> None:
    with suppress(gpuaff.errors.GpusBusyError):
        gpuaff.claim_gpus(GPUS)
    gpuaff.claim_gpus(GPUS - 1)


def wait_for_all() -> None:
    gpuaff.claim_gpus(GPUS, wait=LIMIT)


def wait_in_vain() -> None:
    with suppress(gpuaff.errors.ClaimTimeoutError):
        gpuaff.claim_gpus(GPUS, wait=0.03)


PLAYS: dict[str, tuple[Callable[[], None], Callable[[], None], float]] = {
    "claim": (nothing, claim, 0),
    "lease": (nothing, claim_one_without_context, 0),
    "release": (claim_before, release, 0),
    "pin": (nothing, claim_pinned, 0),
    "refused": (nothing, refused, LIMIT),
    "wait": (nothing, wait_for_all, 0.05),
    "vain": (nothing, wait_in_vain, LIMIT),
}
"""What is done before, what is tried, and for how long somebody else holds one GPU meanwhile."""


# ---- children --------------------------------------------------------------------------------


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

    def stopped(self) -> bool:
        """Wait until it is stopped (True), or has ended."""
        return os.WIFSTOPPED(os.waitpid(self.pid, os.WUNTRACED)[1])

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


def holding(seconds: float) -> Child | None:
    """Somebody who holds one GPU for so long."""
    if not seconds:
        return None
    reader, writer = os.pipe()

    def hold() -> None:
        gpuaff.claim_gpus(1, placeholder=None)
        os.write(writer, b"1")
        time.sleep(seconds)

    made = Child(hold)
    os.close(writer)
    os.read(reader, 1)
    os.close(reader)
    return made


# ---- what is looked at -----------------------------------------------------------------------


def held_locks() -> list[str]:
    """The locks on files of the lock directory, and of safe_gpu."""
    folders = [Path(os.environ["GPUAFF_LOCK_DIR"])]
    safe = os.environ.get("GPUAFF_SAFE_GPU", "off")
    if safe != "off":
        folders.append(Path(safe).parent)
    names = {
        locks.identity(str(file)): file.name
        for folder in folders
        if folder.is_dir()
        for file in folder.iterdir()
    }
    return sorted(
        f"{names[lock.file]}: {lock.kind} {lock.pid}{' waits' if lock.is_waiting else ''}"
        for lock in locks.held_locks()
        if lock.file in names
    )


def left() -> list[str]:
    """What the dead have left."""
    return [*held_locks(), *(f"slot {entry.slot} on the board" for entry in registry.entries())]


def take_all() -> object:
    """Another process: it must get all GPUs; those of the dead at once, but for the driver."""
    made = gpuaff.claim_gpus(GPUS, wait=2)
    return len(made.gpus)


def contexts() -> list[int]:
    """The GPUs that this process has a context on."""
    with open_session() as session:
        listed = [(one.device.index, one.compute or {}) for one in session.look()]
    return [index for index, pids in listed if os.getpid() in pids]


def state() -> dict[str, Any]:
    """All of this process that a claim may change."""
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
        "locks": held_locks(),
        "CPUs": str(sorted(os.sched_getaffinity(0))),  # fewer are as wrong as more
        "contexts": contexts(),
        "claim": repr(gpuaff.current_claim()),
        "board": [entry.slot for entry in registry.entries()],
        "threads": sorted(t.name for t in threading.enumerate() if t.name != "gpuaff-queue"),
    }


# ---- the three ways --------------------------------------------------------------------------


def traced(play: str) -> list[Step]:
    """The steps of a good run."""
    before, work, seconds = PLAYS[play]

    def good() -> object:
        before()
        tracer = Tracer()
        tracer.follow(work)
        return tracer.steps()

    other = holding(seconds)
    child = Child(good)
    steps = child.said()
    if other is not None:
        other.kill()
        other.said()
    if isinstance(steps, str):
        raise SystemExit(steps)
    return [(file, line, n) for file, line, n in steps]


def run_to(play: str, step: Step, act: Callable[[], None]) -> object:
    before, work, _ = PLAYS[play]
    before()
    Tracer(step, act).follow(work)
    return "done"


def killed(play: str, step: Step) -> list[str]:
    """Kill it there; then nothing is left, and another gets all."""
    other = holding(PLAYS[play][2])
    said = Child(partial(run_to, play, step, _die)).said()
    if other is not None:
        other.kill()
        other.said()
    found = left()
    if said is not None and said != "done":
        found.append(str(said))
    got = Child(take_all).said()
    if got != GPUS:
        found.append(f"then {got}")
    return found


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stopped(play: str, step: Step) -> list[str]:
    """Stop it there; others go on as far as they can, and so does it when it is continued."""
    other = holding(PLAYS[play][2])
    child = Child(partial(run_to, play, step, _stop))
    found = []
    if child.stopped():
        meanwhile = Child(one_gpu)
        said = meanwhile.said(0.3)
        if said not in ("got", "GpusBusyError") and "not come to its end" not in str(said):
            found.append(f"meanwhile {said}")
        os.kill(child.pid, signal.SIGCONT)
    said = child.said()
    if said != "done" and "GpusBusyError" not in str(said):
        found.append(f"continued: {said}")
    if other is not None:
        other.kill()
        other.said()
    found += left()
    got = Child(take_all).said()
    if got != GPUS:
        found.append(f"then {got}")
    return found


def one_gpu() -> object:
    try:
        gpuaff.claim_gpus(1)
    except gpuaff.errors.GpusBusyError as error:
        return type(error).__name__
    return "got"


class Interrupt:
    def __init__(self) -> None:
        self.came = False
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __call__(self) -> None:
        self.came = True
        signal.raise_signal(signal.SIGINT)


def interrupted(play: str, step: Step) -> list[str]:
    """Ctrl-C there: all is as it was, and the same process can claim."""
    other = holding(PLAYS[play][2])
    found = Child(partial(interrupt, play, step)).said()
    if other is not None:
        other.kill()
        other.said()
    return [found] if isinstance(found, str) else [*(found or ["it died"]), *left()][1:]


def interrupt(play: str, step: Step) -> list[str]:
    before, work, _ = PLAYS[play]
    at_first = state()
    before()
    act, out = Interrupt(), False
    try:
        Tracer(step, act).follow(work)
    except KeyboardInterrupt:
        out = True
    found = ["looked"]
    if act.came and not out:
        found.append("Ctrl-C was swallowed")
    complete = gpuaff.current_claim()
    if complete is not None and (not out or play == "release"):
        complete.release()  # it was not interrupted, or before it had begun
    elif complete is not None:
        found.append("there is a claim")
        complete.release()
    found += lasting(at_first)
    return found + again(PLAYS[play][2] > 1)


def again(somebody_holds_one: bool) -> list[str]:
    try:
        gpuaff.claim_gpus(2, placeholder=None).release()
    except CudaInitializedError:
        return []
    except BaseException as error:  # noqa: BLE001 - it is what is told
        return [f"then {type(error).__name__}: {error}"]
    return [f"after another claim: {one}" for one in held_locks() if f" {os.getpid()}" in one]


def added(before: Any, after: Any) -> bool:
    """Whether something is different; of lists only more counts: others give back meanwhile."""
    if isinstance(before, list):
        return bool(Counter(after) - Counter(before))
    return bool(before != after)


def lasting(before: dict[str, Any]) -> list[str]:
    """What is different for longer than a moment.

    A thread may be ending still, and the kernel may tell a lock twice while others come and go.
    """
    for pause in (0, 0.03, 0.3):
        time.sleep(pause)
        after = state()
        found = [
            f"{what}: {changed(before[what], after[what])}"
            for what in before
            if added(before[what], after[what])
        ]
        if not found:
            break
    return found


def changed(before: Any, after: Any) -> str:
    if not isinstance(before, dict):
        return f"{before} -> {after}"
    keys = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    return ", ".join(f"{key}: {before.get(key)} -> {after.get(key)}" for key in keys)


WAYS = {"kill": killed, "stop": stopped, "interrupt": interrupted}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--play", choices=PLAYS, required=True)
    parser.add_argument("--how", choices=WAYS, required=True)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--gpus", type=int, default=GPUS, help="how many the machine has")
    args = parser.parse_args()
    globals()["GPUS"] = args.gpus
    sys.path.append(str(Path(__file__).parents[2]))
    from tests.claims.everything import import_all

    import_all()
    start = time.monotonic()
    steps = traced(args.play)
    failures: dict[str, list[str]] = {}
    tried = steps[args.first :: args.every]
    for step in tried:
        found = WAYS[args.how](args.play, step)
        if found:
            file, line, n = step
            failures[f"{file.rpartition('gpuaff/')[2]}:{line} ({n})"] = found
    seconds = round(time.monotonic() - start, 1)
    print(
        json.dumps(
            {"steps": len(steps), "tried": len(tried), "seconds": seconds, "failures": failures}
        )
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
