"""A claim that fails leaves nothing behind: no lock, no variable, no CPU, no file, no context."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests import fakedriver
from tests.claim_lab import BEGIN, Lab
from tests.fakedriver.driver import FakeDriver
from tests.fakedriver.state import CUDA, NVML

pytestmark = pytest.mark.fake_driver

NVML_SOURCE = Path(fakedriver.__path__[0], "nvml.c")


class TestWhatIsRaised:
    @pytest.mark.parametrize("error", ["ValueError", "KeyboardInterrupt", "SystemExit"])
    @pytest.mark.parametrize("visible", ["'index'", "None"])
    def test_a_placeholder_raises(self, lab: Lab, error: str, visible: str) -> None:
        code = f"""
        def occupant(number):
            if number:
                raise {error}("no")
            os.environ["MINE"] = "stays"
            return number
        occupant.release = lambda held: say("back", held)
        os.environ["MINE"] = "stays"
        told(refused(2, placeholder=occupant, visible={visible}, pin=True))
        """
        assert lab.run(code) == ["back 0", f"{error} no"]

    def test_a_placeholder_that_forks(self, lab: Lab) -> None:
        """A child that leaves by an error has nothing to give back: it is its parent's."""
        code = """
        def occupant(number):
            pid = os.fork()
            if pid == 0:
                sys.exit(0)
            os.waitpid(pid, 0)
        main = os.getpid()
        try:
            claim = gpuaff.claim_gpus(2, placeholder=occupant)
        except SystemExit:
            os._exit(0)
        say(len(locked()))
        go_on()
        """
        program = lab.start(code)
        assert int(program.heard()) > 2
        said = lab.refused("3")
        assert "only 2 are free | " in said
        assert " | GPU 0: leased by" in said

    @pytest.mark.parametrize(
        ("function", "code"),
        [
            ("cuInit", 101),
            ("cuDeviceGetCount", 999),
            ("cuDeviceGetUuid_v2", 999),
            ("cuDevicePrimaryCtxRetain", 46),
        ],
    )
    @pytest.mark.parametrize("visible", ["'index'", "None"])
    def test_cuda_fails(self, lab: Lab, function: str, code: int, visible: str) -> None:
        lab.driver.fail(function, code)
        said = lab.one(f"told(refused(2, visible={visible}))")
        assert said.startswith("PlaceholderError ")
        assert "\n" not in said
        assert lab.used() == []

    def test_the_second_context_fails(self, lab: Lab) -> None:
        """The error has what could not be occupied, and CUDA's code; without a context: no GPU."""
        uuid = "GPU-00000000-0000-4000-8000-000000000001"
        code = "error = refused(2); told(error); say(error.placeholder, error.gpus, error.code)"
        lab.driver.fail("cuDevicePrimaryCtxRetain", CUDA.OUT_OF_MEMORY, gpu=1)
        said, data = lab.run(code)
        assert f"could not occupy {uuid}" in said
        assert data == f"context ('{uuid}',) 2"
        assert lab.used() == []
        lab.driver.fail("cuInit", CUDA.UNKNOWN)
        assert lab.run(code)[1] == "context () 999"

    def test_another_process_comes_between(self, lab: Lab) -> None:
        code = """
        error = refused(1, placeholder=occupant_that_waits())
        told(error)
        say(*error.gpus, *error.pids, error.cuda_started)
        """
        program = lab.start(code)
        program.heard()
        other = lab.start("say()\ngo_on()")
        other.heard()
        lab.driver.use(0, other.pid)
        program.go_on()
        assert program.heard().startswith("ClaimLostError GPU 0 was free and is leased, but a")
        assert program.heard() == f"GPU-00000000-0000-4000-8000-000000000000 {other.pid} True"

    def test_cuda_shows_other_gpus(self, lab: Lab) -> None:
        code = """
        def occupant(number):
            from gpuaff._system import cuda
            os.environ["CUDA_VISIBLE_DEVICES"] = "3"
            cuda.start()
            os.environ["CUDA_VISIBLE_DEVICES"] = "0"
        told(refused(1, placeholder=occupant))
        """
        said = lab.one(code)
        assert said.startswith("PlaceholderError claimed was GPU-")
        assert "but CUDA shows this process 00000000-0000-4000-8000-000000000003" in said

    def test_without_libcuda(self, driver: FakeDriver, tmp_path: Path) -> None:
        """NVML alone is there, as in a container without the capability "compute"."""
        env = driver.env()
        folder = tmp_path / "only-nvml"
        folder.mkdir()
        (folder / "libnvidia-ml.so.1").symlink_to(
            Path(env["LD_LIBRARY_PATH"].split(":")[0], "libnvidia-ml.so.1")
        )
        env |= {
            "LD_LIBRARY_PATH": str(folder),
            "GPUAFF_LOCK_DIR": str(tmp_path / "locks"),
            "GPUAFF_SAFE_GPU": "off",
        }
        said = driver.run(
            f"{BEGIN}\ntold(refused(1)); say(gpuaff.claim_gpus(placeholder=None))", env=env
        )
        lines = said.stdout.splitlines()
        assert lines[0].startswith(
            "PlaceholderError placeholder='context': the NVIDIA driver's libr"
        )
        assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in lines[0]
        assert lines[1] == "<Claim of GPU 0>"


