"""Strangers who come while we claim, where the driver does not list them (case E15).

They are real processes with contexts of the fake driver's, whose own record tells of each that
came to another one. Who claims is stopped (SIGSTOP) at a call of the driver, and goes on when the
stranger is there: nothing hangs on time.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from gpuaff.claims.devices.conflicts import shows_our_memory, unlisted
from gpuaff.claims.devices.occupancy import ListedProcesses
from gpuaff.claims.model import ComputeMode, DeviceReading
from gpuaff.topology.model import Topology
from tests.claim_lab import BEGIN, Lab, until
from tests.claims.readings import CONTEXT, GIB, IDLE, MIB, gpu, idle, instance, used_by
from tests.fakedriver.driver import FakeDriver, MakeDriver
from tests.fakedriver.play import this_machine
from tests.fakedriver.state import NVML
from tests.processes import Program, stopped

RETAIN, RELEASE = "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2"
INIT = "cuInit"
LISTS = "nvmlDeviceGetComputeRunningProcesses_v3"
OTHER_NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")

STRANGER = """
from gpuaff._system import cuda
contexts = cuda.Contexts()
cuda.start()
for place in {gpus}:
    contexts.retain(place)
print("there", flush=True)
sys.stdin.readline()
"""

TRY = """
say("begins")
go_on()
error = refused({call})
told(error)
say(len(error.gpus), error.pids, error.cuda_started)
"""

CLAIM = """
say("begins")
go_on()
say(*indices(gpuaff.claim_gpus({call})))
go_on()
"""


def comes(lab: Lab, *gpus: int) -> Program:
    """A stranger, who is on these GPUs when this returns."""
    program = lab.start(STRANGER.format(gpus=gpus))
    assert program.heard() == "there"
    return program


def goes_on_to(lab: Lab, program: Program, function: str, *, after: int = 0) -> None:
    """Let a program that is stopped run until it is stopped before a call."""
    lab.driver.stop_at(function, after=after, pid=program.pid)
    os.kill(program.pid, signal.SIGCONT)
    until(lambda: state_of(program.pid) == "T")


def state_of(pid: int) -> str:
    """A process's state, as /proc spells it; T is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def line_of(pid: int) -> list[int]:
    """A process, its only child, and so on."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(line_of(int(children[0])) if children else ())]


def begun(lab: Lab, code: str, call: str, function: str, *, after: int = 0) -> Program:
    """A program that claims, and is stopped before a call."""
    program = lab.start(code.format(call=call))
    assert program.heard() == "begins"
    program.kill(signal.SIGSTOP)
    program.go_on()
    goes_on_to(lab, program, function, after=after)
    return program


def go_on(program: Program) -> str:
    os.kill(program.pid, signal.SIGCONT)
    return program.heard()


def undone(lab: Lab, program: Program, *strangers: Program) -> None:
    """The claim was lost, and only the strangers have contexts."""
    program.end()
    assert {pid for gpu in lab.used() for pid in lab.driver.contexts(gpu)} == {
        stranger.pid for stranger in strangers
    }


@pytest.fixture
def dark(make_lab: Callable[[Topology], Lab]) -> Callable[[int], Lab]:
    """Makes a machine whose driver lists nobody."""

    def make(gpus: int) -> Lab:
        lab = make_lab(this_machine(gpus))
        lab.driver.hide_all_processes()
        return lab

    return make


@pytest.mark.fake_driver
@pytest.mark.case("E15")
class TestNoProcessIsListed:
    @pytest.mark.parametrize("gpus", [1, 3])
    def test_no_other_comes(self, dark: Callable[[int], Lab], gpus: int) -> None:
        lab = dark(3)
        with_it = lab.holder(f"claim_gpus({gpus})")
        made = [lab.driver.contexts_made(place) for place in range(3)]
        assert made == [1] * gpus + [0] * (3 - gpus)
        assert lab.driver.double_holdings() == []
        with_it.end()

    def test_one_that_comes_after_the_context_is_made_is_not_seen(
        self, dark: Callable[[int], Lab]
    ) -> None:
        """Memory may be ours by then: docs/claims.md says so."""
        lab = dark(1)
        program = begun(lab, CLAIM, "1", RETAIN)
        comes(lab, 0)
        assert go_on(program) == "0"
        assert len(lab.driver.double_holdings()) == 1

    def test_a_context_of_any_size_is_ours(self, dark: Callable[[int], Lab]) -> None:
        lab = dark(2)
        for gpu_, size in enumerate((200 * MIB, 1 * GIB)):
            lab.driver.set_context_size(gpu_, size)
        lab.holder("claim_gpus(2)").end()
        assert [lab.driver.contexts_made(place) for place in range(2)] == [1, 1]

    def test_memory_goes_meanwhile(self, dark: Callable[[int], Lab]) -> None:
        lab = dark(2)
        lab.driver.set_memory_used(0, 60 * MIB)
        program = begun(lab, CLAIM, "2", RETAIN)
        lab.driver.set_memory_used(0, 0)
        assert go_on(program) == "0 1"


AGAIN = """
say("begins")
go_on()
error = refused(1)
told(error)
say(error.cuda_started)
go_on()
say(*indices(gpuaff.claim_gpus(1)))
"""


@pytest.mark.fake_driver
@pytest.mark.case("E15")
class TestBeforeCudaIsStarted:
    """Where the driver does not tell who computes, it is looked once more before."""

    def test_the_same_process_can_claim_again(self, make_lab: Callable[[Topology], Lab]) -> None:
        lab = make_lab(this_machine(1))
        lab.driver.fail(LISTS, NVML.NOT_SUPPORTED)
        program = begun(lab, AGAIN, "", "nvmlDeviceGetMemoryInfo_v2", after=1)
        stranger = comes(lab, 0)
        said = go_on(program)
        assert said.startswith("ClaimLostError GPU 0 was free and is leased")
        assert said.endswith(
            "; all was undone, and CUDA was not started: claim again, and let that program claim, "
            "too"
        )
        assert program.heard() == "False"
        assert lab.driver.contexts_made(0) == 1  # the stranger's
        stranger.kill()
        program.go_on()
        assert program.heard() == "0"
        assert lab.driver.double_holdings() == []

    @pytest.mark.slow
    def test_cuda_had_to_be_asked_for_its_numbers(
        self, make_lab: Callable[[Topology], Lab]
    ) -> None:
        lab = make_lab(this_machine(1))
        lab.driver.fail(LISTS, NVML.NOT_SUPPORTED)
        program = begun(lab, TRY, "1, visible=None", INIT)
        stranger = comes(lab, 0)
        assert "CUDA has settled which GPUs this process sees: start it again" in go_on(program)
        assert program.heard() == "1 () True"
        assert lab.driver.double_holdings() == []
        undone(lab, program, stranger)

    def test_nobody_comes(self, make_lab: Callable[[Topology], Lab]) -> None:
        lab = make_lab(this_machine(2))
        lab.driver.fail(LISTS, NVML.NOT_SUPPORTED)
        lab.holder("claim_gpus(2)").end()
        assert lab.driver.contexts_made(0) == 1


IN_A_CONTAINER = """
try:
    say(*indices(gpuaff.claim_gpus(placeholder=occupant_that_waits())))
