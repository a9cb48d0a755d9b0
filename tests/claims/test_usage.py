"""How devices are used, read from the fake driver by the real nvidia-ml-py."""

from __future__ import annotations

import base64
import pickle
from typing import Any

import pytest

from gpuaff.claims.devices.occupancy import ListedProcesses, evaluate
from gpuaff.claims.model import Busy, ComputeMode, Device, DeviceReading
from gpuaff.topology.model import Gpu, MigInstance, Topology
from tests.claims.readings import GIB, MIB
from tests.fakedriver.driver import FakeDriver, MakeDriver
from tests.fakedriver.state import NVML

pytestmark = pytest.mark.fake_driver

ELSEWHERE = 4_100_000
"""No process here: the fake driver takes it for one of another namespace, and lists it."""

MIG = [
    MigInstance(uuid=f"MIG-{number}", gpu_instance=2 + number, compute_instance=0)
    for number in (1, 2)
]
ADDRESSES = "0000:0a:00.0", "0000:0b:00.0", "0000:0c:00.0"
GPUS = [
    Gpu(index=i, uuid=f"GPU-{i}", pci_bus_id=address, name="H100")
    for i, address in enumerate(ADDRESSES)
]
MACHINE = Topology(gpus=(GPUS[0], GPUS[1]._replace(mig=tuple(MIG)), GPUS[2]))
PLAIN = Topology(gpus=tuple(Gpu(index=i, uuid=f"GPU-{i}") for i in range(3)))


def device(index: int, uuid: str, **more: Any) -> Device:
    return Device(index=index, uuid=uuid, pci_bus_id=ADDRESSES[index], name="H100", **more)


DEVICES = (
    device(0, "GPU-0"),
    *(device(1, one.uuid, parent="GPU-1", gpu_instance=one.gpu_instance) for one in MIG),
    device(2, "GPU-2"),
)

LOOK = """
import base64, pickle
from gpuaff._system import nvml
with nvml.open_session() as session:
    looks = []
    for _ in range({looks}):
        looks.append(session.look(utilization={utilization}))
    answer = session.devices(), looks, session.notes
print("ANSWER", base64.b64encode(pickle.dumps(answer)).decode())
"""

Answer = tuple[tuple[Device, ...], list[tuple[DeviceReading, ...]], tuple[str, ...]]


def session(driver: FakeDriver, *, looks: int = 1, utilization: bool = False) -> Answer:
    """What a process on the fake machine sees: the devices, each look, and the notes."""
    said = driver.run(LOOK.format(looks=looks, utilization=utilization)).stdout
    line = next(line for line in said.splitlines() if line.startswith("ANSWER "))
    answer: Answer = pickle.loads(base64.b64decode(line.removeprefix("ANSWER ")))
    return answer


def look(driver: FakeDriver, **how: Any) -> tuple[DeviceReading, ...]:
    return session(driver, **how)[1][-1]


def reasons(driver: FakeDriver, people: ListedProcesses, **more: Any) -> list[Busy | None]:
    """Why each device is busy."""
    found = evaluate(look(driver), processes=people, **{"leased": {}, **more})
    return [usage.busy for usage in found]


@pytest.fixture
def driver(fake_driver: MakeDriver) -> FakeDriver:
    return fake_driver(MACHINE)


@pytest.fixture
def plain(fake_driver: MakeDriver) -> FakeDriver:
    """Three GPUs without MIG."""
    return fake_driver(PLAIN)


@pytest.mark.case("D2")
def test_devices(driver: FakeDriver) -> None:
    devices, [readings], notes = session(driver)
    assert devices == DEVICES
    assert tuple(reading.device for reading in readings) == DEVICES
    assert notes == ()
    assert driver.inits == driver.shutdowns == 1


def test_an_idle_machine(driver: FakeDriver) -> None:
    first, mig, _, _ = look(driver)
    assert first == DeviceReading(
        device=DEVICES[0],
        compute={},
        graphics={},
        used=3 * MIB,
        free=80 * GIB - 483 * MIB,
        total=80 * GIB,
        compute_mode=ComputeMode.DEFAULT,
        display=False,
    )
    assert (mig.compute, mig.graphics) == ({}, {})
    assert (mig.display, mig.utilization, mig.problems) == (None, None, ())
    assert mig.compute_mode is ComputeMode.DEFAULT
    assert mig.total is not None
    assert mig.total < 80 * GIB
    assert reasons(driver, ListedProcesses()) == [None] * 4


