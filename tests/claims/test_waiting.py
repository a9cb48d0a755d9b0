"""Waiting for GPUs: who is served, when, and what is left of those who gave up.

Real processes on the fake driver. How fast they are woken is for benchmarks/claims.py: here it
only counts that it happens, and in which order.
"""

from __future__ import annotations

import os
import pwd
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuaff.claims.locking import registry
from gpuaff.claims.locking.queue import TOO_LONG
from gpuaff.topology.model import Topology
from tests.claims.crowd import Crowd, crowd, open_to_all, serve
from tests.fakedriver.driver import MakeDriver
from tests.fakedriver.play import this_machine
from tests.processes import stopped

pytestmark = pytest.mark.fake_driver

ME = pwd.getpwuid(os.geteuid()).pw_name

MIB = 1 << 20


@pytest.fixture
def four(fake_driver: MakeDriver, tmp_path: Path) -> Iterator[Crowd]:
    """A crowd before four GPUs."""
    driver = fake_driver(this_machine(4))
    with crowd(driver, tmp_path) as found:
        yield found


@pytest.fixture
def one(fake_driver: MakeDriver, tmp_path: Path) -> Iterator[Crowd]:
    """A crowd before one GPU."""
    with crowd(fake_driver(this_machine(1)), tmp_path) as found:
        yield found


def on_board(of: Crowd, monkeypatch: pytest.MonkeyPatch) -> set[int | None]:
    """The processes that stand on the board."""
    monkeypatch.setenv("GPUAFF_LOCK_DIR", str(of.folder / "locks"))
    return {entry.pid for entry in registry.entries()}


class TestWoken:
    def test_by_a_release(self, one: Crowd) -> None:
        one.holds("a")
        assert one.waits("b", wait=float("inf"))["position"] == 0  # as None
        one.tell("a", "release")
        assert one.until("b", "has")["gpus"] == [0]

    def test_by_the_death_of_the_holder(self, one: Crowd) -> None:
        one.holds("a", placeholder="context")
        one.waits("b", placeholder="context")
        one.kill("a")
        one.until("b", "has")
        assert one.driver.double_holdings() == []

    def test_by_the_end_of_a_child_that_shares_the_lease(self, one: Crowd) -> None:
        one.holds("a")
        one.tell("a", "fork")
        child = one.until("a", "forked")["child"]
        one.waits("b")
        one.kill("a")
        one.nothing("has", seconds=0.5)
        os.kill(child, signal.SIGKILL)
        one.until("b", "has")

    def test_by_the_end_of_a_process_without_a_lease(self, one: Crowd) -> None:
        with subprocess.Popen(["sleep", "60"]) as stranger:
            one.driver.use(0, stranger.pid)
            (reason,) = one.waits("a")["reasons"]
            assert f"(pid {stranger.pid})" in reason
            stranger.kill()
        one.until("a", "has")

    def test_by_time_when_unexplained_memory_goes(self, one: Crowd) -> None:
        one.driver.set_memory_used(0, 500 * MIB)
        (reason,) = one.waits("a")["reasons"]
        assert "503 MiB are in use that no visible process explains" in reason
        one.driver.set_memory_used(0, 0)
        one.until("a", "has")


