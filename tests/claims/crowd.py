"""Claimers in a crowd, as a test sees them: real processes, forked by ``crowd_member.py``."""

from __future__ import annotations

import json
import os
import queue
import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from gpuaff.topology.model import Topology
from tests.fakedriver.driver import FakeDriver
from tests.processes import stopped

Event = dict[str, Any]

_MEMBERS = f"""
import os, runpy, sys
os.setsid()  # all of them are killed at the end
runpy.run_path({str(Path(__file__).with_name("crowd_member.py"))!r}, run_name="__main__")
"""
PATIENCE = 20.0
"""How long a test waits for what must happen, in seconds: these machines are shared."""


class Crowd:
    """Processes that claim GPUs of a fake driver."""

    def __init__(self, driver: FakeDriver, folder: Path) -> None:
        self.driver, self.folder = driver, folder
        self.pids: dict[str, int] = {}
        self.seen: list[Event] = []
        self._new: list[Event] = []
        self._heard: queue.Queue[Event] = queue.Queue()
        self._ends = ExitStack()
        self._program = self._ends.enter_context(stopped(_MEMBERS, env=self.variables))
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @property
    def variables(self) -> Mapping[str, str]:
        locks = str(self.folder / "locks")
        return {**self.driver.env(), "GPUAFF_LOCK_DIR": locks, "GPUAFF_SAFE_GPU": "off"}

    def start(
        self, who: str, n: int = 1, *, raises: bool = False, user: int = 0, **claim: Any
    ) -> int:
        """Let somebody claim; returns the process id."""
        wish = {"n": n, "placeholder": None, **claim}
        self._order(start=who, raises=raises, user=user, claim=wish)
        self.pids[who] = int(self.until(who, "begins")["pid"])
        return self.pids[who]

    def holds(self, who: str, n: int = 1, **claim: Any) -> list[int]:
        """Let somebody claim who gets it at once; returns the GPUs."""
        self.start(who, n, **claim)
        return list(self.until(who, "has")["gpus"])

    def waits(self, who: str, n: int = 1, **claim: Any) -> Event:
        """Let somebody claim who must wait; returns what is said of that."""
        self.start(who, n, **{"wait": None, **claim})
        return self.until(who, "waits")

    def tell(self, who: str, word: str) -> None:
        self._order(tell=who, do=word)

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
            try:
                self._hear(end)
            except queue.Empty:
                raise AssertionError(f"{who} never {event} {more}: {self.seen[-9:]}") from None

    def _hear(self, end: float) -> Event:
        one = self._heard.get(timeout=max(0.0, end - time.monotonic()))
        self.seen.append(one)
        self._new.append(one)
        return one

    def nothing(self, *events: str, seconds: float = 0.3) -> None:
        """Nothing like that may happen for a while."""
        end = time.monotonic() + seconds
        with suppress(queue.Empty):
            while True:
                one = self._hear(end)
                assert one["event"] not in events, one

    def order(self, event: str) -> list[str]:
        """Who has had that happen, in order."""
        return [one["who"] for one in self.seen if one["event"] == event]

    def _order(self, **order: Any) -> None:
        self._program.go_on(json.dumps(order))

    def _listen(self) -> None:
        for line in self._program.out:
            self._heard.put(json.loads(line))

    def end(self) -> None:
        os.killpg(self._program.pid, signal.SIGKILL)
        self._listener.join(PATIENCE)
        self._ends.close()


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
