"""The fake driver's CUDA, and what its NVML tells of it: what trials of claims rely on.

Asked by ctypes and by the real nvidia-ml-py, in processes of their own. The numbers are those of
a real machine with 4 H100 (driver 580.159.04).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import pytest

from gpuaff.topology.model import Topology
from gpuaff.topology.visible import resolve
from tests.fakedriver.driver import FakeDriver, MakeDriver
from tests.fakedriver.state import CUDA, Mode
from tests.processes import Program, stopped
from tests.visible_machines import MIGS, UUIDS, gpus, observed, with_mig

pytestmark = pytest.mark.fake_driver

MIB = 1 << 20

CALLS = """
import ctypes, os, signal, sys, time
cuda = ctypes.CDLL("libcuda.so.1")
number = ctypes.c_int()
context = ctypes.c_void_p()
def count():
    return cuda.cuDeviceGetCount(ctypes.byref(number)), number.value
def retain(device):
    return cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
release = cuda.cuDevicePrimaryCtxRelease_v2
def uuid(device):
    room = (ctypes.c_ubyte * 16)()
    assert cuda.cuDeviceGetUuid_v2(room, device) == 0
    return bytes(room).hex()
"""
"""What a script may begin with that talks with CUDA."""

NVML_CALLS = """
import os
from pynvml import *
nvmlInit()
gpu = [nvmlDeviceGetHandleByIndex(index) for index in range(nvmlDeviceGetCount())]
def listed(index, ask=nvmlDeviceGetComputeRunningProcesses):
    return [(p.pid, p.usedGpuMemory) for p in ask(gpu[index])]
def memory(index):
    found = nvmlDeviceGetMemoryInfo(gpu[index], version=nvmlMemory_v2)
    return [value >> 20 for value in (found.total, found.reserved, found.used, found.free)]