except ClaimLostError as error:
    told(error)
    say(error.pids)
go_on()
"""


@pytest.mark.fake_driver
@pytest.mark.needs("mounts", "unshare")
@pytest.mark.case("E15")
class TestOnlyTheContainersOwnAreListed:
    """As by driver 580.159.04: a PID namespace's own processes, by their numbers there."""

    @pytest.fixture
    def driver(self, fake_driver: MakeDriver) -> FakeDriver:
        driver = fake_driver(this_machine(1))
        driver.list_own_namespace()
        return driver

    @pytest.fixture
    def env(self, driver: FakeDriver, tmp_path: Path) -> Mapping[str, str]:
        locks = str(tmp_path / "locks")
        return {**driver.env(), "GPUAFF_LOCK_DIR": locks, "GPUAFF_SAFE_GPU": "off"}

    def test_a_stranger_outside(self, driver: FakeDriver, env: Mapping[str, str]) -> None:
        with stopped(BEGIN + IN_A_CONTAINER, env=env, prefix=OTHER_NAMESPACE) as claimer:
            assert claimer.heard() == "now"
            with stopped("import sys\n" + STRANGER.format(gpus=[0]), env=env) as stranger:
                assert stranger.heard() == "there"
                claimer.go_on()
                assert claimer.heard().startswith("ClaimLostError GPU 0 was free and is leased")
                assert claimer.heard() == "()"
                assert driver.contexts(0) == {stranger.pid}

    def test_what_we_take_is_ours(self, driver: FakeDriver, env: Mapping[str, str]) -> None:
        with stopped(BEGIN + IN_A_CONTAINER, env=env, prefix=OTHER_NAMESPACE) as claimer:
            assert claimer.heard() == "now"
            driver.state.processes[0].memory = 40 * GIB
            claimer.go_on()
            assert claimer.heard() == "0"
            assert driver.double_holdings() == []

    def test_our_context(self, driver: FakeDriver, env: Mapping[str, str]) -> None:
        code = "say(*indices(gpuaff.claim_gpus()))\ngo_on()"
        with stopped(BEGIN + code, env=env, prefix=OTHER_NAMESPACE) as claimer:
            assert claimer.heard() == "0"
            assert driver.contexts_made(0) == 1