TRY = """
before = state()
try:
    claim = gpuaff.claim_gpus(2, max_utilization=90, pin=True)
except GpuaffError as error:
    said = repr(error)
else:
    said = str(claim)
    claim.release()
after = state()
assert not differs(before, after), (differs(before, after), said)
say(said)
"""


@pytest.mark.parametrize("code", [NVML.UNKNOWN, NVML.GPU_IS_LOST, NVML.UNINITIALIZED])
class TestNvmlFails:
    def test_all_of_it_in_the_midst_of_a_claim(self, lab: Lab, code: int) -> None:
        lab.driver.fail("*", code, after=25)
        lab.one(TRY)
        assert lab.used() == []

    @pytest.mark.slow
    @pytest.mark.timeout(600)
    def test_each_function_from_each_call_on(self, lab: Lab, code: int) -> None:
        names = sorted(set(re.findall(r"\b(nvml[A-Z]\w+)\(", NVML_SOURCE.read_text())))
        lab.driver.watch(*names[:60])
        assert lab.one(TRY) == "<Claim of GPU 0, GPU 1>"
        calls = {name: lab.driver.calls(name) for name in names[:60]}
        lab.driver.heal()
        assert calls["nvmlDeviceGetHandleByIndex_v2"]
        for name, count in calls.items():
            for after in range(0, count, 1 + count // 12):
                lab.driver.fail(name, code, after=after)
                lab.one(TRY)
                lab.driver.heal()
                assert lab.used() == []


class TestCtrlC:
    """At moments of which random ones (test_crashes.py) hit few."""

    @pytest.mark.parametrize("function", ["nvmlInitWithFlags", "nvmlShutdown"])
    def test_while_pynvml_has_its_lock(self, lab: Lab, function: str) -> None:
        """It does not give it back by itself, and the next claim would wait for ever."""
        code = f"""
        import os, pynvml, signal
        def trace(frame, event, _):
            if frame.f_code.co_name == "{function}" and pynvml.libLoadLock.locked():
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
            return trace
        sys.settrace(trace)
        told(refused(1))
        say(gpuaff.claim_gpus())
        """
        assert lab.run(code) == ["KeyboardInterrupt ", "<Claim of GPU 0>"]

    def test_in_a_placeholder_that_hangs(self, lab: Lab) -> None:
        code = """
        def occupant(number):
            if number:
                say("now")
                hang()
            return number
        occupant.release = lambda held: say("back", held)
        told(refused(2, placeholder=occupant))
        """
        program = lab.start(code)
        assert program.heard() == "now"
        program.kill(signal.SIGINT)
        assert [program.heard(), program.heard()] == ["back 0", "KeyboardInterrupt"]

    @pytest.mark.parametrize("function", ["acquire", "occupy"])
    @pytest.mark.parametrize("placeholder", ["'context'", "occupant"])
    def test_just_when_one_returns(self, lab: Lab, placeholder: str, function: str) -> None:
        """Before the caller has what it must let go of."""
        code = f"""
        from gpuaff._system import cuda
        released = []
        class Occupant:
            def __call__(self, number):
                return number
            def release(self, number):
                released.append(number)
        occupant = Occupant()
        def trace(frame, event, _):
            is_ours = frame.f_globals.get("__name__", "").startswith("gpuaff.claims")
            if is_ours and frame.f_code.co_name == "{function}" and event == "return":
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
            return trace
        before = state()
        sys.settrace(trace)
        told(refused(2, placeholder={placeholder}))
        say(differs(before, state()), released, gpuaff.current_claim())
        go_on()
        """
        program = lab.start(code)
        assert program.heard() == "KeyboardInterrupt"
        assert program.heard() == f"{{}} {[] if 'context' in placeholder else [1, 0]} None"
        assert lab.used() == []