class TestOrder:
    def test_first_come_first_served(self, one: Crowd) -> None:
        one.holds("a")
        for place, who in enumerate("bcd"):
            assert one.waits(who)["position"] == place
        for before, who in zip("abc", "bcd", strict=True):
            one.tell(before, "end")
            one.until(who, "has")
        assert one.order("has") == list("abcd")

    def test_nobody_passes_one_who_waits_for_the_same(self, four: Crowd) -> None:
        """So a waiter for four is not starved by many who want one, and they are told of it."""
        four.holds("a", gpus=[0])
        waiter = four.waits("b", 4)
        assert (waiter["wanted"], waiter["free"]) == (4, 3)
        for turn in range(5):
            four.start(f"c{turn}", wait=0)
            refused = four.until(f"c{turn}", "fails")
            assert refused["error"] == "GpusBusyError"
            waiting = f"(pid {four.pids['b']}) of {ME}, who waits for 4 of them"
            assert refused["text"].count(waiting) == 3
        four.tell("a", "release")
        assert four.until("b", "has")["gpus"] == [0, 1, 2, 3]

    def test_a_waiter_for_one_gpu_keeps_no_other_from_those_who_do_not_wait(
        self, four: Crowd
    ) -> None:
        four.holds("a", gpus=[0])
        four.waits("b", gpus=[0])
        taken = {*four.holds("c"), *four.holds("d", 2)}
        assert taken == {1, 2, 3}
        four.start("e", wait=0)
        refused = four.until("e", "fails")
        assert (refused["error"], "kept for" in refused["text"]) == ("GpusBusyError", False)

    def test_a_waiter_behind_takes_what_no_earlier_waiter_wants(self, four: Crowd) -> None:
        """While the earlier one waits on; and the other way round."""
        for number in range(4):
            four.holds(f"a{number}", gpus=[number])
        four.waits("b", gpus=[0])
        assert four.waits("c", candidates=[0, 1])["position"] == 1
        four.tell("a1", "release")
        assert four.until("c", "has", patience=5)["gpus"] == [1]
        assert four.waits("d", 2, candidates=[0, 2, 3])["position"] == 1
        four.tell("a0", "release")
        assert four.until("b", "has", patience=5)["gpus"] == [0]
        four.tell("a2", "release")
        four.nothing("has")
        four.tell("a3", "release")
        assert four.until("d", "has", patience=5)["gpus"] == [2, 3]

    def test_a_waiter_is_served_when_the_one_in_its_way_gives_up(self, four: Crowd) -> None:
        four.holds("a", 3, gpus=[0, 1, 2])
        four.waits("b", 4)
        four.waits("c", gpus=[1])
        assert four.waits("d", candidates=[1, 3])["position"] == 2
        four.kill("b")
        assert four.until("d", "has")["gpus"] == [3]

    def test_a_gpu_that_a_waiter_can_never_use_is_not_kept_for_it(
        self, fake_driver: MakeDriver, tmp_path: Path
    ) -> None:
        driver = fake_driver(this_machine(2))
        driver.set_memory_total(0, 40 << 30)
        with crowd(driver, tmp_path) as found:
            found.holds("a", gpus=[1])
            found.waits("b", min_free_memory=60 << 30)
            assert found.holds("c") == [0]

    def test_a_dead_one_does_not_count(self, one: Crowd) -> None:
        one.holds("a")
        for who in "bcd":
            one.waits(who)
        one.kill("c")
        one.kill("b")
        one.until("d", "waits", position=0)
        one.tell("a", "release")
        one.until("d", "has")

    @pytest.mark.slow
    def test_who_is_stopped_is_passed_over_and_goes_on_later(self, one: Crowd) -> None:
        one.holds("a", placeholder="context")
        for who in "bcd":
            one.waits(who, placeholder="context")
        one.kill("b", signal.SIGSTOP)
        one.tell("a", "end")
        one.until("c", "has")
        one.kill("b", signal.SIGCONT)
        one.nothing("has")
        one.tell("c", "end")
        one.until("b", "has")  # it came before d
        one.tell("b", "end")
        one.until("d", "has")
        assert one.driver.double_holdings() == []

    @pytest.mark.slow
    def test_it_is_not_told_again_while_nothing_changes(self, one: Crowd) -> None:
        """Though the words say for how long it has been leased."""
        one.holds("a")
        one.waits("b")
        one.nothing("waits", seconds=2.5)

    def test_a_later_waiter_is_told_once_while_nothing_changes(self, one: Crowd) -> None:
        """Though the driver is asked before it joins the queue, and not while others are first."""
        one.holds("a")
        one.waits("b")
        one.waits("c")
        one.nothing("waits", seconds=0.5)

    def test_the_time_out_of_a_later_waiter_names_a_holder_that_has_ended(self, one: Crowd) -> None:
        one.holds("a")
        one.tell("a", "fork")
        one.until("a", "forked")
        one.waits("b")
        one.kill("a")
        one.start("c", wait=0.4)
        text = str(one.until("c", "fails")["text"])
        assert f"(pid {one.pids['a']})" in text
        assert "which has ended; children hold it" in text

    @pytest.mark.slow
    def test_who_hangs_in_the_driver_holds_nobody_up(self, one: Crowd) -> None:
        """Not those behind it, for long, and not those who want something else at all."""
        one.driver.set_memory_used(0, 500 * MIB)
        stuck = one.start("stuck", wait=None)
        one.until("stuck", "waits")
        one.waits("b")
        one.driver.hang("nvmlDeviceGetMemoryInfo_v2", pid=stuck)
        time.sleep(1.5)
        one.driver.set_memory_used(0, 0)
        begun = time.monotonic()
        one.until("b", "has")
        assert time.monotonic() - begun < TOO_LONG + 5

    @pytest.mark.slow
    def test_two_hundred(self) -> None:
        """For one GPU and for four, of three users where that can be, and some are killed."""
        with open_to_all(Topology.named("dgx-a100")) as many:
            rng = random.Random(1)
            wishes = {f"w{place}": 4 if rng.random() < 0.3 else 1 for place in range(200)}
            killed = rng.sample(sorted(wishes), 40)
            users = (0, 54321, 54322) if os.geteuid() == 0 else (0,)
            assert serve(many, wishes, killed, users) == 160


