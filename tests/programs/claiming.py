"""What programs that claim begin with (claim_lab.py): talk by lines, and looks at themselves."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import gpuaff
from gpuaff._system import cuda


def go_on() -> str:
    return sys.stdin.readline()


def hang() -> None:
    """Not in one long sleep: a signal that comes just before that call would not end it."""
    while True:
        time.sleep(0.05)


def say(*what: object) -> None:
    sys.stdout.write(" ".join(map(str, what)) + "\n")  # at once: children may print as well
    sys.stdout.flush()


def handles() -> dict[str, str]:
    """The open files, without those of the fake driver."""
    driver = Path(os.environ["GPUAFF_FAKE_STATE"]).parent
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found[link.name] = str(link.readlink())
    return {
        n: at for n, at in found.items() if "/proc/" not in at and not at.startswith(f"{driver}/")
    }


def locked() -> list[tuple[str, str]]:
    """What this process has locked.

    Not by /proc/locks: that leaves some out, or tells them twice, while others come and go.
    """
    infos = {at: Path(f"/proc/self/fdinfo/{n}").read_text() for n, at in handles().items()}
    lines = [(at, line) for at, info in infos.items() for line in info.splitlines()]
    return sorted((at, line.split(maxsplit=2)[2]) for at, line in lines if line[:5] == "lock:")


def state() -> dict[str, Any]:
    """What a claim may change of this process."""
    # Not by /proc: a thread that was joined may stand there for a moment.
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    tids = [os.getpid(), *(thread.native_id for thread in others if thread.native_id)]
    cpus = {}
    for tid in tids:
        with suppress(ProcessLookupError):  # it has ended since
            cpus[tid] = sorted(os.sched_getaffinity(tid))
    return {
        "env": dict(os.environ),
        "cpus": cpus,
        "handles": handles(),
        "locks": locked(),
        "claim": gpuaff.current_claim(),
    }


def differs(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    both = before["cpus"].keys() & after["cpus"].keys()  # a thread that wakes the driver may end
    before, after = ({**one, "cpus": {t: one["cpus"][t] for t in both}} for one in (before, after))
    return {key: (before[key], after[key]) for key in before if before[key] != after[key]}


def refused(*arguments: Any, **options: Any) -> BaseException:
    """What a claim raises; and everything is as it was."""
    before = state()
    try:
        claim = gpuaff.claim_gpus(*arguments, **options)
    except BaseException as error:  # noqa: BLE001 - told
        caught = error
    else:
        raise AssertionError(f"it was not refused: {claim}")
    after = state()
    assert not differs(before, after), (differs(before, after), repr(caught))
    return caught


def told(error: BaseException) -> None:
    say(type(error).__name__, str(error).replace("\n  ", " | "))


def occupant_that_waits() -> Callable[[int], None]:
    """A placeholder that makes its context, and then lets others act."""
    contexts = ExitStack()

    def occupant(_: int) -> None:
        cuda.start()
        cuda.retain(0, contexts)
        say("now")
        go_on()

    occupant.release = lambda _: contexts.close()  # type: ignore[attr-defined]  # functions may have any
    return occupant


def indices(claim: gpuaff.Claim) -> list[int]:
    return [gpu.index for gpu in claim.gpus]


def shown(claim: gpuaff.Claim) -> None:
    say(os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER"))
    say(*((gpu.index, gpu.local) for gpu in claim.gpus))
    say(*(warning.code for warning in claim.warnings))
