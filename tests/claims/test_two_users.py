"""Two users of one machine: neither can take, spoil or block what the other one has."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from gpuaff.topology.model import Topology
from tests import pci_devices
from tests.fakedriver.driver import FakeDriver, MakeDriver
from tests.fakedriver.play import this_machine
from tests.processes import Program, stopped

pytestmark = [pytest.mark.fake_driver, pytest.mark.needs("two-users")]

ANN, BOB = 65531, 65532
"""Users of whom the system knows nothing but the number."""

PROGRAM = """
import fcntl, os, sys, time
from tests.claims.everything import import_all
import_all()  # first: other users may not be able to read Python's files, or ours
import ctypes
for library in "libnvidia-ml.so.1", "libcuda.so.1":
    ctypes.CDLL(library)
os.setgroups([])
os.setgid(USER)
os.setuid(USER)
os.umask(0o077)
import gpuaff
from gpuaff.errors import ClaimError

def claim(*arguments, **options):
    try:
        made = gpuaff.claim_gpus(*arguments, **options)
    except ClaimError as error:
        return f"{type(error).__name__}: {error}".replace("\\n  ", " | ")
    return " ".join(str(gpu.index) for gpu in made.gpus)

def release():
    gpuaff.current_claim().release()
    return "released"

def tried(what):
    try:
        return what()
    except OSError as error:
        return error.strerror

def flock(path):
    handles.append(os.open(path, os.O_RDONLY))
    return fcntl.flock(handles[-1], fcntl.LOCK_EX)

handles = []
for line in sys.stdin:
    print(eval(line), flush=True)
"""


class User:
    """A process of a user, who is told what to say."""

    def __init__(self, process: Program) -> None:
        self.process, self.pid = process, process.pid

    def begins(self, what: str) -> None:
        self.process.go_on(what)

    def says(self, what: str = "") -> str:
        if what:
            self.begins(what)
        return self.process.heard()


class Machine:
    """A machine that both use; its lock directory is made by the first of them."""

    def __init__(self, driver: FakeDriver, ends: ExitStack) -> None:
        self.driver, self._ends = driver, ends
        self.locks = driver.path.parent.parent / "gpuaff"
        self.env = {**driver.env(), "GPUAFF_LOCK_DIR": str(self.locks), "GPUAFF_SAFE_GPU": "off"}
        self.prefix: list[str] = []

    def user(self, number: int) -> User:
        program = PROGRAM.replace("USER", str(number))
        return User(self._ends.enter_context(stopped(program, env=self.env, prefix=self.prefix)))


@contextmanager
def machine(make: MakeDriver, topology: Topology) -> Iterator[Machine]:
    driver = make(topology)
    with ExitStack() as ends:
        yield Machine(driver, ends)
    assert driver.double_holdings() == []


@pytest.mark.case("E7", "E1")
def test_the_second_user_sees_what_the_first_one_has(shared_driver: MakeDriver) -> None:
    """Although the first one's umask gives nobody else any right."""
    with machine(shared_driver, this_machine(2)) as here:
        ann, bob = here.user(ANN), here.user(BOB)
        assert ann.says("claim()") == "0"
        assert bob.says("claim(gpus=0)").startswith("GpusBusyError: requested 1 GPU; none")
        told = bob.says("claim(2)")
        assert re.search(rf"GPU 0: leased by python.*\(pid {ann.pid}\) of {ANN}", told), told
        assert bob.says("claim()") == "1"
        assert {path.stat().st_uid for path in here.locks.iterdir()} == {ANN, BOB}
        assert ann.says("release()") == "released"
        third = here.user(BOB)
        assert third.says("claim()") == "0"


@pytest.mark.case("E6", "E7")
def test_what_a_killed_user_had_is_free_at_once(shared_driver: MakeDriver) -> None:
    with machine(shared_driver, this_machine(1)) as here:
        ann, bob = here.user(ANN), here.user(BOB)
        assert ann.says("claim()") == "0"
        files = {path.name: path.stat().st_ino for path in here.locks.iterdir()}
        os.kill(ann.pid, 9)
        ann.process.wait()
        assert bob.says("claim()") == "0"
        assert {path.name: path.stat().st_ino for path in here.locks.iterdir()} == files


def test_a_waiting_user_is_woken_by_the_other_ones_release(shared_driver: MakeDriver) -> None:
    with machine(shared_driver, this_machine(1)) as here:
        ann, bob = here.user(ANN), here.user(BOB)
        assert ann.says("claim()") == "0"
        bob.begins("claim(wait=30, on_wait=lambda standing: print(standing.reasons[0]))")
        assert f"(pid {ann.pid}) of {ANN}" in bob.says()
        time.sleep(0.1)
        assert ann.says("release()") == "released"
        freed = time.monotonic()
        assert bob.says() == "0"
        assert time.monotonic() - freed < 5


def test_a_user_cannot_end_or_spoil_the_other_ones_claim(shared_driver: MakeDriver) -> None:
    """What everybody may write tells who holds, and decides nothing."""
    with machine(shared_driver, this_machine(1)) as here:
        ann, bob = here.user(ANN), here.user(BOB)
        assert ann.says("claim()") == "0"
        lease = next(here.locks.glob("gpu-*"))
        assert "not permitted" in bob.says(f"tried(lambda: os.unlink({str(lease)!r}))")
        assert "not permitted" in bob.says(f"tried(lambda: os.rename({str(lease)!r}, '/tmp/x'))")
        unlock = f"fcntl.flock(os.open({str(lease)!r}, os.O_RDONLY), fcntl.LOCK_UN)"
        assert bob.says(unlock) == "None"
        file = here.locks / "registry"
        forge = f"os.pwrite(os.open({str(file)!r}, os.O_RDWR), b'[' * 4096 * 514, 0)"
        assert bob.says(forge) == str(4096 * 514)
        told = bob.says("claim()")
        assert re.search(rf"GpusBusyError.*\(pid {ann.pid}\) of {ANN}", told), told


@pytest.mark.needs("mount-namespaces")
def test_a_lock_of_another_program_names_its_holder(shared_driver: MakeDriver) -> None:
    """Another program may lock a GPU's directory in sysfs, as docs/lease-protocol.md has it."""
    with machine(shared_driver, this_machine(1)) as here:
        here.prefix = pci_devices.gpus(here.locks.parent / "pci", 1)
        ann, bob = here.user(ANN), here.user(BOB)
        assert bob.says(f"flock({pci_devices.FIRST!r})") == "None"
        told = ann.says("claim()")
        assert re.search(rf"leased by python.*\(pid {bob.pid}\) of {BOB}", told), told
