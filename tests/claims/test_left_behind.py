"""A claim that fails leaves nothing behind: no lock, no variable, no CPU, no file, no context."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import fakedriver
from tests.claim_lab import BEGIN, Lab
from tests.fakedriver.driver import FakeDriver
from tests.fakedriver.state import CUDA, NVML

pytestmark = pytest.mark.fake_driver

NVML_SOURCE = Path(fakedriver.__path__[0], "nvml.c")


@contextmanager
def stranger() -> Iterator[int]:
    """A process that is nobody's parent and nobody's child here."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process.pid
        process.kill()


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

    @pytest.mark.parametrize("error", ["ValueError", "KeyboardInterrupt"])
    def test_on_wait_raises(self, lab: Lab, error: str) -> None:
        lab.holder("claim_gpus(4)")
        code = f"""
        def on_wait(waiting):
            raise {error}("no")
        told(refused(2, wait=20, on_wait=on_wait))
        """
        assert lab.one(code) == f"{error} no"

    def test_in_time_or_not(self, lab: Lab) -> None:
        holder = lab.holder("claim_gpus(3)")
        said = lab.one("told(refused(2, wait=0.1))")
        wanted = r"ClaimTimeoutError waited [0-9.]+ s: requested 2 GPUs; only 1 is free"
        assert re.match(wanted, said)
        assert f"pid {holder.pid}" in said

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

    def test_the_library_is_the_stub_for_building(self, lab: Lab) -> None:
        lab.driver.fail("cuDeviceGetCount", 34)
        lab.driver.fail("cuInit", 34)
        said = lab.one("told(refused(2))")
        assert said.startswith("PlaceholderError ")
        assert "take CUDA's stubs folder out of LD_LIBRARY_PATH" in said

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

    def test_a_stranger_comes_between(self, lab: Lab) -> None:
        code = """
        told(refused(1, placeholder=occupant_that_waits()))
        """
        program = lab.start(code)
        program.heard()
        with stranger() as pid:
            lab.driver.use(0, pid)
            program.go_on()
            said = program.heard()
        assert said.startswith(
            "ClaimLostError GPU 0 was free and is leased, but a process that takes no"
        )
        assert f"(pid {pid})" in said
        assert program.end() == ""

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
    def test_what_a_claim_asks(self, lab: Lab) -> None:
        assert "nvmlDeviceGetHandleByIndex_v2" in asked_by_a_claim(lab)

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

    @pytest.mark.slow
    @pytest.mark.timeout(600)
    def test_who_is_killed_meanwhile_leaves_nothing(self, lab: Lab) -> None:
        calls = asked_by_a_claim(lab)
        for name, count in calls.items():
            for after in range(0, count + 1, 1 + count // 6):
                lab.driver.kill_at(name, after=after, times=1)
                lab.start(TRY).wait()
                lab.driver.heal()
        assert lab.one("say(gpuaff.claim_gpus(4))") == "<Claim of GPU 0, GPU 1, GPU 2, GPU 3>"


INTERRUPTED = """
import faulthandler, random
faulthandler.dump_traceback_later(110, exit=True)  # a hang tells where
rng = random.Random(int(sys.stdin.readline()))
call = json.loads(sys.stdin.readline())

def interrupt(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupt)

def once(limit):
    # One claim, interrupted or not; whether it was, and how long it took.
    start = time.perf_counter()
    hit = False
    try:
        signal.setitimer(signal.ITIMER_REAL, limit)
        try:
            with gpuaff.claim_gpus(**call):
                pass
        except ClaimError:
            pass
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        hit = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        claim = gpuaff.current_claim()
        if claim is not None:  # it came just after the call
            claim.release()
    return hit, time.perf_counter() - start

once(100)
took = max(once(100)[1] for _ in range(3))
hits, wanted, wrong = 0, int(sys.stdin.readline()), []
while hits < wanted:
    before = state()
    hit, lasted = once(rng.uniform(0.0001, took))
    hits += hit
    took = took if hit else min(took, lasted)
    after = state()
    if differs(before, after):
        wrong.append(str(differs(before, after)))
say(len(wrong), *wrong[:3])
"""


class TestCtrlC:
    """Interrupted at random moments, in one process that tries again and again."""

    def tried(self, lab: Lab, call: str, times: int) -> None:
        program = lab.start(INTERRUPTED)
        for line in (str(time.time_ns()), call, str(times)):
            program.go_on(line)
        assert program.heard() == "0"

    @pytest.mark.parametrize("call", ['{"n": 2}', '{"n": 1, "wait": 0.05}'])
    def test_a_few(self, lab: Lab, call: str) -> None:
        if "wait" in call:
            lab.holder("claim_gpus(4)")
        self.tried(lab, call, 15)

    @pytest.mark.slow
    @pytest.mark.timeout(600)
    @pytest.mark.parametrize(
        "call", ['{"n": 2}', '{"n": 2, "pin": true, "placeholder": null}', '{"n": 2, "wait": 0.1}']
    )
    def test_many(self, lab: Lab, call: str) -> None:
        if "wait" in call:
            lab.holder("claim_gpus(3)")
        self.tried(lab, call, int(os.environ.get("TURNS", "300")))

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

    def test_ctrl_c_itself(self, lab: Lab) -> None:
        lab.holder("claim_gpus(4)")
        program = lab.start("told(refused(1, wait=None, on_wait=say))")
        assert program.heard().startswith("Waiting(position=0, ")
        program.kill(signal.SIGINT)
        assert program.heard() == "KeyboardInterrupt"
        assert program.end() == ""