def test_who_is_there(driver: FakeDriver) -> None:
    driver.use(0, ELSEWHERE, memory=GIB)
    driver.use(0, ELSEWHERE + 1, memory=10 * MIB, graphics=True)
    driver.use(0, ELSEWHERE + 2, memory=20 * MIB, both=True)
    driver.use(1, ELSEWHERE + 3, slot=2)
    first, one, two, last = look(driver)
    assert first.compute == {ELSEWHERE: GIB, ELSEWHERE + 2: 20 * MIB}
    assert first.graphics == {ELSEWHERE + 1: 10 * MIB, ELSEWHERE + 2: 20 * MIB}
    assert first.used == GIB + 33 * MIB
    assert (one.compute, two.compute) == ({}, {ELSEWHERE + 3: 500 * MIB})
    assert last.compute == {}
    assert reasons(driver, ListedProcesses()) == [Busy.PROCESSES, None, Busy.PROCESSES, None]


def test_on_a_cut_gpu_only_root_is_told_of_the_whole(driver: FakeDriver) -> None:
    driver.use(1, ELSEWHERE, slot=1)
    driver.state.unprivileged = 1
    assert reasons(driver, ListedProcesses()) == [None, Busy.PROCESSES, None, None]


def test_other_answers(plain: FakeDriver) -> None:
    plain.set_compute_mode(0, 3)
    plain.set_compute_mode(1, 2)
    plain.set_compute_mode(2, 1)
    plain.set_display(0, True)
    plain.set_utilization(0, 57)
    readings = look(plain, utilization=True)
    assert [reading.compute_mode for reading in readings] == [
        ComputeMode.EXCLUSIVE_PROCESS,
        ComputeMode.PROHIBITED,
        ComputeMode.EXCLUSIVE_THREAD,
    ]
    assert [reading.display for reading in readings] == [True, False, False]
    assert readings[0].utilization == 57
    assert look(plain)[0].utilization is None, "it was not asked for"


COMPUTE = "nvmlDeviceGetComputeRunningProcesses_v3"
GRAPHICS = "nvmlDeviceGetGraphicsRunningProcesses_v3"
FIELDS = {
    COMPUTE: ("compute",),
    GRAPHICS: ("graphics",),
    "nvmlDeviceGetMemoryInfo_v2": ("used",),
    "nvmlDeviceGetUtilizationRates": ("utilization",),
    "nvmlDeviceGetComputeMode": ("compute_mode",),
    "nvmlDeviceGetDisplayActive": ("display",),
}
"""Every function that a look calls, and what is None where it fails."""


@pytest.mark.case("F1")
class TestOneFunctionFails:
    @pytest.mark.parametrize("function", FIELDS)
    def test_of_some_gpus(self, plain: FakeDriver, function: str) -> None:
        for index in range(3):
            plain.set_utilization(index, 7)
        plain.fail(function, NVML.NOT_SUPPORTED, gpu=0)
        plain.fail(function, NVML.UNKNOWN, gpu=1)
        found = look(plain, utilization=True)
        for reading in found[:2]:
            lost = tuple(name for name in READ if getattr(reading, name) is None)
            assert lost == FIELDS[function]
            assert function.partition("_")[0] in reading.problems[0]
        assert all(getattr(found[2], name) is not None for name in READ)
        assert found[2].problems == ()
        assert [u.busy for u in evaluate(found, processes=ListedProcesses(), leased={})] == [
            None
        ] * 3


READ = ("compute", "graphics", "used", "free", "total", "utilization", "compute_mode", "display")


def test_an_older_driver(plain: FakeDriver) -> None:
    """What its function for memory calls used says nothing; what is free is true."""
    plain.omit(COMPUTE, GRAPHICS, "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMigMode")
    plain.use(0, ELSEWHERE)
    plain.use(1, ELSEWHERE, graphics=True)
    _, [readings], notes = session(plain)
    assert notes == ()
    first, second, third = readings
    assert first.compute == second.graphics == {ELSEWHERE: 500 * MIB}
    assert (third.used, third.free, third.total) == (None, 80 * GIB - 483 * MIB, 80 * GIB)
    assert [problem.partition(":")[0] for problem in third.problems] == ["memory in use"] * 2
    assert "keeps for itself" in third.problems[1]
    on_host = evaluate(readings, processes=ListedProcesses(), leased={})
    assert [usage.busy for usage in on_host] == [Busy.PROCESSES, None, None]
    inside = evaluate(readings, processes=ListedProcesses(first_namespace=False), leased={})
    assert [usage.busy for usage in inside] == [Busy.PROCESSES, *[Busy.UNREADABLE] * 2]


