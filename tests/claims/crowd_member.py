"""A crowd: a process that forks claimers, so that each of them costs no imports.

Reads commands, a JSON object a line: ``{"start": NAME, "claim": {...}}`` forks a claimer, whose
words are told to it by ``{"tell": NAME, "do": WORD}``: release, fork (a child that shares all) or
end.
``"user"`` makes it another user.
Claimers print what happens to them, a JSON object a line. :class:`claims.crowd.Crowd` talks so.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def say(who: str, event: str, **more: object) -> None:
    line = {"who": who, "pid": os.getpid(), "event": event, "at": time.monotonic(), **more}
    os.write(1, f"{json.dumps(line)}\n".encode())


def member(order: Mapping[str, Any], words: int) -> None:
    who = order["start"]
    if user := order.get("user"):
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    before = descriptors()
    import gpuaff

    claim: gpuaff.Claim | None = None

    def on_wait(now: gpuaff.Waiting) -> None:
        say(
            who,
            "waits",
            position=now.position,
            free=now.free,
            wanted=now.wanted,
            reasons=now.reasons,
            main=threading.current_thread() is threading.main_thread(),
        )
        if order.get("raises"):
            raise ArithmeticError("of the callback's own")

    say(who, "begins")
    try:
        claim = made = gpuaff.claim_gpus(**{"on_wait": on_wait, **order["claim"]})
    except BaseException as error:  # noqa: BLE001 - told to the test
        del order
        claim = None
        say(
            who,
            "fails",
            error=type(error).__name__,
            text=str(error),
            left=sorted(descriptors() - before),
        )
    else:
        say(who, "has", gpus=[gpu.index for gpu in made.gpus])
    for word in os.fdopen(words):
        if word == "release\n" and claim is not None:
            claim.release()
            say(who, "released")
        elif word == "fork\n":
            child = os.fork()
            if child == 0:
                signal.pause()
            say(who, "forked", child=child)
        elif word == "end\n":
            break
    os._exit(0)


def descriptors() -> set[str]:
    """What is open."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            found.add(str(link.readlink()))
        except OSError:  # the listing's own
            continue
    return found


def main() -> None:
    # Once for all, and for those who may not read our files.
    import logging  # noqa: F401 - so that it is there

    import psutil  # noqa: F401 - likewise
    import pynvml  # noqa: F401 - likewise

    import gpuaff._system.processes
    import gpuaff.claims.acquire
    import gpuaff.claims.locking.safe_gpu
    import gpuaff.formatting
    import gpuaff.topology.live  # noqa: F401 - likewise

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    ends: dict[str, int] = {}
    for line in sys.stdin:
        order = json.loads(line)
        if "tell" in order:
            os.write(ends[order["tell"]], f"{order['do']}\n".encode())
            continue
        words, ends[order["start"]] = os.pipe()
        if os.fork() == 0:
            for end in ends.values():
                os.close(end)
            member(order, words)
        os.close(words)


if __name__ == "__main__":
    main()