"""
"""The same with NVML."""

HOLD = f"""{CALLS}
cuda.cuInit(0)
print(retain(int(os.environ.get("DEVICE", "0"))))
sys.stdin.readline()
print(release(int(os.environ.get("DEVICE", "0"))))
sys.stdin.readline()
"""


def say(driver: FakeDriver, program: str) -> list[str]:
    """The lines that a program printed on the machine."""
    return driver.run(program).stdout.splitlines()


@contextmanager
def holder(driver: FakeDriver, *, device: int = 0, code: int = 0) -> Iterator[Program]:
    """A process that has asked for a context, and was answered this code."""
    env = {**driver.env(), "DEVICE": str(device)}
    with stopped(HOLD, env=env, fresh=True) as process:
        assert process.heard() == str(code)
        yield process


def ended(process: Program, sent: int = signal.SIGKILL) -> None:
    """Kill a process and wait until it is a zombie: nobody has reaped it yet."""
    os.kill(process.pid, sent)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


SHOWN = f"""{CALLS}
import json
for text, order in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        for name, value in (("VISIBLE_DEVICES", text), ("DEVICE_ORDER", order)):
            if value is not None:
                os.environ["CUDA_" + name] = value
        code = cuda.cuInit(0)
        print(json.dumps(code or [uuid(i) for i in range(count()[1])]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def shown(
    driver: FakeDriver, settings: list[tuple[str | None, str | None]]
) -> list[int | list[str]]:
    """For each list and order the UUIDs of the devices, or the error of cuInit."""
    known = {uuid[4:].replace("-", ""): uuid for uuid in (*UUIDS, *MIGS)}
    told = driver.run([sys.executable, "-c", SHOWN, json.dumps(settings)]).stdout.splitlines()
    found = [json.loads(line) for line in told]
    return [row if isinstance(row, int) else [known[uuid] for uuid in row] for row in found]


class TestVisibleDevices:
    @pytest.mark.case("visible-devices")
    @pytest.mark.parametrize("machine", [4, 1])
    def test_observed(self, fake_driver: MakeDriver, machine: int) -> None:
        """Each row of the table that was seen on real machines."""
        rows = [row[1:] for row in observed() if row[0] == machine]
        codes = {"none": CUDA.NO_DEVICE, "error 101": CUDA.INVALID_DEVICE}
        driver = fake_driver(Topology(gpus=gpus(machine)))
        answers = shown(driver, [(text, order) for text, order, _ in rows])
        for (text, order, seen), answer in zip(rows, answers, strict=True):
            devices = [] if seen in codes else [UUIDS[int(place)] for place in seen.split(", ")]
            assert answer == (codes.get(seen) or devices), (text, order)

    def test_as_we_read_it_with_mig(self, fake_driver: MakeDriver) -> None:
        """Nobody has observed MIG: two readings of the manual, written apart, agree."""
        machine = with_mig()
        names = ["0", "1", "2", "3", UUIDS[0], UUIDS[1], UUIDS[2], *MIGS, "MIG-bbbb"]
        names.append(f"MIG-{UUIDS[1]}/2/0")
        lists = [None, *names, *(f"{one},{other}" for one, other in product(names, repeat=2))]
        parents = {one.uuid: gpu.uuid for gpu in machine for one in gpu.mig or ()}
        driver = fake_driver(Topology(gpus=machine))
        for text, answer in zip(lists, shown(driver, [(one, None) for one in lists]), strict=True):
            ours = resolve(machine, text)
            if isinstance(answer, int):
                (note,) = ours.notes
                failed = {"visible-error": CUDA.INVALID_DEVICE, "visible-none": CUDA.NO_DEVICE}
                assert answer == failed[note.code], text
            else:
                assert len(answer) == len(ours.indices), text
                found = [parents.get(uuid, uuid) for uuid in answer]
                assert found == [UUIDS[index] for index in ours.indices], text


class TestContexts:
    def test_seen_by_nvml_in_another_process(self, driver: FakeDriver) -> None:
        program = f"{NVML_CALLS}print(listed(0), memory(0), listed(1), memory(1))"
        idle = [80 << 10, 480, 3, (80 << 10) - 483]
        held = [80 << 10, 480, 521, (80 << 10) - 1001]
        with holder(driver, device=1) as process:
            told = f"[] {idle} [({process.pid}, {518 * MIB})] {held}"
            assert say(driver, program) == [told]
            assert driver.contexts(1) == {process.pid}
            process.go_on("release")
            assert process.heard() == "0"
            assert say(driver, program) == [f"[] {idle} [] {idle}"]
        assert driver.contexts_made(1) == 1

    def test_the_dead_linger(self, driver: FakeDriver) -> None:
        """As long as was said, from when somebody has seen that they are dead."""
        driver.linger(300)
        program = f"""{NVML_CALLS}
import time
print(len(listed(0)), memory(0)[2])
begun = time.monotonic()
while listed(0):
    time.sleep(0.01)
print(time.monotonic() - begun, memory(0)[2])
"""
        with holder(driver) as process:
            ended(process)
            assert driver.contexts(0) == set()
            first, second = say(driver, program)
        assert first == "1 521"
        assert 0.2 < float(second.split()[0]) < 5
        assert second.split()[1] == "3"


class TestComputeMode:
    def test_exclusive(self, driver: FakeDriver) -> None:
        driver.set_compute_mode(0, Mode.EXCLUSIVE_PROCESS)
        with holder(driver):
            with holder(driver, code=CUDA.DEVICE_UNAVAILABLE), holder(driver, device=1):
                pass
            assert len(driver.contexts(0)) == 1
        with holder(driver):  # the first one is dead
            pass
        assert driver.double_holdings() == []


class TestDoubleHolding:
    def test_two_on_one(self, driver: FakeDriver) -> None:
        with holder(driver) as first, holder(driver, device=1):
            assert driver.double_holdings() == []
            before = time.monotonic()
            with holder(driver) as second:
                (row,) = driver.double_holdings()
                assert row[:4] == (0, None, first.pid, second.pid)
                assert before <= row.at <= time.monotonic()
        assert (driver.contexts_made(0), driver.contexts_made(1)) == (2, 1)
