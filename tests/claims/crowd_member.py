"""A claimer of :class:`tests.claims.crowd.Crowd`, which writes what happens to it into a file."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any, NoReturn

import gpuaff
from tests.programs.claiming import handles


def member(who: str, *, raises: bool, user: int, claim: dict[str, Any]) -> NoReturn:
    """Claim, as another user where one is named; then do what is told: release, fork or end."""
    events = os.open("events", os.O_WRONLY | os.O_APPEND)
    if user:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    before = set(handles().values())

    def say(event: str, **more: object) -> None:
        line = {"who": who, "pid": os.getpid(), "event": event, "at": time.monotonic(), **more}
        os.write(events, f"{json.dumps(line)}\n".encode())

    def on_wait(now: gpuaff.Waiting) -> None:
        found = {name: getattr(now, name) for name in ("position", "free", "wanted", "reasons")}
        say("waits", **found)
        if raises:
            raise ArithmeticError("of the callback's own")

    say("begins")
    try:
        made = gpuaff.claim_gpus(on_wait=on_wait, **claim)
        say("has", gpus=[gpu.index for gpu in made.gpus])
    except BaseException as error:  # noqa: BLE001 - told to the test
        left = sorted({*handles().values()} - before)
        say("fails", error=type(error).__name__, text=str(error), left=left)
    for word in map(str.strip, sys.stdin):
        if word == "release":
            made.release()
            say("released")
        elif word == "fork":
            child = os.fork()
            if child == 0:
                signal.pause()
            say("forked", child=child)
        elif word == "end":
            break
    os._exit(0)
