"""Who computes on which GPU, as the fake driver tells it."""

from __future__ import annotations

import json

import pytest

from gpuaff.topology.model import Gpu, MigInstance, Topology
from tests.fakedriver.driver import FakeDriver, MakeDriver
from tests.fakedriver.state import NVML

pytestmark = pytest.mark.fake_driver

FUNCTION = "nvmlDeviceGetComputeRunningProcesses"

PAIR = Topology(
    gpus=(
        Gpu(index=0, pci_bus_id="0000:0a:00.0"),
        Gpu(
            index=1,
            pci_bus_id="0000:0b:00.0",
            mig=(
                MigInstance(uuid="MIG-1", gpu_instance=3, compute_instance=0),
                MigInstance(uuid="MIG-2", gpu_instance=4, compute_instance=0),
            ),
        ),
    )
)

READ = """
import json
from gpuaff._system import nvml
with nvml.open_session() as session:
    found = {}
    for one in session.look():
        pids, problems = found.get(one.device.index, ([], []))
        pids = None if one.compute is None else [*pids, *one.compute]
        found[one.device.index] = pids, [*problems, *one.problems]
print(json.dumps([[index, *lists] for index, lists in found.items()]))
"""


@pytest.fixture
def driver(fake_driver: MakeDriver) -> FakeDriver:
    return fake_driver(PAIR)


def read(driver: FakeDriver) -> list[tuple[int, list[int] | None]]:
    """Who is on each GPU; nothing has failed."""
    told = json.loads(driver.run(READ).stdout)
    assert not any(problems for _, _, problems in told)
    return [(index, pids) for index, pids, _ in told]


def test_nobody(driver: FakeDriver) -> None:
    assert read(driver) == [(0, []), (1, [])]
    assert driver.inits == driver.shutdowns > 0


def test_several(driver: FakeDriver) -> None:
    for pid in (10, 11, 12):
        driver.use(0, pid)
    driver.use(1, 11, slot=1)
    assert read(driver) == [(0, [10, 11, 12]), (1, [11])]
    driver.leave(11)
    assert read(driver) == [(0, [10, 12]), (1, [])]


@pytest.mark.case("D2")
def test_only_root_is_told_about_all_of_a_gpu_with_mig(driver: FakeDriver) -> None:
    driver.use(1, 20, slot=1)
    driver.use(1, 21, slot=2)
    driver.hide_processes()
    assert read(driver)[1] == (1, [20, 21])


def test_older_drivers_have_another_function(driver: FakeDriver) -> None:
    driver.use(0, 10)
    driver.omit(f"{FUNCTION}_v3")
    assert read(driver)[0] == (0, [10])


@pytest.mark.case("F1")
def test_one_gpu_does_not_tell(driver: FakeDriver) -> None:
    driver.use(0, 10)
    driver.use(1, 11, slot=1)
    driver.fail(f"{FUNCTION}_v3", NVML.NOT_SUPPORTED, gpu=0)
    first, second = json.loads(driver.run(READ).stdout)
    assert first[:2] == [0, None]
    assert "its processes" in first[2][0]
    assert second == [1, [11], []]


def test_a_lost_gpu(driver: FakeDriver) -> None:
    driver.use(1, 11, slot=1)
    driver.lose_gpu(0)
    assert json.loads(driver.run(READ).stdout) == [[1, [11], []]]


def test_nvml_as_others_see_it(driver: FakeDriver) -> None:
    driver.use(0, 10, memory=1 << 30)
    driver.use(1, 11, slot=1)
    program = """
from pynvml import *
nvmlInit()
for index in (0, 1):
    for p in nvmlDeviceGetComputeRunningProcesses(nvmlDeviceGetHandleByIndex(index)):
        print(p.pid, p.usedGpuMemory >> 20, p.gpuInstanceId)
"""
    none = 0xFFFFFFFF
    assert driver.run(program).stdout.splitlines() == [f"10 1024 {none}", "11 500 3"]
