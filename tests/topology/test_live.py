"""The live machine: the driver's word first, completed by /sys."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpuaff.cpuset import parse_cpulist
from gpuaff.topology.model import MigInstance
from tests.fakedriver.driver import FakeDriver, MakeDriver
from tests.fakedriver.play import this_machine
from tests.fakedriver.state import NVML
from tests.processes import CPUS

pytestmark = pytest.mark.fake_driver

OBSERVE = """
    import json, sys, gpuaff
    print(json.dumps(gpuaff.Topology.observe().to_dict()))
"""


def observed(driver: FakeDriver, **env: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(driver.run(OBSERVE.replace("\n    ", "\n"), env=env).stdout)
    return found


def codes(topology: dict[str, Any]) -> list[str]:
    return [note["code"] for note in topology["notes"]]


@pytest.fixture
def driver(fake_driver: MakeDriver) -> FakeDriver:
    return fake_driver(this_machine(2))


@pytest.mark.case("A7")
def test_the_driver_comes_first(driver: FakeDriver) -> None:
    driver.set_cpus(0, node=CPUS[:1], socket=CPUS)
    seen = observed(driver)
    assert seen["gpus"][0]["node_cpus"] == str(CPUS[0])
    assert parse_cpulist(seen["gpus"][0]["socket_cpus"]) == frozenset(CPUS)
    assert seen["gpus"][0]["source"] == "nvml"
    assert seen["visible"] == [0, 1]
    assert driver.inits == driver.shutdowns


@pytest.mark.case("A22")
def test_cpus_of_the_driver_that_do_not_exist_are_left_out(driver: FakeDriver) -> None:
    driver.set_cpus(0, node=[CPUS[0], 1000], socket=[1000])
    gpu = observed(driver)["gpus"][0]
    assert (gpu["node_cpus"], gpu["socket_cpus"]) == (str(CPUS[0]), None)


@pytest.mark.case("A1", "F1")
def test_what_the_driver_does_not_tell_is_null(driver: FakeDriver) -> None:
    driver.set_cpus(0, node=[], socket=None)
    driver.set_memory(0, None)
    seen = observed(driver)
    gpu = seen["gpus"][0]
    assert (gpu["node_cpus"], gpu["socket_cpus"], gpu["source"]) == (None, None, None)
    assert "nvml" in codes(seen)
    assert seen["gpus"][1]["source"] == "nvml", "the other GPU is not touched by it"


@pytest.mark.case("F5")
@pytest.mark.parametrize("code", [NVML.LIB_RM_VERSION_MISMATCH, NVML.DRIVER_NOT_LOADED])
def test_without_a_driver_there_are_cpus_and_no_gpus(driver: FakeDriver, code: int) -> None:
    driver.refuse(code)
    seen = observed(driver)
    assert seen["gpus"] == []
    assert seen["visible"] == []
    assert set(CPUS) <= parse_cpulist(seen["cpus"])
    assert codes(seen) == ["no-driver"]


def test_a_gpu_that_fell_off_the_bus_keeps_its_number(driver: FakeDriver) -> None:
    driver.lose_gpu(0)
    seen = observed(driver)
    assert [gpu["index"] for gpu in seen["gpus"]] == [0, 1]
    assert seen["gpus"][0]["uuid"] is None
    assert seen["gpus"][1]["source"] == "nvml"
    (note,) = [note for note in seen["notes"] if note["code"] == "visible-lost"]
    assert note["message"].startswith("GPU 0 is lost, and CUDA may count it or not: ")


@pytest.mark.parametrize(
    ("value", "visible", "is_doubtful"),
    [("1", [1], True), ("GPU-00000000-0000-4000-8000-000000000001", [1], False), ("", [], False)],
)
def test_numbers_are_doubtful_beside_a_gpu_without_handle(
    driver: FakeDriver, value: str, visible: list[int], is_doubtful: bool
) -> None:
    driver.fail("nvmlDeviceGetHandleByIndex_v2", NVML.UNKNOWN, gpu=0)
    seen = observed(driver, CUDA_VISIBLE_DEVICES=value, CUDA_DEVICE_ORDER="PCI_BUS_ID")
    assert seen["visible"] == visible
    assert ("visible-lost" in codes(seen)) is is_doubtful


def test_numbers_are_certain_beside_a_gpu_that_is_denied(driver: FakeDriver) -> None:
    driver.deny(0)
    seen = observed(driver, CUDA_VISIBLE_DEVICES="0")
    assert seen["visible"] == [1]
    assert "visible-lost" not in codes(seen)


@pytest.mark.case("D8", "visible-devices")
@pytest.mark.parametrize(("value", "visible"), [("1", [1]), ("1,0", [1, 0]), ("", []), ("9", [])])
def test_visible_devices(driver: FakeDriver, value: str, visible: list[int]) -> None:
    assert observed(driver, CUDA_VISIBLE_DEVICES=value)["visible"] == visible


@pytest.mark.case("D2")
def test_a_mig_instance_is_near_what_its_gpu_is_near(fake_driver: MakeDriver) -> None:
    machine = this_machine(2)
    slice_ = MigInstance(
        uuid="MIG-11111111-2222-3333-4444-555555555555", gpu_instance=3, compute_instance=0
    )
    driver = fake_driver(
        machine._replace(gpus=(machine.gpus[0], machine.gpus[1]._replace(mig=(slice_,))))
    )
    assert observed(driver, CUDA_VISIBLE_DEVICES=slice_.uuid)["visible"] == [1]


@pytest.mark.case("A24")
def test_of_several_near_nodes_those_without_cpus_do_not_count(driver: FakeDriver) -> None:
    driver.set_memory(0, [0, *range(2, 18)])
    driver.set_memory(1, [300])
    seen = observed(driver)
    with_cpus = [node["id"] for node in seen["numa_nodes"] or [] if node["cpus"]]
    if with_cpus != [0]:
        pytest.skip("not here: a machine with one NUMA node")
    assert [gpu["numa_node"] for gpu in seen["gpus"]] == [0, 0], "from the CPUs it is near"


def test_what_is_saved_is_what_was_seen(driver: FakeDriver) -> None:
    script = """
import gpuaff, tempfile
seen = gpuaff.Topology.observe()
with tempfile.NamedTemporaryFile(suffix=".json") as file:
    seen.save(file.name)
    assert gpuaff.Topology.load(file.name) == seen
"""
    driver.run(script)
