"""Processes that are exiting: what they hold on a GPU is as good as free.

Real ones, which exit until the test lets them end (tests/exits.py). The fake driver lists a process
until it is a zombie, and the kernel holds its locks until its memory is given back.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gpuaff._system import kernel
from gpuaff.claims.devices.occupancy import EXITS, SETTLES, Settling
from gpuaff.claims.devices.probe import process_info
from gpuaff.claims.locking.registry import Entry, ending, stopped
from tests.claim_lab import Lab
from tests.claims.readings import used_by
from tests.exits import LARGE, exiting
from tests.processes import Program
from tests.processes import stopped as stopped_process

BEYOND = SETTLES + 0.3
"""Longer than GPUs are looked at again whose processes have ended, in seconds."""


ENDED, EXITING, NOTHING = (True, False), (True, True), (False, False)
"""Whether something is leaving, and exiting."""


@pytest.mark.parametrize(
    ("looks", "again"),
    [
        # What has ended gets a second, what is exiting ten, and a second when it has exited.
        ([(0, ENDED), (0.9, ENDED), (1.1, ENDED)], [True, True, False]),
        ([(0, EXITING), (9.9, EXITING), (10.1, EXITING)], [True, True, False]),
        ([(0, EXITING), (9.5, EXITING), (10.4, ENDED), (10.6, ENDED)], [True, True, True, False]),
        # It held something when that was looked at, and was gone when it was looked at itself.
        ([(0, EXITING), (1, NOTHING), (1, NOTHING)], [True, True, False]),
        # It begins anew when nothing was leaving meanwhile.
        ([(0, ENDED), (5, NOTHING), (6, ENDED)], [True, False, True]),
    ],
)
def test_how_long_it_is_looked_again(
    looks: list[tuple[float, tuple[bool, bool]]], again: list[bool]
) -> None:
    since = Settling()
    goes_on = [
        since.goes_on(100 + at, leaving=leaving, exiting=exiting)
        for at, (leaving, exiting) in looks
    ]
    assert goes_on == again


class TestSeen:
    def test_by_the_kernel(self) -> None:
        with stopped_process(f"{LARGE}\nprint(); input()", fresh=True) as process:
            process.heard()
            assert not kernel.is_exiting(process.pid)
            with exiting(process.pid) as exit_:
                people = process_info([used_by(process.pid, os.getpid())])
                exits = kernel.is_exiting(process.pid), kernel.has_ended(process.pid)
                assert exit_.goes_on(), "the busy loop keeps it from its CPU"
            assert exits == (True, False)
            assert (set(people.exiting), set(people.ended)) == ({process.pid}, set())
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            assert not kernel.is_exiting(process.pid), "it has ended"

    def test_not_one_that_is_gone(self) -> None:
        assert not kernel.is_exiting(2**22)

    def test_not_one_whose_main_thread_alone_has_ended(self) -> None:
        script = """
            import ctypes, threading, time
            def work():
                while open("/proc/self/stat").read().rpartition(")")[2].split()[0] != "Z":
                    time.sleep(0.001)
                print("alone")
                time.sleep(60)
            threading.Thread(target=work).start()
            ctypes.CDLL(None).pthread_exit(None)
        """
        with stopped_process(script) as process:
            assert process.heard() == "alone"
            assert not kernel.is_exiting(process.pid)

    def test_on_the_board(self) -> None:
        """A device that a process holds which is not exiting stays."""
        with stopped_process(f"{LARGE}\nprint(); input()") as process:
            process.heard()
            entries = [
                entry(1, os.getpid(), "GPU-1"),
                entry(2, process.pid, "GPU-2", "1/GPU-1"),
                entry(3, process.pid, "GPU-3", waits=True),
                entry(4, process.pid, "GPU-4", later=1),
            ]
            assert (ending(entries), stopped(entries)) == (frozenset(), frozenset())
            with exiting(process.pid):
                assert ending(entries) == {"GPU-2"}
                assert stopped(entries) == {2, 3}


def entry(slot: int, pid: int, *gpus: str, waits: bool = False, later: int = 0) -> Entry:
    """A record; one that was written by a process that started later is another's."""
    facts = kernel.thread_facts(pid, pid)
    assert facts is not None
    return Entry(slot=slot, waits=waits, pid=pid, start=facts.started + later, gpus=gpus)


CLAIMS = """
say("begins")
say(*indices(gpuaff.claim_gpus({call})))
go_on()
"""