CLAIM_IN_A_CONTAINER = """
try:
    say(*indices(gpuaff.claim_gpus({call})))
except ClaimLostError as error:
    told(error)
go_on()
"""


@pytest.mark.fake_driver
@pytest.mark.needs("mounts", "unshare")
@pytest.mark.case("E15")
class TestTheHostsNumbersAreListed:
    def test_who_comes_before_us(self, lab: Lab) -> None:
        """Before we are there nobody who is new can be ours, and no other context is made."""
        env = {**lab.driver.env(), **{k: v for k, v in lab.env.items() if v is not None}}
        lab.driver.stop_at(INIT)
        code = BEGIN + CLAIM_IN_A_CONTAINER.format(call="gpus=[0], visible=None")
        below = (*OTHER_NAMESPACE, "sh", "-c", '"$@"; true', "sh")  # number 1 cannot be stopped
        with stopped(code, env=env, prefix=below) as claimer:
            until(lambda: [state_of(pid) for pid in line_of(claimer.pid)][2:] == ["T"])
            comes(lab, 0)
            os.kill(line_of(claimer.pid)[2], signal.SIGCONT)
            assert claimer.heard().startswith("ClaimLostError GPU 0 was free and is leased")
        assert lab.driver.double_holdings() == []

    def test_a_large_context_of_unknown_size_is_ours(self, lab: Lab) -> None:
        env = {**lab.driver.env(), **{k: v for k, v in lab.env.items() if v is not None}}
        lab.driver.set_context_size(0, 1 * GIB)
        lab.driver.hide_process_memory()
        code = BEGIN + CLAIM_IN_A_CONTAINER.format(call="gpus=[0]")
        with stopped(code, env=env, prefix=OTHER_NAMESPACE) as claimer:
            assert claimer.heard() == "0"
            assert lab.driver.contexts_made(0) == 1


# ---- what memory tells -----------------------------------------------------------------------

HOST = ListedProcesses(me=5, first_namespace=True)
CONTAINER = ListedProcesses(me=5, first_namespace=False)
STRANGE = ListedProcesses(first_namespace=False)
"""The numbers in the lists mean nothing."""


@pytest.mark.parametrize(
    ("reading", "new", "processes", "proves"),
    [
        (used_by(5), {5}, HOST, False),  # there the lists are complete
        (idle(), set(), HOST, False),
        (used_by(5), {5}, CONTAINER, True),
        (used_by(5), set(), CONTAINER, True),  # torch has kept it since an earlier claim
        (idle(compute={5: None}), {5}, CONTAINER, False),
        (used_by(77), {77}, STRANGE, True),
        (used_by(77), set(), STRANGE, False),
        (idle(), set(), STRANGE, False),
        (idle(compute=None), set(), STRANGE, False),
    ],
)
def test_memory_of_no_listed_process_is_anothers_where_ours_is_listed(
    reading: DeviceReading, new: set[int], processes: ListedProcesses, proves: bool
) -> None:
    assert shows_our_memory(reading, new, processes) is proves


def test_what_no_listed_process_has() -> None:
    readings = (
        idle(gpu(0)),
        used_by(5, device=gpu(1)),
        used_by(5, device=gpu(2), used=2 * GIB),
        idle(gpu(3), compute=None, used=CONTEXT),
        idle(gpu(4), used=None),
        idle(gpu(5), display=True),
        idle(gpu(6), compute_mode=ComputeMode.EXCLUSIVE_PROCESS),
        idle(gpu(7)),
    )
    found = unlisted(readings, [gpu(place) for place in range(7)])
    assert found == {
        gpu(0): IDLE,
        gpu(1): IDLE,
        gpu(2): 2 * GIB - CONTEXT,
        gpu(3): CONTEXT,
    }


def test_instances_that_share_memory() -> None:
    """The rightful claimer of the one may not be listed, and has some of what the other tells."""
    one, other, apart = instance(1, part=3), instance(2, part=3), instance(3, part=4)
    readings = (idle(one), idle(other, used=IDLE + CONTEXT), used_by(5, device=apart))
    assert unlisted(readings, [one, other, apart]) == {apart: IDLE}
