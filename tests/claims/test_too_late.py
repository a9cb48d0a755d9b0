"""Case D9: something has initialised CUDA before the claim."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuaff.claims.placeholder.cuda_errors import likely

from fakedriver.driver import FakeDriver

STAND_INS = str(Path(__file__).parent / "stand_in")

BEGIN = """
import os, sys
from gpuaff.claims.placeholder.cuda_errors import too_late
"""


def lines(driver: FakeDriver, program: str, **env: str) -> list[str]:
    """What a program on the fake machine prints."""
    return driver.run(BEGIN + program, env=env).stdout.splitlines()


@pytest.mark.fake_driver
@pytest.mark.case("D9")
class TestTooLate:
    def test_in_time(self, driver: FakeDriver) -> None:
        program = """
print(too_late(), "libcuda" in open("/proc/self/maps").read())
import torch
print(too_late())
"""
        assert lines(driver, program, PYTHONPATH=STAND_INS) == ["None False", "None"]

    def test_torch_has_looked_whether_there_is_a_gpu(self, driver: FakeDriver) -> None:
        program = "import torch; torch.cuda.is_available(); print(too_late())"
        (said,) = lines(driver, program, PYTHONPATH=STAND_INS)
        assert said.startswith("CUDA is initialised in this process already, and the GPUs ")
        assert "torch.cuda.is_available() (unless PYTORCH_NVML_BASED_CUDA_CHECK=1)" in said

    def test_somebody_has_initialised_cuda(self, driver: FakeDriver) -> None:
        program = "from gpuaff._system import cuda; cuda.start(); print(too_late())"
        (said,) = lines(driver, program)
        assert "some import or call has done it" in said

    def test_only_torch_knows(self, driver: FakeDriver) -> None:
        """It may use a libcuda under another name."""
        program = """
import torch, types
torch.cuda = types.SimpleNamespace(is_initialized=lambda: True)
print(too_late() is not None)
"""
        assert lines(driver, program, PYTHONPATH=STAND_INS) == ["True"]

    def test_a_torch_that_is_still_being_imported(self, driver: FakeDriver) -> None:
        program = (
            "import types; sys.modules['torch'] = types.ModuleType('torch'); print(too_late())"
        )
        assert lines(driver, program) == ["None"]


def test_the_modules_that_are_there_are_named() -> None:
    said = likely({"jax", "torch", "numpy"})
    assert said.startswith("what does it: torch.cuda.is_available()")
    assert said.endswith("; jax.devices() or a first array of JAX's")