def begun(lab: Lab, call: str = "1", **env: str | None) -> Program:
    """A program that claims now."""
    program = lab.start(CLAIMS.format(call=call), **env)
    assert program.heard() == "begins"
    return program


def large(lab: Lab, code: str, **env: str | None) -> Program:
    """A program that exits slowly, when it has done something."""
    program = lab.start(f"{LARGE}\n{code}\nsay('done')\ngo_on()", **env)
    assert program.heard() == "done"
    return program


@contextmanager
def outlasted(before: Program) -> Iterator[None]:
    """What claims in this block waits for a process that is exiting, up to its end."""
    with exiting(before.pid) as exit_:
        yield
        time.sleep(BEYOND)
        assert exit_.goes_on()


@pytest.mark.fake_driver
class TestClaims:
    def test_a_claim_that_does_not_wait_gets_the_gpus_of_one(self, lab: Lab) -> None:
        """Its leases are held until its files are closed; GPU 3 it uses without one."""
        before = large(lab, "gpuaff.claim_gpus(3)")
        lab.driver.use(3, before.pid)
        with outlasted(before):
            after = begun(lab, "4, wait=0")
        assert after.heard() == "0 1 2 3"

    @pytest.mark.parametrize("wait", ["0", "30"])
    def test_a_lease_that_the_registry_does_not_have_may_be_about_to_end(
        self, lab: Lab, wait: str
    ) -> None:
        """The kernel may have closed its slot first. One that waits has one slot all the time."""
        before = lab.start("""
            from gpuaff.claims.locking.leases import Lease
            from gpuaff._system.nvml import open_session
            with open_session() as session:
                lease = Lease()
                assert lease.take(session.devices()) is None
            say("done")
            go_on()
        """)
        assert before.heard() == "done"
        after = begun(lab, f"wait={wait}")
        time.sleep(0.3)
        before.kill()
        assert after.heard() in {"0", "1", "2", "3"}, "the locks go one by one"
        slots = "from gpuaff.claims.locking import registry; say(len(registry.entries()))"
        assert lab.one(slots) == "1"
        after.go_on()
        after.end()

    def test_inside_a_claim_and_a_short_wait_is_as_patient_as_none(self, lab: Lab) -> None:
        _, env = lab.enclosing("1", CUDA_VISIBLE_DEVICES=None)
        before = large(lab, "gpuaff.claim_gpus(1)", **env)
        with outlasted(before):
            after = begun(lab, "1, wait=0.1", **env)
        assert after.heard() == "0"

    def test_a_free_one_is_taken_at_once_and_a_dry_run_shows_those_of_one(self, lab: Lab) -> None:
        before = large(lab, "gpuaff.claim_gpus(3)")
        code = """
        from gpuaff.claims.acquire import preview
        say(*(one.index for one in preview(dict(n=2))))
        """
        with exiting(before.pid) as exit_:
            assert lab.start(code).heard() == "0 1"
            assert begun(lab).heard() == "3"
            assert exit_.goes_on()

    def test_a_waiter_that_is_exiting_is_passed(self, lab: Lab) -> None:
        holder = lab.holder("claim_gpus(gpus=[0])")
        code = "gpuaff.claim_gpus(4, wait=None, on_wait=lambda _: say('waits'))"
        waiter = lab.start(f"{LARGE}\n{code}")
        assert waiter.heard() == "waits"
        with exiting(waiter.pid) as exit_:
            assert begun(lab).heard() == "1"
            assert exit_.goes_on()
        holder.end()

    def test_one_that_came_while_we_claimed_is_no_stranger(self, lab: Lab) -> None:
        """Another claimer may have had the GPU after our look and before our lease."""
        before = large(lab, "")
        code = """
        say(*indices(gpuaff.claim_gpus(gpus=[0], placeholder=occupant_that_waits())))
        go_on()
        """
        after = lab.start(code)
        assert after.heard() == "now"
        lab.driver.use(0, before.pid)
        with outlasted(before):
            after.go_on()
        assert after.heard() == "0"

    def test_one_that_goes_on_is_refused_at_once(self, lab: Lab) -> None:
        with subprocess.Popen(["sleep", "60"]) as other:
            for gpu in range(4):
                lab.driver.use(gpu, other.pid)
            start = time.monotonic()
            assert "in use by sleep 60" in lab.refused("1, wait=0")
            assert time.monotonic() - start < EXITS
            other.kill()
