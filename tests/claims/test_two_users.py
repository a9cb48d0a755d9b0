"""Two users of one machine: neither can take, spoil or block what the other one has."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests import pci_devices
from tests.fakedriver.driver import FakeDriver, MakeDriver
from tests.fakedriver.play import this_machine
from tests.processes import Program, stopped

pytestmark = [pytest.mark.fake_driver, pytest.mark.needs("two-users")]

ANN, BOB = 65531, 65532
"""Users of whom the system knows nothing but the number."""

PROGRAM = """
import fcntl, os, sys
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

def claim(*arguments, **options):
    try:
        made = gpuaff.claim_gpus(*arguments, **options)
    except gpuaff.ClaimError as error:
        return f"{type(error).__name__}: {error}".replace("\\n  ", " | ")
    return " ".join(str(gpu.index) for gpu in made.gpus)

def tried(function, *arguments):
    try:
        return function(*arguments)
    except OSError as error:
        return error.strerror

def flock(path, how=fcntl.LOCK_EX):
    handles.append(os.open(path, os.O_RDONLY))
    return fcntl.flock(handles[-1], how)

handles = []
for line in sys.stdin:
    print(eval(line), flush=True)
"""


class Machine:
    """A machine that both use; its lock directory is made by the first of them."""

    def __init__(self, driver: FakeDriver, ends: ExitStack) -> None:
        self._ends, self.locks = ends, driver.path.parent.parent / "gpuaff"
        self.env = {**driver.env(), "GPUAFF_LOCK_DIR": str(self.locks), "GPUAFF_SAFE_GPU": "off"}
        self.prefix: list[str] = []

    def user(self, number: int) -> tuple[Program, Callable[[str], str]]:
        """A process of a user, and what says the value of an expression there."""
        script = PROGRAM.replace("USER", str(number))
        program = self._ends.enter_context(stopped(script, env=self.env, prefix=self.prefix))

        def says(expression: str) -> str:
            program.go_on(expression)
            return program.heard()

        return program, says

    def files(self) -> dict[str, tuple[int, int]]:
        """The owner and the number of each file in the lock directory."""
        found = {path.name: path.stat() for path in self.locks.iterdir()}
        return {name: (file.st_uid, file.st_ino) for name, file in found.items()}


@pytest.fixture
def machine(shared_driver: MakeDriver) -> Iterator[Machine]:
    driver = shared_driver(this_machine(2))
    with ExitStack() as ends:
        yield Machine(driver, ends)
    assert driver.double_holdings() == []


@pytest.mark.case("E1", "E6", "E7")
def test_the_second_user_sees_what_the_first_one_has(machine: Machine) -> None:
    """Although the first one's umask gives no other user any right."""
    ann, ann_says = machine.user(ANN)
    _, bob_says = machine.user(BOB)
    assert ann_says("claim()") == "0"
    assert bob_says("claim(gpus=0)").startswith("GpusBusyError: requested 1 GPU; none")
    said = bob_says("claim(2)")
    assert re.search(rf"GPU 0: leased by python.*\(pid {ann.pid}\) of {ANN}", said), said
    assert bob_says("claim()") == "1"
    before = machine.files()
    assert {owner for owner, _ in before.values()} == {ANN, BOB}
    ann.kill()  # what a killed user had is free at once
    _, third_says = machine.user(BOB)
    assert third_says("claim()") == "0"
    assert machine.files() == before
    assert bob_says("gpuaff.current_claim().release()") == "None"
    _, fourth_says = machine.user(ANN)
    assert fourth_says("claim()") == "1"


def test_a_user_cannot_end_or_spoil_the_other_ones_claim(machine: Machine) -> None:
    """What everybody may write tells who holds, and decides nothing."""
    ann, ann_says = machine.user(ANN)
    _, bob_says = machine.user(BOB)
    assert ann_says("claim(2)") == "0 1"
    lease, registry = str(next(machine.locks.glob("gpu-*"))), str(machine.locks / "registry")
    assert "not permitted" in bob_says(f"tried(os.unlink, {lease!r})")
    assert "not permitted" in bob_says(f"tried(os.rename, {lease!r}, '/tmp/x')")
    assert bob_says(f"flock({lease!r}, fcntl.LOCK_UN)") == "None"
    forge = f"os.pwrite(os.open({registry!r}, os.O_RDWR), b'[' * 4096 * 514, 0)"
    assert bob_says(forge) == str(4096 * 514)
    said = bob_says("claim()")
    assert re.search(rf"GpusBusyError.*\(pid {ann.pid}\) of {ANN}", said), said


@pytest.mark.needs("mount-namespaces")
def test_a_lock_of_another_program_names_its_holder(machine: Machine) -> None:
    """Another program may lock a GPU's directory in sysfs, as docs/lease-protocol.md has it."""
    machine.prefix = pci_devices.gpus(machine.locks.parent / "pci", 1)
    _, ann_says = machine.user(ANN)
    bob, bob_says = machine.user(BOB)
    assert bob_says(f"flock({pci_devices.FIRST!r})") == "None"
    said = ann_says("claim(gpus=0)")
    assert re.search(rf"leased by python.*\(pid {bob.pid}\) of {BOB}", said), said
