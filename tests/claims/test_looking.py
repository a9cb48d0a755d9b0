"""Who has the GPUs, in the words of an error: everything real but the driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuaff.topology.model import Gpu, Topology
from tests.fakedriver.driver import FakeDriver, MakeDriver
from tests.processes import stopped

STRANGER = """
import ctypes, sys
cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
print(flush=True)
sys.stdin.readline()
"""


@pytest.mark.fake_driver
@pytest.mark.case("E11")
def test_a_stranger_is_named(fake_driver: MakeDriver, tmp_path: Path) -> None:
    driver: FakeDriver = fake_driver(Topology(gpus=(Gpu(index=0, uuid="GPU-0"),)))
    env = {**driver.env(), "GPUAFF_LOCK_DIR": str(tmp_path / "locks"), "GPUAFF_SAFE_GPU": "off"}
    with stopped(STRANGER, env=env) as stranger:
        stranger.heard()
        done = driver.run(ASK, env=env)
        assert f"(pid {stranger.pid}) of " in done.stdout
        assert done.stdout.startswith("GPU 0: in use by ")


ASK = """
import gpuaff
try:
    gpuaff.claim_gpus()
except gpuaff.GpusBusyError as error:
    print(*error.reasons)
"""
