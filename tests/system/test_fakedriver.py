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


@pytest.mark.fake_driver
class TestLibrary:
    def test_handles_by_name_and_address(self, fake_driver: MakeDriver) -> None:
        program = """
from pynvml import *
nvmlInit()
print(nvmlDeviceGetIndex(nvmlDeviceGetHandleByUUID("GPU-b")))
print(nvmlDeviceGetIndex(nvmlDeviceGetHandleByPciBusId("0000:0b:00.0")))
print(nvmlDeviceGetIndex(nvmlDeviceGetHandleByPciBusId("00000000:0A:00.0")))
instance = nvmlDeviceGetHandleByUUID("MIG-1")
print(nvmlDeviceGetGpuInstanceId(instance), nvmlDeviceGetComputeInstanceId(instance))
print(nvmlDeviceGetIndex(nvmlDeviceGetDeviceHandleFromMigDeviceHandle(instance)))
"""
        assert fake_driver(PAIR).run(program).stdout.split() == ["1", "1", "0", "3", "1", "1"]

    @pytest.mark.parametrize(
        ("call", "error"),
        [
            ("nvmlDeviceGetHandleByUUID('GPU-c')", "NotFound"),
            ("nvmlDeviceGetHandleByPciBusId('0000:0c:00.0')", "NotFound"),
            ("nvmlDeviceGetHandleByIndex(2)", "InvalidArgument"),
            ("nvmlDeviceGetCpuAffinity(nvmlDeviceGetHandleByUUID('MIG-1'), 1)", "InvalidArgument"),
            ("nvmlDeviceGetGpuInstanceId(nvmlDeviceGetHandleByIndex(1))", "NotSupported"),
            ("nvmlDeviceGetFanSpeed(nvmlDeviceGetHandleByIndex(0))", "FunctionNotFound"),
        ],
    )
    def test_refusals(self, fake_driver: MakeDriver, call: str, error: str) -> None:
        program = f"""
from pynvml import *
nvmlInit()
try:
    print({call})
except NVMLError as error:
    print(type(error).__name__)
"""
        assert fake_driver(PAIR).run(program).stdout == f"NVMLError_{error}\n"

    def test_nothing_works_before_the_start(self, fake_driver: MakeDriver) -> None:
        program = """
from pynvml import *
nvmlInit()
gpu = nvmlDeviceGetHandleByIndex(0)
nvmlShutdown()
for call in (nvmlDeviceGetCount, lambda: nvmlDeviceGetName(gpu), nvmlShutdown):
    try:
        call()
    except NVMLError_Uninitialized:
        print("uninitialized")
"""
        assert fake_driver(PAIR).run(program).stdout.split() == ["uninitialized"] * 3

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
        assert driver.inits == 4 * (1 + 4 * 50)
        assert driver.shutdowns == driver.inits

    @pytest.mark.parametrize("text", [b"", b"x" * 4096])
    def test_a_state_that_is_none(
        self, fake_driver: MakeDriver, tmp_path: Path, text: bytes
    ) -> None:
        state = tmp_path / "other"
        state.write_bytes(text)
        program = "import pynvml; pynvml.nvmlInit()"
        env = {"GPUAFF_FAKE_STATE": str(state)}
        done = fake_driver(PAIR).run(program, env=env, check=False)
        assert "NVMLError_DriverNotLoaded" in done.stderr
        assert f"fake driver: GPUAFF_FAKE_STATE={state}: not of the size" in done.stderr

    def test_a_state_of_another_version(self, fake_driver: MakeDriver) -> None:
        driver = fake_driver(PAIR)
        driver.state.version += 1
        done = driver.run("import pynvml; pynvml.nvmlInit()", check=False)
        assert "not a state of the version" in done.stderr

    def test_faults_on_one_gpu_after_some_calls(self, fake_driver: MakeDriver) -> None:
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


