"""Claimers in a crowd, as a test sees them: real processes, forks of the nursery."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gpuaff.topology.model import Topology
from tests.fakedriver.driver import FakeDriver
from tests.processes import Program, environment, nursery

Event = dict[str, Any]

_MEMBER = """
import json, sys
from tests.claims.crowd_member import member
member(sys.argv[1], **json.loads(sys.argv[2]))
"""
PATIENCE = 20.0
"""How long a test waits for what must happen, in seconds: these machines are shared."""


class Crowd:
    """Processes that claim GPUs of a fake driver."""

    def __init__(self, driver: FakeDriver, folder: Path) -> None:
        self.driver, self.folder = driver, folder
        self._programs: dict[str, Program] = {}
        self._seen: list[Event] = []
        self._new: list[Event] = []
        (folder / "events").touch()
        self._events, self._half = (folder / "events").open(), ""

    @property
    def variables(self) -> Mapping[str, str]:
        locks = str(self.folder / "locks")
        return {**self.driver.env(), "GPUAFF_LOCK_DIR": locks, "GPUAFF_SAFE_GPU": "off"}

    @property
    def pids(self) -> Mapping[str, int]:
        return {who: program.pid for who, program in self._programs.items()}

    def start(
        self, who: str, n: int = 1, *, raises: bool = False, user: int = 0, **claim: Any
    ) -> int:
        """Let somebody claim; returns the process id."""
        forks = nursery(self.variables["LD_LIBRARY_PATH"])
        claim = {"n": n, "placeholder": None, **claim}
        order = json.dumps({"raises": raises, "user": user, "claim": claim})
        program = forks.start(
            _MEMBER, who, order, env=environment(self.variables), folder=self.folder
        )
        self._programs[who] = program
        self.until(who, "begins")
        program.out.close()  # 200 of them need many descriptors
        return program.pid

    def holds(self, who: str, n: int = 1, **claim: Any) -> list[int]:
        """Let somebody claim who gets it at once; returns the GPUs."""
        self.start(who, n, **claim)
        return list(self.until(who, "has")["gpus"])

    def waits(self, who: str, n: int = 1, **claim: Any) -> Event:
        """Let somebody claim who must wait; returns what is said of that."""
        self.start(who, n, **{"wait": None, **claim})
        return self.until(who, "waits")

    def tell(self, who: str, word: str) -> None:
        self._programs[who].go_on(word)

    def kill(self, who: str, sent: int = signal.SIGKILL) -> None:
        os.kill(self.pids[who], sent)

    def until(self, who: str, event: str, *, patience: float = PATIENCE, **more: object) -> Event:
        """Wait until that has happened, and return it; each event is returned once."""
        end = time.monotonic() + patience
        wanted = {"who": who, "event": event, **more}.items()
        while True:
            for one in self._new:
                if wanted <= one.items():
                    self._new.remove(one)
                    return one
                assert not (one["who"] == who and one["event"] == "fails"), one
            assert time.monotonic() < end, f"{who} never {event} {more}: {self._seen[-9:]}"
            self._hear()

    def _hear(self) -> list[Event]:
        """What has happened since; if nothing has, a moment later."""
        *lines, self._half = (self._half + self._events.read()).split("\n")
        heard = [json.loads(line) for line in lines]
        self._seen += heard
        self._new += heard
        if not heard:
            time.sleep(0.002)
        return heard

    def nothing(self, *events: str, seconds: float = 0.3) -> None:
        """Nothing like that may happen for a while."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert not [one for one in self._hear() if one["event"] in events]

    def order(self, event: str) -> list[str]:
        """Who has had that happen, in order."""
        return [one["who"] for one in self._seen if one["event"] == event]

    def end(self) -> None:
        for program in self._programs.values():
            program.close()
        self._hear()
        for child in [one["child"] for one in self._seen if one["event"] == "forked"]:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        self._events.close()


@contextmanager
def crowd(driver: FakeDriver, folder: Path) -> Iterator[Crowd]:
    """A crowd that is gone at the end."""
    found = Crowd(driver, folder)
    try:
        yield found
    finally:
        found.end()


@contextmanager
def open_to_all(topology: Topology) -> Iterator[Crowd]:
    """A crowd of several users; pytest's own folders are closed to all but one."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o1777)
        driver = FakeDriver(topology, folder / "driver")
        driver.share()
        with crowd(driver, folder) as found:
            yield found


def serve(
    of: Crowd, wishes: Mapping[str, int], killed: Collection[str], users: Sequence[int]
) -> int:
    """Let many wait before eight GPUs, kill some, and give GPUs back one by one.

    ``wishes`` says who wants how many, in the order in which they come, as the ``users`` in turns.
    Returns how many were served; an AssertionError where that was not in their order. GPUs that
    become free together may go to several at once: who of them is heard first does not matter.
    """
    holders = deque((f"first{place}", 1) for place in range(8))
    for who, _ in holders:
        of.holds(who)
    for place, (who, n) in enumerate(wishes.items()):
        of.waits(who, n, user=users[place % len(users)])
    for who in killed:
        of.kill(who)
    served, free = 0, 0
    left = deque(who for who in wishes if who not in killed)
    while left:
        while free < wishes[left[0]]:
            other, had = holders.popleft()
            of.tell(other, "end")
            free += had
        while left and wishes[left[0]] <= free:
            who = left.popleft()
            of.until(who, "has")
            served, free = served + 1, free - wishes[who]
            holders.append((who, wishes[who]))
        assert len(of.order("has")) == 8 + served  # nobody else was
    return served
