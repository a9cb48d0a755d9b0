"""The fake driver's CUDA, and what its NVML tells of it: what trials of claims rely on.

Asked by ctypes and by the real nvidia-ml-py, in processes of their own. The numbers are those of
a real machine with 4 H100 (driver 580.159.04).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from textwrap import dedent

import pytest

from gpuaff.topology.model import Gpu, MigInstance, Topology
from gpuaff.topology.visible import resolve
from tests.fakedriver.driver import FakeDriver, MakeDriver
from tests.fakedriver.play import this_machine
from tests.fakedriver.state import CUDA, FOREIGN, NVML, Mode
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
for line in sys.stdin:
    if line.strip() == "release":
        print(release(int(os.environ.get("DEVICE", "0"))))
    if line.strip() == "fork":
        child = os.fork()
        if not child:
            time.sleep(60)
        print(child)
    if line.strip() == "exec":
        os.execv(sys.executable, [sys.executable, "-uc", "print('new'); input()"])
"""


def say(driver: FakeDriver, program: str) -> list[str]:
    """The lines that a program printed on the machine."""
    return driver.run(program).stdout.splitlines()


@contextmanager
def holder(
    driver: FakeDriver, *, device: int = 0, code: int = 0, visible: str | None = None
) -> Iterator[Program]:
    """A process that has asked for a context, and was answered this code."""
    env = {**driver.env(), "DEVICE": str(device)}
    if visible is not None:
        env["CUDA_VISIBLE_DEVICES"] = visible
    with stopped(HOLD, env=env, fresh=True) as process:
        assert process.heard() == str(code)
        yield process


def ended(process: Program, sent: int = signal.SIGKILL) -> None:
    """Kill a process and wait until it is a zombie: nobody has reaped it yet."""
    os.kill(process.pid, sent)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


