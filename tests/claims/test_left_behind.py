"""A claim that fails leaves nothing behind: no lock, no variable, no CPU, no file, no context."""

from __future__ import annotations

import re
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
        said = lab.one("told(refused(3))")
        assert "only 2 are free | " in said
        assert " | GPU 0: leased by" in said

    @pytest.mark.parametrize(
        ("function", "code"),
        [
            *(("cuInit", code) for code in (100, 101, 3, 46, 999)),
            ("cuDeviceGetCount", 999),
            ("cuDeviceGet", 101),
            ("cuDeviceGetUuid_v2", 999),
            ("cuDevicePrimaryCtxRetain", 2),
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
        lab.driver.fail("cuDevicePrimaryCtxRetain", CUDA.OUT_OF_MEMORY, gpu=1)
        code = "told(refused(2)); go_on()"
        program = lab.start(code)
        assert "could not occupy GPU-00000000-0000-4000-8000-000000000001" in program.heard()
        assert lab.used() == []

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
        assert "but CUDA shows this process GPU-00000000-0000-4000-8000-000000000003" in said

    def test_a_gpu_is_lost_while_it_is_claimed(self, lab: Lab) -> None:
        code = """
        from gpuaff._system import cuda
        def occupant(number):
            cuda.start()
            say("now")
            go_on()
        told(refused(1, placeholder=occupant))
        """
        program = lab.start(code)
        program.heard()
        lab.driver.fail("*", NVML.GPU_IS_LOST, gpu=0)
        program.go_on()
        assert program.heard().startswith("PlaceholderError GPU 0 was lost while it was claimed")

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


def asked_by_a_claim(lab: Lab) -> dict[str, int]:
    """How often a claim that succeeds calls each of NVML's functions."""
    known = re.findall(r"\b(nvml[A-Z]\w+)\(", NVML_SOURCE.read_text())
    names = sorted(set(known))[:60]
    lab.driver.watch(*names)
    assert lab.one(TRY) == "<Claim of GPU 0, GPU 1>"
    found = {name: lab.driver.calls(name) for name in names}
    lab.driver.heal()
    return {name: count for name, count in found.items() if count}


class TestNvmlFails:
    @pytest.mark.parametrize("code", [NVML.UNKNOWN, NVML.GPU_IS_LOST, NVML.UNINITIALIZED])
    def test_at_once(self, lab: Lab, code: int) -> None:
        lab.driver.fail("*", code, after=25)
        lab.one(TRY)
        assert lab.used() == []

    @pytest.mark.slow
    @pytest.mark.timeout(600)
    @pytest.mark.parametrize("code", [NVML.UNKNOWN, NVML.GPU_IS_LOST, NVML.UNINITIALIZED])
    def test_after_each_number_of_calls(self, lab: Lab, code: int) -> None:
        """Each function fails from its first, second, … call on; then all of them do."""
        tried = 0
        calls = asked_by_a_claim(lab)
        for name, count in [*calls.items(), ("*", sum(calls.values()))]:
            for after in range(0, count + 1, 1 + count // 12):
                lab.driver.fail(name, code, after=after)
                lab.one(TRY)
                lab.driver.heal()
                assert lab.used() == []
                tried += 1
        assert tried > 50


class TestCtrlC:
    """Interrupted at random moments, in one process that tries again and again."""

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

    @pytest.mark.parametrize("placeholder", ["'context'", "occupant"])
    def test_just_when_all_is_occupied(self, lab: Lab, placeholder: str) -> None:
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
            if frame.f_code.co_name == "occupy" and event == "return":
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
            return trace
        before = state()
        sys.settrace(trace)
        told(refused(2, placeholder={placeholder}))
        say(differs(before, state()), released)
        go_on()
        """
        program = lab.start(code)
        assert program.heard() == "KeyboardInterrupt"
        assert program.heard() == f"{{}} {[] if 'context' in placeholder else [1, 0]}"
        assert lab.used() == []
