"""Case D9: something has initialised CUDA before the claim."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuaff.claims.placeholder import likely_initializers
from tests.fakedriver.driver import FakeDriver

STAND_INS = str(Path(__file__).parent / "stand_in")

BEGIN = """
import os, sys
from gpuaff.claims.placeholder import cuda_already_initialized
"""


def lines(driver: FakeDriver, program: str, **env: str) -> list[str]:
    """What a program on the fake machine prints."""
    return driver.run(BEGIN + program, env=env).stdout.splitlines()


@pytest.mark.fake_driver
@pytest.mark.case("D9")
class TestTooLate:
    def test_in_time(self, driver: FakeDriver) -> None:
        program = """
print(cuda_already_initialized(), "libcuda" in open("/proc/self/maps").read())
import torch
print(cuda_already_initialized())
"""
        assert lines(driver, program, PYTHONPATH=STAND_INS) == ["None False", "None"]

    def test_torch_has_looked_whether_there_is_a_gpu(self, driver: FakeDriver) -> None:
        program = "import torch; torch.cuda.is_available(); print(cuda_already_initialized())"
        (said,) = lines(driver, program, PYTHONPATH=STAND_INS)
        assert said.startswith("CUDA is already initialised in this process, and its GPUs ")
        assert "torch.cuda.is_available() (unless PYTORCH_NVML_BASED_CUDA_CHECK=1)" in said

    def test_somebody_has_initialised_cuda(self, driver: FakeDriver) -> None:
        program = "from gpuaff._system import cuda; cuda.start(); print(cuda_already_initialized())"
        (said,) = lines(driver, program)
        assert "an import or call has done it" in said

    def test_only_torch_knows(self, driver: FakeDriver) -> None:
        """It may use a libcuda under another name."""
        program = """
import torch, types
torch.cuda = types.SimpleNamespace(is_initialized=lambda: True)
print(cuda_already_initialized() is not None)
"""
        assert lines(driver, program, PYTHONPATH=STAND_INS) == ["True"]

    def test_a_torch_that_is_still_being_imported(self, driver: FakeDriver) -> None:
        program = (
            "import types; sys.modules['torch'] = types.ModuleType('torch'); "
            "print(cuda_already_initialized())"
        )
        assert lines(driver, program) == ["None"]


def test_the_modules_that_are_there_are_named() -> None:
    said = likely_initializers({"jax", "torch", "numpy"})
    assert said.startswith("usual causes: torch.cuda.is_available()")
    assert said.endswith("; jax.devices() or a first array of JAX")