class TestLeftOut:
    def test_denied_by_a_device_cgroup(self, driver: FakeDriver) -> None:
        driver.deny(0)
        devices, [readings], notes = session(driver)
        assert devices == DEVICES[1:]
        assert len(readings) == 3
        [note] = notes
        assert note.startswith("GPU 0 is left out: its handle: ")
        assert "nvmlDeviceGetHandleByIndex" in note

    def test_those_that_cuda_may_count(self, driver: FakeDriver) -> None:
        """Not the denied one; the lost one, and from a look on the one that was lost before it."""
        driver.deny(0)
        driver.fail("nvmlDeviceGetHandleByIndex_v2", NVML.UNKNOWN, gpu=1)
        driver.fail("*", NVML.GPU_IS_LOST, gpu=2, after=5)
        program = """
from gpuaff._system.nvml import open_session
with open_session() as session:
    print(*[one.index for one in session.left_out()])
    session.look()
    print(*session.left_out(), sep="; ")
"""
        first, second = driver.run(program).stdout.splitlines()
        assert first == "1"
        told = "GPU 1 is left out: its handle: Unknown Error (nvmlDeviceGetHandleByIndex); GPU 2 "
        assert second.startswith(f"{told}is left out: ")
        assert second.count("GPU is lost") == 1

    def test_an_instance_without_uuid(self, driver: FakeDriver) -> None:
        driver.fail("nvmlDeviceGetUUID", NVML.UNKNOWN, gpu=1, after=1)
        devices, _, notes = session(driver)
        assert [device.uuid for device in devices] == ["GPU-0", "GPU-2"]
        assert notes[0].startswith("GPU 1: UUID of a MIG instance: ")

    @pytest.mark.case("D2")
    def test_cut_into_nothing(self, fake_driver: MakeDriver) -> None:
        driver = fake_driver(Topology(gpus=(Gpu(index=0, mig=()),)))
        devices, [readings], notes = session(driver)
        assert (devices, readings) == ((), ())
        assert notes == (
            "GPU 0: it is in MIG mode and has no instance, so there is nothing to claim",
        )

    def test_what_is_not_needed_to_tell_devices_apart(self, driver: FakeDriver) -> None:
        driver.fail("nvmlDeviceGetName", NVML.UNKNOWN, gpu=0)
        driver.fail("nvmlDeviceGetPciInfo_v3", NVML.UNKNOWN, gpu=0)
        devices, [readings], notes = session(driver)
        assert devices[0] == Device(index=0, uuid="GPU-0")
        assert len(notes) == 2
        assert readings[0].problems == (), "what failed before a look is no problem of it"


def test_a_gpu_that_falls_off_the_bus(driver: FakeDriver) -> None:
    """It is not asked again: it would say the same, and may take long to say it."""
    driver.fail(COMPUTE, NVML.GPU_IS_LOST, gpu=1, after=2)
    _, [first, second, third], _ = session(driver, looks=3)
    assert [reading.lost for reading in first] == [False] * 4
    assert [reading.lost for reading in second] == [False, True, True, False]
    assert second[1].problems == second[2].problems == third[1].problems
    assert "nvmlDeviceGetComputeRunningProcesses" in second[1].problems[0]
    assert driver.calls(COMPUTE) == 2 + 1, "of two instances, and once in vain"
    assert third[1:3] == second[1:3]
    found = evaluate(third, processes=ListedProcesses(), leased={})
    assert [usage.busy for usage in found] == [None, Busy.LOST, Busy.LOST, None]
    assert found[1].lasting


ALL = [*FIELDS, "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID", "nvmlDeviceGetName"]


def test_a_look_asks_no_more_than_it_needs(plain: FakeDriver) -> None:
    """Six questions a GPU, and a seventh for each list that is not empty."""
    plain.watch(*ALL, "nvmlDeviceGetMigMode", "nvmlDeviceGetPciInfo_v3")
    plain.use(0, ELSEWHERE)
    session(plain, looks=10)
    counts = {function: plain.calls(function) for function in ALL}
    assert counts == {
        COMPUTE: 30 + 10,
        GRAPHICS: 30,
        "nvmlDeviceGetMemoryInfo_v2": 30,
        "nvmlDeviceGetUtilizationRates": 0,
        "nvmlDeviceGetComputeMode": 30,
        "nvmlDeviceGetDisplayActive": 30,
        "nvmlDeviceGetHandleByIndex_v2": 3,
        "nvmlDeviceGetUUID": 3,
        "nvmlDeviceGetName": 3,
    }
    assert plain.calls("nvmlDeviceGetMigMode") == plain.calls("nvmlDeviceGetPciInfo_v3") == 3
