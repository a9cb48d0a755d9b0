"""The gate to libcuda, in processes that see the fake one."""

from __future__ import annotations

import pytest

from tests.fakedriver.driver import FakeDriver, MakeDriver
from tests.fakedriver.play import this_machine

UUIDS = [f"GPU-00000000-0000-4000-8000-{place:012x}" for place in range(2)]
"""What the fake driver calls GPUs that nobody has named."""

BEGIN = """
import ctypes, os, sys
from contextlib import ExitStack
from gpuaff.errors import NoDriverError
from gpuaff._system import cuda

def tried(function, *arguments):
    try:
        return function(*arguments)
    except (cuda.CudaError, NoDriverError) as error:
        return f"{type(error).__name__}: {error}"
"""


def lines(driver: FakeDriver, program: str, **env: str) -> list[str]:
    """What a program on the fake machine prints."""
    return driver.run(BEGIN + program, env=env).stdout.splitlines()


@pytest.mark.fake_driver
class TestWhetherItIsInitialized:
    def test_asking_loads_and_initializes_nothing(self, driver: FakeDriver) -> None:
        assert lines(
            driver,
            """
print(cuda.is_initialized(), "libcuda" in open("/proc/self/maps").read())
ctypes.CDLL("libcuda.so.1")
print(cuda.is_initialized(), cuda.is_initialized())
cuda.start()
print(cuda.is_initialized())
""",
        ) == ["None False", "False False", "True"]

    @pytest.mark.parametrize("list_", ["0,0", ""])
    def test_a_start_that_fails_settles_nothing(self, driver: FakeDriver, list_: str) -> None:
        """As an H200 with driver 580 has it, for the errors 101 and 100."""
        program = """
print(str(tried(cuda.start)).split()[3], cuda.is_initialized())
os.environ["CUDA_VISIBLE_DEVICES"] = "1"
cuda.start()
print(*cuda.uuids())
"""
        expected = "101" if list_ else "100"
        shown = UUIDS[1].removeprefix("GPU-")
        assert lines(driver, program, CUDA_VISIBLE_DEVICES=list_) == [f"{expected} False", shown]


@pytest.mark.fake_driver
class TestContexts:
    def test_nobody_elses_hold_is_let_go(self, driver: FakeDriver) -> None:
        """A framework in the same process holds the same context (torch does)."""
        program = """
cuda.start()
contexts, others = ExitStack(), ExitStack()
cuda.retain(1, contexts)
cuda.retain(1, others)
contexts.close()
contexts.close()
others.close()
print("released")
"""
        driver.watch("cuDevicePrimaryCtxRelease_v2")
        assert lines(driver, program) == ["released"]
        assert driver.calls("cuDevicePrimaryCtxRelease_v2") == 2

    def test_all_are_let_go_though_one_fails(self, driver: FakeDriver) -> None:
        driver.fail("cuDevicePrimaryCtxRelease_v2", 999, gpu=1)
        driver.watch("cuDevicePrimaryCtxRelease_v2")
        program = """
cuda.start()
contexts = ExitStack()
cuda.retain(0, contexts), cuda.retain(1, contexts)
print(tried(contexts.close))
"""
        assert lines(driver, program) == ["None"]
        assert driver.calls("cuDevicePrimaryCtxRelease_v2") == 2


class TestNoLibrary:
    START = BEGIN + "print(tried(cuda.start)); print(cuda.is_initialized())"

    @pytest.mark.fake_driver
    def test_one_that_is_too_old(self, fake_driver: MakeDriver) -> None:
        driver = fake_driver(this_machine(1))
        driver.omit("cuDevicePrimaryCtxRetain")
        (said,) = lines(driver, "cuda.start(); print(tried(cuda.retain, 0, ExitStack()))")
        assert said == (
            "NoDriverError: the NVIDIA driver's library CUDA (libcuda.so.1) has no "
            "cuDevicePrimaryCtxRetain; update the driver"
        )