class TestTooMuch:
    def test_gpus(self, tmp_path: Path) -> None:
        machine = Topology(gpus=tuple(Gpu(index=index) for index in range(33)))
        with pytest.raises(ValueError, match="room for 32 GPUs, not 33"):
            FakeDriver(machine, tmp_path)

    def test_faults(self, tmp_path: Path) -> None:
        driver = FakeDriver(PAIR, tmp_path)
        with pytest.raises(ValueError, match="room for 64 faults"):
            driver.watch(*["nvmlDeviceGetName"] * 65)


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TESTS / "fakedriver" / "make.py"), *arguments]
    return run(command, env={}, check=False)


@pytest.mark.fake_driver
class TestMake:
    def test_prints_the_variables(self, tmp_path: Path) -> None:
        out = tmp_path / "a folder"
        done = make("this-machine:2", str(out))
        assert done.returncode == 0
        assert [line.split("=")[0] for line in done.stdout.splitlines()] == [
            "export LD_LIBRARY_PATH",
            "export GPUAFF_FAKE_STATE",
        ]
        program = f"{done.stdout}exec {sys.executable} -c '{self.COUNT}'"
        assert run(["sh", "-c", program], env={}).stdout == "2\n"

    COUNT = "import pynvml as n; n.nvmlInit(); print(n.nvmlDeviceGetCount())"

    def test_runs_the_command(self, tmp_path: Path) -> None:
        done = make("this-machine:3", str(tmp_path), "--", sys.executable, "-c", self.COUNT)
        assert done.stdout == "3\n"

    def test_passes_the_exit_code_on(self, tmp_path: Path) -> None:
        assert make("this-machine:1", str(tmp_path), "--", "sh", "-c", "exit 7").returncode == 7

    def test_every_cpu_of_this_machine_is_near(self, tmp_path: Path) -> None:
        program = """
import os
from gpuaff._system import nvml
with nvml.open_session() as session:
    gpus, _ = session.read_gpus(highest_cpu=8191)
for gpu in gpus:
    assert gpu.node_cpus == gpu.socket_cpus
    assert gpu.node_cpus >= os.sched_getaffinity(0)
    print(gpu.index, gpu.memory_nodes)
"""
        done = make("this-machine:2", str(tmp_path), "--", sys.executable, "-c", program)
        assert done.stdout == "0 frozenset({0})\n1 frozenset({0})\n", done.stderr

    def test_a_saved_topology(self, tmp_path: Path) -> None:
        saved = tmp_path / "saved.json"
        PAIR.save(saved)
        program = self.COUNT + "; print(n.nvmlDeviceGetUUID(n.nvmlDeviceGetHandleByIndex(1)))"
        done = make(str(saved), str(tmp_path / "out"), "--", sys.executable, "-c", program)
        assert done.stdout == "2\nGPU-b\n", done.stderr

    @pytest.mark.parametrize("arguments", [[], ["this-machine:1"], ["--", "true"], ["a", "b", "c"]])
    def test_wrong_use(self, arguments: list[str]) -> None:
        done = make(*arguments)
        assert done.returncode == 2
        assert "make.py MACHINE OUTDIR" in done.stderr
        assert done.stdout == ""

    def test_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        done = make("this-machine:1", str(tmp_path / "file"))
        assert done.returncode == 1
        assert done.stderr.startswith("make.py: ")


class TestWithoutCompiler:
    """Skips are said on a person's machine, and are failures in CI."""

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

    def test_skip(self, outcome: Callable[..., str]) -> None:
        output = outcome(PATH="/nowhere", CC="", GPUAFF_CI="")
        assert "1 skipped" in output
        assert "needs compiler" in output

    def test_fail_in_ci(self, outcome: Callable[..., str]) -> None:
        output = outcome(PATH="/nowhere", CC="", GPUAFF_CI="1")
        assert "1 error" in output
        assert "in CI it must be there" in output

    def test_a_compiler_that_does_not_build(
        self, outcome: Callable[..., str], tmp_path: Path
    ) -> None:
        broken = tmp_path / "bin" / "gcc"
        broken.parent.mkdir()
        broken.write_text("#!/bin/sh\nexit 1\n")
        broken.chmod(0o755)
        assert "1 skipped" in outcome(PATH=f"{broken.parent}:/nowhere", CC="", GPUAFF_CI="")
