"""The gate to NVML: the real nvidia-ml-py over the fake driver."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuaff._system.nvml_records import pci_address
from tests.fakedriver.driver import MakeDriver
from tests.fakedriver.state import NVML
from tests.nvml_reading import FULL, SLICES, full, one_gpu, read, without


@pytest.mark.fake_driver
class TestGoodReading:
    def test_all_fields(self, fake_driver: MakeDriver) -> None:
        reading = read(fake_driver(FULL), links=True)
        assert reading.gpus == (full(0), full(1), full(2))
        assert reading.links == FULL.links

    @pytest.mark.case("G1", "G2", "gpu-affinity-rule-6")
    @pytest.mark.parametrize("count", [64, 65, 1280, 2048, 8192])
    def test_masks_go_up_to_the_highest_cpu(self, fake_driver: MakeDriver, count: int) -> None:
        near = frozenset({0, count // 2, count - 1})
        driver = fake_driver(one_gpu(node_cpus=near, socket_cpus=frozenset(range(count))))
        (gpu,) = read(driver).gpus
        assert gpu.node_cpus == near
        assert gpu.socket_cpus == frozenset(range(count))

    @pytest.mark.parametrize("nodes", [[0], [1023], [0, 1, 64]])
    def test_memory_nodes(self, fake_driver: MakeDriver, nodes: list[int]) -> None:
        driver = fake_driver(one_gpu(memory_node=nodes[0]))
        driver.set_memory(0, nodes)
        (gpu,) = read(driver).gpus
        assert gpu.memory_nodes == frozenset(nodes)
        assert gpu.memory_node == nodes[0]

    def test_a_release_of_pynvml_that_lacks_functions(self, fake_driver: MakeDriver) -> None:
        before = "import pynvml; del pynvml.nvmlDeviceGetNumaNodeId, pynvml.nvmlDeviceGetName"
        (gpu, *_) = read(fake_driver(FULL), before=before).gpus
        assert without(gpu) == without(full(0), "memory_node", "name")
        assert gpu.problems == ("name: Function Not Found (nvmlDeviceGetName)",)


@pytest.mark.fake_driver
@pytest.mark.case("D2")
class TestMig:
    def test_empty_slots_are_skipped(self, fake_driver: MakeDriver) -> None:
        driver = fake_driver(one_gpu(mig=SLICES))
        used = [slot.used for slot in driver.state.gpus[0].mig[: driver.state.gpus[0].mig_slots]]
        assert used == [0, 1, 1, 0, 0, 0, 0]
        gpu = read(driver).gpus[0]
        assert gpu.mig == SLICES
        assert not [problem for problem in gpu.problems if "MIG" in problem]

    def test_on_without_instances(self, fake_driver: MakeDriver) -> None:
        assert read(fake_driver(one_gpu(mig=()))).gpus[0].mig == ()

    def test_an_instance_without_uuid_is_left_out(self, fake_driver: MakeDriver) -> None:
        driver = fake_driver(one_gpu(mig=SLICES))
        driver.fail("nvmlDeviceGetUUID", NVML.UNKNOWN, after=2)  # the GPU's and the first one's
        gpu = read(driver).gpus[0]
        assert gpu.mig == SLICES[:1]
        assert "UUID of a MIG instance: Unknown Error (nvmlDeviceGetUUID)" in gpu.problems


@pytest.mark.fake_driver
class TestOthersUseNvml:
    def test_a_users_own_start_outlives_ours(self, fake_driver: MakeDriver) -> None:
        driver = fake_driver(FULL)
        before = "import pynvml; pynvml.nvmlInit()"
        after = "assert pynvml.nvmlDeviceGetCount() == 3; pynvml.nvmlShutdown()"
        assert read(driver, before=before, after=after).gpus[0] == full(0)
        assert (driver.inits, driver.shutdowns) == (2, 2)

    def test_shut_down_even_when_interrupted(self, fake_driver: MakeDriver) -> None:
        driver = fake_driver(FULL)
        program = """
import pynvml
from gpuaff._system import nvml
def interrupted(handle):
    raise KeyboardInterrupt
pynvml.nvmlDeviceGetName = interrupted
try:
    with nvml.open_session() as session:
        session.read_gpus()
except KeyboardInterrupt:
    print("interrupted")
"""
        assert driver.run(program).stdout == "interrupted\n"
        assert (driver.inits, driver.shutdowns) == (1, 1)


class TestAddress:
    @given(
        st.integers(0, 0xFFFFFFFF), st.integers(0, 0xFF), st.integers(0, 0x1F), st.integers(0, 7)
    )
    def test_however_it_is_spelled(self, domain: int, bus: int, device: int, part: int) -> None:
        as_sysfs = f"{domain:04x}:{bus:02x}:{device:02x}.{part}"
        for spelled in (
            as_sysfs,
            as_sysfs.upper(),
            f"{domain:08X}:{bus:02X}:{device:02X}.{part}",
            f"{domain:x}:{bus:x}:{device:x}.{part}",
            f" {as_sysfs}\n",
        ):
            assert pci_address(spelled) == as_sysfs

    @pytest.mark.parametrize(
        "text", [None, "", "07:00.0", "0000:07:00", "0000:07:00.8", "x:07:0.0"]
    )
    def test_what_is_none(self, text: str | None) -> None:
        assert pci_address(text) is None