class TestStart:
    def test_before_cuinit_nothing_is_there(self, driver: FakeDriver) -> None:
        program = f"""{CALLS}
print(count()[0], retain(0), release(0), cuda.cuCtxGetCurrent(ctypes.byref(context)))
print(cuda.cuDriverGetVersion(ctypes.byref(number)), number.value)
print(cuda.cuInit(0), cuda.cuInit(0), *count(), cuda.cuInit(1))
"""
        assert say(driver, program) == ["3 3 3 3", "0 13000", "0 0 0 2 1"]

    def test_in_a_forked_child_every_call_fails(self, driver: FakeDriver) -> None:
        program = f"""{CALLS}
early = os.fork()
if not early:
    print(cuda.cuInit(0), *count(), flush=True)
    os._exit(0)
os.waitpid(early, 0)
cuda.cuInit(0)
retain(0)
late = os.fork()
if not late:
    print(cuda.cuInit(0), count()[0], retain(0), release(0), flush=True)
    os._exit(0)
os.waitpid(late, 0)
print(*count())
"""
        assert say(driver, program) == ["0 0 2", "3 3 3 3", "0 2"]

    def test_the_devices_are_latched(self, driver: FakeDriver) -> None:
        program = f"""{CALLS}
os.environ["CUDA_VISIBLE_DEVICES"] = "1"
cuda.cuInit(0)
os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
cuda.cuInit(0)
print(*count(), uuid(0)[-1], retain(1))
"""
        assert say(driver, program) == [f"0 1 1 {CUDA.INVALID_DEVICE}"]
        assert (driver.contexts_made(0), driver.contexts_made(1)) == (0, 0)

    def test_who_a_device_is(self, fake_driver: MakeDriver) -> None:
        gpu = Gpu(index=0, uuid=UUIDS[0], name="NVIDIA H100", pci_bus_id="0000:0a:00.0")
        program = f"""{CALLS}
cuda.cuInit(0)
text = ctypes.create_string_buffer(64)
assert cuda.cuDeviceGet(ctypes.byref(number), 0) == 0
print(uuid(number.value))
for ask in (cuda.cuDeviceGetName, cuda.cuDeviceGetPCIBusId):
    assert ask(text, 64, number.value) == 0
    print(text.value.decode())
"""
        assert say(fake_driver(Topology(gpus=(gpu,))), program) == [
            UUIDS[0].removeprefix("GPU-").replace("-", ""),
            "NVIDIA H100",
            "0000:0a:00.0",
        ]

    def test_errors_have_names(self, driver: FakeDriver) -> None:
        program = f"""{CALLS}
text = ctypes.c_char_p()
for code in (46, 100, 12345):
    print(cuda.cuGetErrorName(code, ctypes.byref(text)), text.value)
print(cuda.cuGetErrorString(46, ctypes.byref(text)), text.value)
"""
        assert say(driver, program) == [
            "0 b'CUDA_ERROR_DEVICE_UNAVAILABLE'",
            "0 b'CUDA_ERROR_NO_DEVICE'",
            "1 None",
            "0 b'CUDA-capable device(s) is/are busy or unavailable'",
        ]

    def test_the_stub(self, driver: FakeDriver) -> None:
        driver.be_stub()
        assert say(driver, f"{CALLS}print(cuda.cuInit(0))") == [str(CUDA.STUB_LIBRARY)]


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

    def test_unlike_gpus(self, fake_driver: MakeDriver) -> None:
        """CUDA's own order is another one than NVML's, unless it is told (case D6)."""
        driver = fake_driver(Topology(gpus=gpus(4)))
        driver.set_fastest([2, 3, 0, 1])
        lists: list[tuple[str | None, str | None]] = [("0,3", None), ("0,3", "PCI_BUS_ID")]
        assert shown(driver, lists) == [[UUIDS[2], UUIDS[1]], [UUIDS[0], UUIDS[3]]]

    def test_a_gpu_that_a_device_cgroup_denies(self, fake_driver: MakeDriver) -> None:
        """NVML counts it, CUDA does not."""
        driver = fake_driver(Topology(gpus=gpus(3)))
        driver.deny(0)
        assert shown(driver, [(None, None), ("0", None)]) == [[UUIDS[1], UUIDS[2]], [UUIDS[1]]]
        program = """
from pynvml import *
nvmlInit()
print(nvmlDeviceGetCount())
try:
    nvmlDeviceGetHandleByIndex(0)
except NVMLError_NoPermission:
    print("denied")
"""
        assert say(driver, program) == ["3", "denied"]


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

    def test_cuinit_alone_is_not_seen(self, driver: FakeDriver) -> None:
        program = f"{CALLS}{NVML_CALLS}print(cuda.cuInit(0), listed(0), memory(0)[2])"
        assert say(driver, program) == ["0 [] 3"]

    def test_retained_twice_is_once(self, driver: FakeDriver) -> None:
        program = f"""{CALLS}{NVML_CALLS}
state = ctypes.c_uint(), ctypes.c_int()
def see():
    cuda.cuDevicePrimaryCtxGetState(0, *map(ctypes.byref, state))
    print([memory >> 20 for pid, memory in listed(0)], state[1].value)
cuda.cuInit(0)
for _ in range(2):
    retain(0)
    see()
for _ in range(2):
    release(0)
    see()
print(release(0))
"""
        assert say(driver, program) == ["[518] 1", "[518] 1", "[518] 1", "[] 0", "201"]
        assert driver.contexts_made(0) == 1

    def test_contexts_beside_the_primary_one(self, driver: FakeDriver) -> None:
        program = f"""{CALLS}{NVML_CALLS}
def see():
    print([memory >> 20 for pid, memory in listed(0)])
now = ctypes.c_void_p()
cuda.cuInit(0)
cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0)
cuda.cuCtxGetCurrent(ctypes.byref(now))
print(now.value == context.value)
mine = ctypes.c_void_p(context.value)
retain(0)
see()
print(cuda.cuCtxDestroy_v2(mine), cuda.cuCtxDestroy_v2(mine))
see()
print(cuda.cuCtxSetCurrent(mine), cuda.cuCtxSetCurrent(context))
release(0)
see()
"""
        assert say(driver, program) == ["True", "[1036]", "0 201", "[518]", "201 0", "[]"]

    def test_memory_is_counted(self, driver: FakeDriver) -> None:
        driver.set_memory_total(0, 2 << 30)
        program = f"""{CALLS}{NVML_CALLS}
free, total, place = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_ulonglong()
def allocate(mib):
    return cuda.cuMemAlloc_v2(ctypes.byref(place), ctypes.c_size_t(mib << 20))
def see():
    code = cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    print(code, free.value >> 20, total.value >> 20, [m >> 20 for p, m in listed(0)])
cuda.cuInit(0)
print(allocate(1))
retain(0)
cuda.cuCtxSetCurrent(context)
see()
print(allocate(512), allocate(1024))
see()
print(cuda.cuMemFree_v2(place), cuda.cuMemFree_v2(place))
see()
allocate(100)
release(0)
print(memory(0)[2])
"""
        idle = 2048 - 483 - 518
        assert say(driver, program) == [
            str(CUDA.INVALID_CONTEXT),
            f"0 {idle} 2048 [518]",
            f"0 {CUDA.OUT_OF_MEMORY}",
            f"0 {idle - 512} 2048 [1030]",
            f"0 {CUDA.INVALID_VALUE}",
            f"0 {idle} 2048 [518]",
            "3",
        ]

    def test_no_memory_for_a_context(self, driver: FakeDriver) -> None:
        driver.set_memory_used(0, 80 << 30)
        with holder(driver, code=CUDA.OUT_OF_MEMORY):
            assert driver.contexts(0) == set()

    @pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
    def test_gone_with_the_death_of_its_process(self, driver: FakeDriver, sent: int) -> None:
        """A zombie has none any more."""
        with holder(driver) as process:
            ended(process, sent)
            assert driver.contexts(0) == set()
            assert say(driver, f"{NVML_CALLS}print(listed(0), memory(0)[2])") == ["[] 3"]

    def test_it_stays_while_its_process_is_stopped(self, driver: FakeDriver) -> None:
        with holder(driver) as process:
            os.kill(process.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            assert say(driver, f"{NVML_CALLS}print(listed(0)[0][0])") == [str(process.pid)]

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

    def test_a_child_of_a_killed_holder_keeps_the_memory(self, driver: FakeDriver) -> None:
        """The device is open there, too; the list names the holder alone, who is gone."""
        with holder(driver) as process:
            process.go_on("fork")
            child = int(process.heard())
            ended(process)
            see = f"{NVML_CALLS}print(listed(0), memory(0)[2])"
            assert say(driver, see) == ["[] 521"]
            os.kill(child, signal.SIGKILL)
            until(lambda: say(driver, see) == ["[] 3"])

    def test_exec_closes_it(self, driver: FakeDriver) -> None:
        with holder(driver) as process:
            process.go_on("exec")
            assert process.heard() == "new"
            assert driver.contexts(0) == set()
            assert say(driver, f"{NVML_CALLS}print(listed(0))") == ["[]"]

    @pytest.mark.case("E15")
    @pytest.mark.needs("pid-namespaces")
    def test_in_a_container(self, driver: FakeDriver) -> None:
        """There the driver's pids mean nothing, and here its processes have none of ours."""
        unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
        driver.use(0, os.getpid())
        program = f"""{CALLS}{NVML_CALLS}
cuda.cuInit(0)
print(retain(0), os.getpid(), [pid for pid, memory in listed(0)])
sys.stdin.read()
"""
        with stopped(program, env=driver.env(), prefix=unshare) as process:
            both = [os.getpid(), FOREIGN + 1]
            assert process.heard() == f"0 1 {both}"
            see = f"{NVML_CALLS}print([pid for pid, memory in listed(0)])"
            assert say(driver, see) == [str(both)]
            ended(process)
            until(lambda: say(driver, see) == [str(both[:1])])

    def test_taken_away_by_a_test(self, driver: FakeDriver) -> None:
        with holder(driver) as process:
            driver.leave(process.pid)
            assert driver.contexts(0) == set()
            process.go_on("release")
            assert process.heard() == "0"


def until(done: Callable[[], bool]) -> None:
    """Wait for something that another process does."""
    deadline = time.monotonic() + 20
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


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

    def test_exclusive_and_somebody_planted(self, driver: FakeDriver) -> None:
        driver.set_compute_mode(0, Mode.EXCLUSIVE_PROCESS)
        driver.use(0, os.getpid(), graphics=True)
        with holder(driver):
            pass
        driver.use(0, os.getpid())
        with holder(driver, code=CUDA.DEVICE_UNAVAILABLE):
            pass

    def test_prohibited(self, driver: FakeDriver) -> None:
        driver.set_compute_mode(0, Mode.PROHIBITED)
        with holder(driver, code=CUDA.DEVICE_UNAVAILABLE):
            assert say(driver, f"{NVML_CALLS}print(nvmlDeviceGetComputeMode(gpu[0]))") == ["2"]


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

    def test_one_after_the_other(self, driver: FakeDriver) -> None:
        """Neither who has released nor who is dead counts, nor whom a test has planted."""
        driver.use(0, os.getpid())
        driver.linger(60_000)
        with holder(driver) as first:
            first.go_on("release")
            first.heard()
            with holder(driver) as second:
                ended(second)
                with holder(driver):
                    assert driver.double_holdings() == []

    def test_the_child_of_a_killed_holder_counts(self, driver: FakeDriver) -> None:
        with holder(driver) as first:
            first.go_on("fork")
            child = int(first.heard())
            ended(first)
            with holder(driver):
                assert len(driver.double_holdings()) == 1
            os.kill(child, signal.SIGKILL)

    def test_mig_instances_are_apart(self, fake_driver: MakeDriver) -> None:
        driver = fake_driver(Topology(gpus=with_mig()))
        with holder(driver, visible=MIGS[0]), holder(driver, visible=MIGS[1]) as first:
            assert driver.double_holdings() == []
            with holder(driver, visible=MIGS[1]) as second:
                (row,) = driver.double_holdings()
                assert row[:4] == (1, 2, first.pid, second.pid)
            assert driver.contexts(1, slot=2) == {first.pid}
        assert driver.contexts_made(1) == 3

    def test_more_than_the_log_has_room_for(self, driver: FakeDriver) -> None:
        driver.state.double_count = 65
        with pytest.raises(AssertionError, match="65 double holdings"):
            driver.double_holdings()


class TestNvml:
    def test_planted_processes(self, driver: FakeDriver) -> None:
        """The living, until they are dead; those that nobody can look for, until they leave."""
        unknown = 4_000_000
        program = f"""{NVML_CALLS}
print(sorted(pid for pid, memory in listed(0)))
print(sorted(pid for pid, memory in listed(0, nvmlDeviceGetGraphicsRunningProcesses)))
"""
        with subprocess.Popen(["sleep", "60"]) as process:
            driver.use(0, process.pid, both=True)
            driver.use(0, unknown)
            driver.use(0, os.getpid(), graphics=True)
            both, alone = sorted([process.pid, unknown]), sorted([process.pid, os.getpid()])
            assert say(driver, program) == [str(both), str(alone)]
            assert driver.contexts(0) == set(both)
            process.kill()
        assert say(driver, program) == [f"[{unknown}]", f"[{os.getpid()}]"]
        driver.leave(unknown)
        assert say(driver, program) == ["[]", f"[{os.getpid()}]"]

    def test_memory(self, driver: FakeDriver) -> None:
        """The old function counts what the driver reserves as used; the new one does not."""
        driver.use(0, os.getpid(), memory=100 * MIB)
        driver.set_memory_used(0, 1000 * MIB)
        program = f"""{NVML_CALLS}
print(memory(0))
old = nvmlDeviceGetMemoryInfo(gpu[0])
print([value >> 20 for value in (old.total, old.used, old.free)])
try:
    nvmlDeviceGetMemoryInfo(gpu[0], version=3)
except NVMLError as error:
    print(error.value)
"""
        total, used = 80 << 10, 1103
        assert say(driver, program) == [
            str([total, 480, used, total - 480 - used]),
            str([total, 480 + used, total - 480 - used]),
            str(NVML.ARGUMENT_VERSION_MISMATCH.value),
        ]

    def test_memory_of_a_mig_instance(self, fake_driver: MakeDriver) -> None:
        mig = tuple(
            MigInstance(uuid=uuid, gpu_instance=place, compute_instance=0)
            for place, uuid in enumerate(MIGS)
        )
        driver = fake_driver(Topology(gpus=(Gpu(index=0, uuid=UUIDS[0], mig=mig),)))
        driver.set_memory_total(0, 70 << 30)
        driver.use(0, os.getpid(), memory=100 * MIB, slot=1)
        driver.set_memory_used(0, 10 * MIB, slot=2)
        program = f"""{NVML_CALLS}
print(memory(0)[2])
gpu += [nvmlDeviceGetMigDeviceHandleByIndex(gpu[0], slot) for slot in (1, 2, 3)]
print([memory(place) for place in (1, 2, 3)])
"""
        parts = [[10240, 0, used, 10240 - used] for used in (100, 10, 0)]
        assert say(driver, program) == ["113", str(parts)]

    @pytest.mark.case("E15")
    def test_processes_hidden(self, driver: FakeDriver) -> None:
        """As in some containers: nobody is there, and memory is in use."""
        driver.hide_all_processes()
        with holder(driver) as process:
            see = f"{NVML_CALLS}print(listed(0), memory(0)[2])"
            assert say(driver, see) == ["[] 521"]
            assert driver.contexts(0) == {process.pid}

    def test_memory_of_processes_not_told(self, driver: FakeDriver) -> None:
        driver.hide_process_memory()
        driver.use(0, os.getpid())
        assert say(driver, f"{NVML_CALLS}print(listed(0))") == [f"[({os.getpid()}, None)]"]

    def test_how_it_is_used(self, driver: FakeDriver) -> None:
        program = f"""{NVML_CALLS}
def ask(function):
    try:
        return function(gpu[0])
    except NVMLError as error:
        return type(error).__name__
print(ask(lambda gpu: nvmlDeviceGetUtilizationRates(gpu).gpu))
for function in (nvmlDeviceGetComputeMode, nvmlDeviceGetDisplayActive, nvmlDeviceGetDisplayMode):
    print(ask(function))
"""
        assert say(driver, program) == ["0", "0", "0", "0"]
        driver.set_utilization(0, 97)
        driver.set_compute_mode(0, Mode.EXCLUSIVE_PROCESS)
        driver.set_display(0, True, mode=False)
        assert say(driver, program) == ["97", "3", "1", "0"]
        driver.set_utilization(0, None)
        driver.set_compute_mode(0, None)
        driver.set_display(0, None)
        assert say(driver, program) == ["NVMLError_NotSupported"] * 4


class TestFaults:
    def test_fails(self, driver: FakeDriver) -> None:
        driver.fail("cuInit", CUDA.UNKNOWN, times=1)
        driver.fail("cuDevicePrimaryCtxRetain", CUDA.OUT_OF_MEMORY, gpu=1, after=1)
        program = f"""{CALLS}
print(cuda.cuInit(0), count()[0], cuda.cuInit(0))
print(retain(0), retain(1), retain(0), retain(1))
"""
        assert say(driver, program) == ["999 3 0", "0 0 0 2"]
        assert driver.calls("cuInit") == 2

    def test_takes_time(self, driver: FakeDriver) -> None:
        driver.hang("nvmlDeviceGetMemoryInfo_v2", ms=300)
        program = f"""{NVML_CALLS}
import time
begun = time.monotonic()
memory(0)
print(time.monotonic() - begun)
"""
        assert 0.3 <= float(say(driver, program)[0]) < 10

    @pytest.mark.parametrize("function", ["cuInit", "nvmlDeviceGetMemoryInfo_v2"])
    def test_hangs(self, driver: FakeDriver, function: str) -> None:
        """For ever, and others go on meanwhile: no lock is held."""
        driver.hang(function, times=1)
        program = f"{CALLS}{NVML_CALLS}print(1)\nprint(cuda.cuInit(0), memory(0)[2])"
        with stopped(program, env=driver.env(), fresh=True) as process:
            assert process.heard() == "1"
            until(lambda: driver.calls(function) == 1)
            assert say(driver, program) == ["1", "0 3"]
            assert process.is_running()

    def test_kills(self, driver: FakeDriver) -> None:
        driver.kill_at("cuDevicePrimaryCtxRetain", after=1)
        program = f"{CALLS}cuda.cuInit(0)\nprint(retain(0), flush=True)\nretain(1)"
        done = driver.run(program, check=False)
        assert (done.returncode, done.stdout) == (-signal.SIGKILL, "0\n")
        assert say(driver, f"{NVML_CALLS}print(listed(0), listed(1))") == ["[] []"]

    def test_stops(self, driver: FakeDriver) -> None:
        driver.stop_at("cuDevicePrimaryCtxRetain", gpu=0)
        with stopped(HOLD, env=driver.env(), fresh=True) as process:
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            with holder(driver):  # others go on
                pass
            os.kill(process.pid, signal.SIGCONT)
            assert process.heard() == "0"

    def test_only_one_process(self, driver: FakeDriver) -> None:
        driver.fail("cuInit", CUDA.UNKNOWN, pid=os.getpid())
        with holder(driver):
            assert driver.calls("cuInit") == 0

    def test_a_lost_gpu(self, driver: FakeDriver) -> None:
        driver.lose_gpu(1)
        with holder(driver), holder(driver, device=1, code=CUDA.UNKNOWN):
            pass

    def test_a_driver_without_a_function(self, driver: FakeDriver) -> None:
        driver.omit("cuDeviceGetUuid_v2", "nvmlDeviceGetMemoryInfo_v2")
        program = f"{CALLS}print(hasattr(cuda, 'cuDeviceGetUuid_v2'), hasattr(cuda, 'cuInit'))"
        assert say(driver, program) == ["False True"]


class TestNvidiaSmi:
    GPUS = "nvidia-smi --format=csv,noheader --query-gpu=index,gpu_bus_id"
    USERS = "nvidia-smi --format=csv,noheader --query-compute-apps=pid,gpu_bus_id"

    @staticmethod
    def smi(driver: FakeDriver, command: str) -> list[str]:
        return driver.run(command.split(), smi=True).stdout.splitlines()

    def test_what_safe_gpu_asks(self, driver: FakeDriver) -> None:
        first, second = "00000000:01:00.0", "00000000:02:00.0"
        assert self.smi(driver, self.GPUS) == [f"0, {first}", f"1, {second}"]
        assert self.smi(driver, self.USERS) == []
        with holder(driver, device=1) as process:
            assert self.smi(driver, self.USERS) == [f"{process.pid}, {second}"]

    @pytest.mark.parametrize(("shown", "word"), [(True, "Enabled"), (False, "Disabled")])
    def test_the_long_report(self, fake_driver: MakeDriver, shown: bool, word: str) -> None:
        driver = fake_driver(this_machine(1))
        driver.set_display(0, shown)
        lines = [line.split() for line in self.smi(driver, "nvidia-smi -q")]
        assert ["Attached", "GPUs", ":", "1"] in lines
        assert ["Display", "Mode", ":", word] in lines

    def test_without_a_driver(self, driver: FakeDriver) -> None:
        driver.refuse(NVML.DRIVER_NOT_LOADED)
        done = driver.run(self.GPUS.split(), smi=True, check=False)
        assert done.returncode == 9
        assert done.stdout.startswith("NVIDIA-SMI has failed")

    def test_only_when_asked_for(self, driver: FakeDriver) -> None:
        assert "PATH" not in driver.env()


@pytest.mark.slow
def test_threads_that_start_nvml_at_once(driver: FakeDriver) -> None:
    """What one of them is given must mean something to all: gpuaff wakes the driver in threads.

    The library is loaded anew in each child: they meet at the wrong moment in one of some hundred.
    """
    script = """
        import ctypes, os, threading
        def start(nvml, gate, told):
            gate.wait()
            nvml.nvmlInit_v2()
            gpu, mode = ctypes.c_void_p(), ctypes.c_int()
            nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(gpu))
            gate.wait()
            told.append(nvml.nvmlDeviceGetComputeMode(gpu, ctypes.byref(mode)))
        def child():
            nvml, gate, told = ctypes.CDLL("libnvidia-ml.so.1"), threading.Barrier(8), []
            threads = [threading.Thread(target=start, args=(nvml, gate, told)) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            os._exit(told != [0] * 8)
        children = [os.fork() or child() for _ in range(200)]
        print({os.waitpid(child, 0)[1] for child in children})
    """
    assert driver.run(dedent(script)).stdout == "{0}\n"


class TestSharing:
    def test_folders_of_pytest_are_closed_to_others(self, driver: FakeDriver) -> None:
        with pytest.raises(ValueError, match="is closed to others"):
            driver.share()

    @pytest.mark.needs("two-users")
    def test_another_user(self, shared_driver: MakeDriver) -> None:
        driver = shared_driver(this_machine(1))
        library = driver.env()["LD_LIBRARY_PATH"].split(":")[0] + "/libcuda.so.1"
        program = f"""{CALLS.replace("libcuda.so.1", library)}
os.setuid(65534)
print(cuda.cuInit(0), retain(0), flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""
        with stopped(program, env=driver.env(), fresh=True) as process:
            assert process.heard() == "0 0"
            assert driver.contexts(0) == {process.pid}
