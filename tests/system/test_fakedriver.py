"""The fake driver itself: what other tests rely on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuaff.topology.model import Gpu, MigInstance, Topology
from tests.fakedriver.driver import FakeDriver, MakeDriver, run
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

    @pytest.mark.parametrize("text", [b"", b"x" * 4096])
    def test_a_state_of_another_size_is_refused(
        self, fake_driver: MakeDriver, tmp_path: Path, text: bytes
    ) -> None:
        state = tmp_path / "other"
        state.write_bytes(text)
        env = {"GPUAFF_FAKE_STATE": str(state)}
        done = fake_driver(PAIR).run(COUNT, env=env, check=False)
        assert "NVMLError_DriverNotLoaded" in done.stderr
        assert f"fake driver: GPUAFF_FAKE_STATE={state}: not of the size" in done.stderr

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


def test_it_has_room_for_32_gpus_and_64_faults(tmp_path: Path) -> None:
    machine = Topology(gpus=tuple(Gpu(index=index) for index in range(33)))
    with pytest.raises(ValueError, match="room for 32 GPUs, not 33"):
        FakeDriver(machine, tmp_path)
    with pytest.raises(ValueError, match="room for 64 faults"):
        FakeDriver(PAIR, tmp_path).watch(*["nvmlDeviceGetName"] * 65)


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

    @pytest.mark.parametrize("arguments", [[], ["this-machine:1"], ["--", "true"], ["a", "b", "c"]])
    def test_wrong_use_is_explained(self, arguments: list[str]) -> None:
        done = make(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert "make.py MACHINE OUTDIR" in done.stderr


class TestWithoutCompiler:
    """Tests that need it are skipped on a person's machine, and fail in CI."""

    @pytest.fixture
    def outcome(self, tmp_path: Path) -> Callable[..., str]:
        test = tmp_path / "test_it.py"
        test.write_text("import pytest\n@pytest.mark.fake_driver\ndef test_it(): pass\n")

        def outcome(**env: str) -> str:
            options = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-c", "/dev/null"]
            command = [sys.executable, "-m", "pytest", *options, "--rootdir", str(tmp_path)]
            command += ["-rs", "-p", "tests.conftest", str(test)]
            # Without its plugins it starts in half of the time.
            few = {"PYTHONPATH": str(TESTS.parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
            return run(command, env={**few, **env}, check=False).stdout

        return outcome

    def test_they_fail_in_ci(self, outcome: Callable[..., str]) -> None:
        output = outcome(PATH="/nowhere", CC="", GPUAFF_CI="1")
        assert "1 error" in output
        assert "in CI it must be there" in output

    def test_they_are_skipped_where_the_compiler_does_not_build(
        self, outcome: Callable[..., str], tmp_path: Path
    ) -> None:
        broken = tmp_path / "bin" / "gcc"
        broken.parent.mkdir()
        broken.write_text("#!/bin/sh\nexit 1\n")
        broken.chmod(0o755)
        output = outcome(PATH=f"{broken.parent}:/nowhere", CC="", GPUAFF_CI="")
        assert "1 skipped" in output
        assert "needs compiler" in output