class TestGivingUp:
    @pytest.mark.parametrize("place", ["first", "behind"])
    def test_ctrl_c_leaves_nothing(
        self, one: Crowd, monkeypatch: pytest.MonkeyPatch, place: str
    ) -> None:
        one.holds("a")
        if place == "behind":
            one.waits("b")
        one.waits("c")
        before = on_board(one, monkeypatch)
        assert one.pids["c"] in before
        time.sleep(0.1)  # let it fall asleep
        sent = time.monotonic()
        one.kill("c", signal.SIGINT)
        failed = one.until("c", "fails")
        assert failed["error"] == "KeyboardInterrupt"
        assert failed["at"] - sent < 5  # at once, on a machine that is not shared
        assert failed["left"] == []
        assert on_board(one, monkeypatch) == before - {one.pids["c"]}

    @pytest.mark.parametrize("place", ["first", "behind"])
    def test_in_time(self, one: Crowd, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
        one.holds("a")
        if place == "behind":
            one.waits("b")
        one.start("c", wait=0.3)
        failed = one.until("c", "fails")
        assert failed["error"] == "ClaimTimeoutError"
        assert "GPU 0: leased by" in failed["text"]
        assert f"(pid {one.pids['a']})" in failed["text"]
        assert failed["left"] == []
        assert one.pids["c"] not in on_board(one, monkeypatch)

    def test_what_the_callback_raises(self, one: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
        one.holds("a")
        one.start("b", wait=None, raises=True)
        failed = one.until("b", "fails")
        assert (failed["error"], failed["left"]) == ("ArithmeticError", [])
        assert on_board(one, monkeypatch) == {one.pids["a"]}


def test_a_child_that_is_forked_meanwhile_keeps_no_place(one: Crowd) -> None:
    """Nor a lock of the queue: those behind would wait for a process that does not wait."""
    script = """
        import os, threading, time
        import gpuaff
        def fork(waiting):
            def work():
                child = os.fork()
                if child == 0:
                    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
                    time.sleep(60)
                    os._exit(0)
                print(child)
            threading.Thread(target=work).start()
        gpuaff.claim_gpus(placeholder=None, wait=None, on_wait=fork)
    """
    one.holds("a")
    with stopped(script, env=one.variables) as parent:
        child = int(parent.heard())
        one.start("b", wait=None)
        one.until("b", "waits")
        parent.kill()
        try:
            one.until("b", "waits", position=0)
            one.tell("a", "end")
            one.until("b", "has")
        finally:
            os.kill(child, signal.SIGKILL)


def test_the_log(one: Crowd) -> None:
    script = """
        import logging, sys
        import gpuaff
        logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(name)s %(message)s")
        gpuaff.claim_gpus(placeholder=None, wait=None)
        print("served")
    """
    one.holds("a")
    with stopped(script, env=one.variables) as waiter:
        line = waiter.heard()
        assert line.startswith("gpuaff waiting for 1 GPU, next in line: ")
        assert f"(pid {one.pids['a']})" in line
        time.sleep(0.3)  # let it fall asleep: else it may see the lease, and then the board without
        one.tell("a", "release")
        assert waiter.end() == "served\n"
