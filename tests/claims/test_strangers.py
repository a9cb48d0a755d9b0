"""Strangers who come while we claim, where the driver does not list them (case E15).

They are real processes with contexts of the fake driver's, whose own record tells of each that
came to another one. Who claims is stopped (SIGSTOP) at a call of the driver, and goes on when the
stranger is there: nothing hangs on time.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from gpuaff.claims.devices.conflicts import shows_our_memory, unlisted
from gpuaff.claims.devices.occupancy import ListedProcesses
from gpuaff.claims.model import ComputeMode, DeviceReading
from gpuaff.topology.model import Topology
from tests.claim_lab import BEGIN, Lab, until
from tests.claims.readings import CONTEXT, GIB, IDLE, gpu, idle, instance, used_by
from tests.fakedriver.driver import FakeDriver, MakeDriver
from tests.fakedriver.play import this_machine
from tests.processes import Program, stopped

RETAIN, INIT = "cuDevicePrimaryCtxRetain", "cuInit"
OTHER_NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")

STRANGER = """
from contextlib import ExitStack
from gpuaff._system import cuda
contexts = ExitStack()
cuda.start()
for place in {gpus}:
    cuda.retain(place, contexts)
print("there", flush=True)
sys.stdin.readline()
"""


def comes(lab: Lab, *gpus: int) -> Program:
    """A stranger, who is on these GPUs when this returns."""
    program = lab.start(STRANGER.format(gpus=gpus))
    assert program.heard() == "there"
    return program


def state_of(pid: int) -> str:
    """A process's state, as /proc spells it; T is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def line_of(pid: int) -> list[int]:
    """A process, its only child, and so on."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(line_of(int(children[0])) if children else ())]


@pytest.mark.fake_driver
@pytest.mark.case("E15")
class TestNoProcessIsListed:
    @pytest.fixture
    def dark(self, make_lab: Callable[[Topology], Lab]) -> Lab:
        lab = make_lab(this_machine(3))
        lab.driver.state.hidden = 1
        return lab

    def test_one_that_comes_meanwhile_is_not_seen(self, dark: Lab) -> None:
        """Memory may be ours by then: docs/claims.md says so."""
        dark.driver.stop_at(RETAIN)
        program = dark.start("say(*indices(gpuaff.claim_gpus()))")
        until(lambda: state_of(program.pid) == "T")
        comes(dark, 0)
        os.kill(program.pid, signal.SIGCONT)
        assert program.heard() == "0"
        assert len(dark.driver.double_holdings()) == 1


IN_A_CONTAINER = """
try:
    say(*indices(gpuaff.claim_gpus({call})))
except ClaimLostError as error:
    told(error)
    say(error.pids)
go_on()
"""


def claimer_in_a_container(
    call: str, env: Mapping[str, str], below: Sequence[str] = ()
) -> AbstractContextManager[Program]:
    script = BEGIN + IN_A_CONTAINER.format(call=call)
    return stopped(script, env=env, prefix=(*OTHER_NAMESPACE, *below))


@pytest.mark.fake_driver
@pytest.mark.needs("mounts", "unshare")
@pytest.mark.case("E15")
class TestOnlyTheContainersOwnAreListed:
    """As by driver 580.159.04: a PID namespace's own processes, by their numbers there."""

    @pytest.fixture
    def driver(self, fake_driver: MakeDriver) -> FakeDriver:
        driver = fake_driver(this_machine(1))
        driver.state.apart = 1
        return driver

    @pytest.fixture
    def env(self, driver: FakeDriver, tmp_path: Path) -> Mapping[str, str]:
        locks = str(tmp_path / "locks")
        return {**driver.env(), "GPUAFF_LOCK_DIR": locks, "GPUAFF_SAFE_GPU": "off"}

    def test_a_stranger_outside(self, driver: FakeDriver, env: Mapping[str, str]) -> None:
        with stopped(
            BEGIN + IN_A_CONTAINER.format(call="placeholder=occupant_that_waits()"),
            env=env,
            prefix=OTHER_NAMESPACE,
        ) as claimer:
            assert claimer.heard() == "now"
            with stopped("import sys\n" + STRANGER.format(gpus=[0]), env=env) as stranger:
                assert stranger.heard() == "there"
                claimer.go_on()
                assert claimer.heard().startswith("ClaimLostError GPU 0 was free and is leased")
                assert claimer.heard() == "()"
                assert driver.contexts(0) == {stranger.pid}
                claimer.end()

    def test_what_we_take_is_ours(self, driver: FakeDriver, env: Mapping[str, str]) -> None:
        with stopped(
            BEGIN + IN_A_CONTAINER.format(call="placeholder=occupant_that_waits()"),
            env=env,
            prefix=OTHER_NAMESPACE,
        ) as claimer:
            assert claimer.heard() == "now"
            driver.state.processes[0].memory = 40 * GIB
            claimer.go_on()
            assert claimer.heard() == "0"
            assert driver.double_holdings() == []
            claimer.end()


@pytest.mark.fake_driver
@pytest.mark.needs("mounts", "unshare")
@pytest.mark.case("E15")
class TestTheHostsNumbersAreListed:
    def test_one_that_comes_while_we_claim(self, lab: Lab) -> None:
        env = {**lab.driver.env(), **{k: v for k, v in lab.env.items() if v is not None}}
        lab.driver.stop_at(INIT)
        below = "sh", "-c", '"$@"; true', "sh"  # number 1 cannot be stopped
        with claimer_in_a_container("gpus=[0], visible=None", env, below) as claimer:
            until(lambda: [state_of(pid) for pid in line_of(claimer.pid)][2:] == ["T"])
            stranger = comes(lab, 0)
            os.kill(line_of(claimer.pid)[2], signal.SIGCONT)
            assert claimer.heard().startswith("ClaimLostError GPU 0 was free and is leased")
            assert lab.driver.contexts(0) == {stranger.pid}
            claimer.end()

    def test_a_large_context_of_unknown_size_is_ours(self, lab: Lab) -> None:
        env = {**lab.driver.env(), **{k: v for k, v in lab.env.items() if v is not None}}
        lab.driver.state.context_memory[0] = 1 * GIB
        lab.driver.state.untold_memory = 1
        with claimer_in_a_container("gpus=[0]", env) as claimer:
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
