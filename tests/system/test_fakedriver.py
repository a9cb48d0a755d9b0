"""The fake driver itself: what other tests rely on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuaff.topology.model import Gpu, MigInstance, Topology
from tests.fakedriver.driver import MakeDriver, run
from tests.fakedriver.state import NVML

TESTS = Path(__file__).parents[1]

MIG = MigInstance(uuid="MIG-1", gpu_instance=3, compute_instance=1)
PAIR = Topology(
    gpus=(
        Gpu(index=0, uuid="GPU-a", pci_bus_id="0000:0a:00.0", node_cpus=frozenset({0})),
        Gpu(index=1, uuid="GPU-b", pci_bus_id="0000:0b:00.0", mig=(MIG,)),
    )
)
COUNT = "import pynvml as n; n.nvmlInit(); print(n.nvmlDeviceGetCount())"


@pytest.mark.fake_driver
class TestLibrary:
    def test_refusals_are_nvmls(self, fake_driver: MakeDriver) -> None:
        program = """
from pynvml import *
nvmlInit()
gpu = nvmlDeviceGetHandleByIndex(1)
instance = nvmlDeviceGetMigDeviceHandleByIndex(gpu, 1)
def refused(call):
    try:
        call()
    except NVMLError as error:
        print(type(error).__name__)
refused(lambda: nvmlDeviceGetHandleByIndex(2))
refused(lambda: nvmlDeviceGetCpuAffinity(instance, 1))
refused(lambda: nvmlDeviceGetGpuInstanceId(gpu))
refused(lambda: nvmlDeviceGetFanSpeed(gpu))
nvmlShutdown()
refused(lambda: nvmlDeviceGetName(gpu))
refused(nvmlShutdown)
"""
        assert fake_driver(PAIR).run(program).stdout.split() == [
            "NVMLError_InvalidArgument",
            "NVMLError_InvalidArgument",
            "NVMLError_NotSupported",
            "NVMLError_FunctionNotFound",
            "NVMLError_Uninitialized",
            "NVMLError_Uninitialized",
        ]

    def test_processes_share_the_state(self, fake_driver: MakeDriver) -> None:
        """Many processes at once lose no count: the lock holds, in forked children too."""
        driver = fake_driver(PAIR)
        driver.watch("nvmlSystemGetDriverVersion")
        program = """
import os
from pynvml import *
nvmlInit()
children = [os.fork() for _ in range(2)]
for _ in range(50):
    nvmlSystemGetDriverVersion()
    nvmlInit()
    nvmlShutdown()
if all(children):
    for child in children:
        os.waitpid(child, 0)
    nvmlShutdown()
"""
        driver.run(program)  # builds the library
        env = {**os.environ, **driver.env()}
        command = [sys.executable, "-c", program]
        several = [subprocess.Popen(command, env=env) for _ in range(3)]
        assert [process.wait(40) for process in several] == [0, 0, 0]
        # Each program: the parent, 2 children and the child of the second fork in the first.
        assert driver.calls("nvmlSystemGetDriverVersion") == 4 * 4 * 50
        assert driver.inits == driver.shutdowns == 4 * (1 + 4 * 50)

    def test_a_fault_acts_on_its_gpu_after_its_calls(self, fake_driver: MakeDriver) -> None:
        driver = fake_driver(PAIR)
        driver.fail("nvmlDeviceGetUUID", NVML.GPU_IS_LOST, gpu=1, after=1)
        program = """
from pynvml import *
nvmlInit()
for _ in range(2):
    for index in range(2):
        try:
            print(nvmlDeviceGetUUID(nvmlDeviceGetHandleByIndex(index)))
        except NVMLError_GpuIsLost:
            print("lost")
"""
        assert driver.run(program).stdout.split() == ["GPU-a", "GPU-b", "GPU-a", "lost"]
        assert driver.calls("nvmlDeviceGetUUID") == 2


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TESTS / "fakedriver" / "make.py"), *arguments]
    return run(command, env={}, check=False)


@pytest.mark.fake_driver
class TestMake:
    def test_it_prints_the_variables(self, tmp_path: Path) -> None:
        out = tmp_path / "a folder"
        done = make("this-machine:2", str(out))
        assert done.returncode == 0
        assert [line.split("=")[0] for line in done.stdout.splitlines()] == [
            "export LD_LIBRARY_PATH",
            "export GPUAFF_FAKE_STATE",
        ]
        program = f"{done.stdout}exec {sys.executable} -c '{COUNT}'"
        assert run(["sh", "-c", program], env={}).stdout == "2\n"

    def test_it_becomes_the_command_on_a_saved_machine(self, tmp_path: Path) -> None:
        saved = tmp_path / "saved.json"
        PAIR.save(saved)
        program = f"{COUNT}; print(n.nvmlDeviceGetUUID(n.nvmlDeviceGetHandleByIndex(1))); exit(7)"
        done = make(str(saved), str(tmp_path / "out"), "--", sys.executable, "-c", program)
        assert done.stdout == "2\nGPU-b\n", done.stderr
        assert done.returncode == 7


@pytest.mark.parametrize(("ci", "outcome"), [("", "1 skipped"), ("1", "1 error")])
def test_without_a_compiler_tests_that_need_it_are_skipped_and_fail_in_ci(
    tmp_path: Path, ci: str, outcome: str
) -> None:
    test = tmp_path / "test_it.py"
    test.write_text("import pytest\n@pytest.mark.fake_driver\ndef test_it(): pass\n")
    options = ["-q", "-p", "no:cacheprovider", "-p", "tests.conftest", "-c", "/dev/null"]
    command = [sys.executable, "-m", "pytest", *options, "--rootdir", str(tmp_path), str(test)]
    # Without its plugins it starts in half of the time.
    env = {"PYTHONPATH": str(TESTS.parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = run(command, env={**env, "PATH": "/nowhere", "CC": "", "GPUAFF_CI": ci}, check=False)
    assert outcome in done.stdout
