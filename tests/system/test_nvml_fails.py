"""NVML where functions or GPUs fail: all that can be read is read."""

from __future__ import annotations

import pytest

from gpuaff._system.nvml_records import GpuReading
from tests.fakedriver.driver import MakeDriver
from tests.fakedriver.state import NVML
from tests.nvml_reading import FULL, SLICES, full, read, without

# Every function of one GPU that is called, and what is None where it fails.
FIELDS = {
    "nvmlDeviceGetUUID": ("uuid", "mig"),
    "nvmlDeviceGetName": ("name",),
    "nvmlDeviceGetPciInfo_v3": ("pci_bus_id",),
    "nvmlDeviceGetCpuAffinityWithinScope": ("node_cpus", "socket_cpus"),
    "nvmlDeviceGetMemoryAffinity": ("memory_nodes",),
    "nvmlDeviceGetNumaNodeId": ("memory_node",),
    "nvmlDeviceGetMigMode": ("mig",),
    "nvmlDeviceGetMaxMigDeviceCount": ("mig",),
    "nvmlDeviceGetMigDeviceHandleByIndex": ("mig",),
    "nvmlDeviceGetGpuInstanceId": ("mig",),
    "nvmlDeviceGetComputeInstanceId": ("mig",),
}
NOT_EVERYWHERE = ("nvmlDeviceGetNumaNodeId", "nvmlDeviceGetMigMode")
"""Not Supported is what most GPUs say here, so it is no problem."""


@pytest.mark.fake_driver
@pytest.mark.case("F1")
class TestOneFunctionFails:
    @pytest.mark.parametrize("function", FIELDS)
    def test_on_single_gpus(self, fake_driver: MakeDriver, function: str) -> None:
        driver = fake_driver(FULL)
        driver.fail(function, NVML.UNKNOWN, gpu=0)
        driver.fail(function, NVML.NOT_SUPPORTED, gpu=1)
        gpus = read(driver).gpus
        assert [without(g) for g in gpus[:2]] == [
            without(full(i), *FIELDS[function]) for i in range(2)
        ]
        assert gpus[2] == full(2)
        assert gpus[0].problems
        assert all(function.removesuffix("_v3") in problem for problem in gpus[0].problems)
        assert len(set(gpus[0].problems)) == len(gpus[0].problems)
        is_of_mig = FIELDS[function] == ("mig",)  # which GPU 1 has not
        assert bool(gpus[1].problems) is not (is_of_mig or function in NOT_EVERYWHERE)
        assert (driver.inits, driver.shutdowns) == (1, 1)

    def test_missing_from_the_library(self, fake_driver: MakeDriver) -> None:
        driver = fake_driver(FULL)
        driver.omit("nvmlDeviceGetCpuAffinityWithinScope", "nvmlDeviceGetMigMode")
        gpus = read(driver).gpus
        lost = ("node_cpus", "socket_cpus", "mig")
        assert [without(gpu) for gpu in gpus] == [without(full(i), *lost) for i in range(3)]
        function = "Function Not Found (nvmlDeviceGetCpuAffinityWithinScope)"
        assert gpus[0].problems == (
            f"CPUs of its node: {function}",
            f"CPUs of its socket: {function}",
        )

    def test_a_shutdown_that_fails(self, fake_driver: MakeDriver) -> None:
        driver = fake_driver(FULL)
        driver.fail("nvmlShutdown", NVML.UNKNOWN)
        assert read(driver).gpus == (full(0), full(1), full(2))

    def test_strings_that_pynvml_cannot_decode(self, fake_driver: MakeDriver) -> None:
        before = """
import pynvml
def broken(*arguments):
    return b"\\xf8".decode()
pynvml.nvmlDeviceGetName = broken
"""
        reading = read(fake_driver(FULL), before=before)
        assert without(reading.gpus[0]) == without(full(0), "name")
        assert reading.gpus[0].problems == ("name: Unknown Error (nvmlDeviceGetName)",)

    @pytest.mark.case("A1")
    def test_an_empty_mask_is_none(self, fake_driver: MakeDriver) -> None:
        driver = fake_driver(FULL)
        driver.set_cpus(1, node=[], socket=range(16))
        driver.set_cpus(2, node=[8, 9, 10, 11], socket=[])
        driver.set_memory(1, [])
        gpus = read(driver).gpus
        assert gpus[0] == full(0)
        assert without(gpus[1]) == without(full(1), "node_cpus", "memory_nodes")
        assert without(gpus[2]) == without(full(2), "socket_cpus")
        assert len(gpus[1].problems) == 2
        assert "the mask is empty" in gpus[2].problems[0]


@pytest.mark.fake_driver
class TestHalfWay:
    @pytest.mark.parametrize("served", [1, 2, 4, 6, 11, 17, 30, 45])
    def test_what_was_read_stays(self, fake_driver: MakeDriver, served: int) -> None:
        driver = fake_driver(FULL)
        driver.fail("*", NVML.UNKNOWN, after=served)
        reading = read(driver, links=True)
        assert len(reading.gpus) == 3
        for gpu in reading.gpus:
            told = {name: getattr(gpu, name) for name in GpuReading._fields if name != "problems"}
            lost = [name for name, value in told.items() if value is None]
            good = full(gpu.index)._replace(
                mig=gpu.mig if gpu.mig == SLICES[:1] else full(gpu.index).mig,
                lost=any(problem.startswith("its handle") for problem in gpu.problems),
            )
            assert without(gpu) == without(good, *lost)
        said = [problem for gpu in reading.gpus for problem in gpu.problems]
        assert said
        assert (driver.inits, driver.shutdowns) == (1, 1)

    def test_a_lost_gpu_keeps_its_index(self, fake_driver: MakeDriver) -> None:
        driver = fake_driver(FULL)
        driver.lose_gpu(1)
        reading = read(driver, links=True)
        assert (reading.gpus[0], reading.gpus[2]) == (full(0), full(2))
        assert reading.gpus[1] == GpuReading(
            index=1,
            lost=True,
            problems=("its handle: GPU is lost (nvmlDeviceGetHandleByIndex)",),
        )
        assert reading.links == (("X", "N/A", "SYS"), ("N/A", "X", "N/A"), ("SYS", "N/A", "X"))

    def test_a_gpu_that_is_lost_meanwhile_is_not_asked_again(self, fake_driver: MakeDriver) -> None:
        driver = fake_driver(FULL)
        driver.lose_gpu(1, after=3)  # handle, UUID, name
        gpus = read(driver).gpus
        assert without(gpus[1]) == GpuReading(
            index=1, uuid=full(1).uuid, name=full(1).name, lost=True
        )
        assert gpus[1].problems == ("PCI address: GPU is lost (nvmlDeviceGetPciInfo)",)
        assert driver.calls("*") == 4
        assert (gpus[0], gpus[2]) == (full(0), full(2))

    def test_a_gpu_that_this_user_may_not_use(self, fake_driver: MakeDriver) -> None:
        driver = fake_driver(FULL)
        driver.lose_gpu(0, NVML.NO_PERMISSION)
        gpus = read(driver).gpus
        told = "its handle: Insufficient Permissions (nvmlDeviceGetHandleByIndex)"
        assert gpus[0] == GpuReading(index=0, denied=True, problems=(told,))
        assert gpus[1:] == (full(1), full(2))
