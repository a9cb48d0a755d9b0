"""What the errors of claims carry, where they are raised."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuaff.claims.locking import directory
from gpuaff.errors import LockDirectoryError
from gpuaff.topology.model import Topology
from tests.claim_lab import Lab
from tests.fakedriver.play import this_machine
from tests.fakedriver.state import CUDA

GPU = "GPU-00000000-0000-4000-8000-{:012x}"


@pytest.mark.fake_driver
class TestOfClaims:
    def test_the_first_claim(self, lab: Lab) -> None:
        code = """
        gpuaff.claim_gpus(2)
        say(*refused(1).gpus)
        """
        assert lab.one(code) == f"{GPU.format(0)} {GPU.format(1)}"

    def test_what_an_earlier_claim_has_settled(self, lab: Lab) -> None:
        code = """
        gpuaff.claim_gpus(2).release()
        error = refused(1)
        say(type(error).__name__, *error.gpus)
        """
        assert lab.one(code) == f"CudaInitializedError {GPU.format(0)} {GPU.format(1)}"

    def test_cuda_was_started_before(self, lab: Lab) -> None:
        code = """
        from gpuaff._system import cuda
        cuda.start()
        say(refused(1).gpus)
        """
        assert lab.one(code) == "()"

    def test_which_gpu_could_not_be_occupied(self, lab: Lab) -> None:
        lab.driver.fail("cuDevicePrimaryCtxRetain", CUDA.OUT_OF_MEMORY, gpu=1)
        code = """
        error = refused(2)
        say(error.placeholder, *error.gpus, error.code)
        """
        assert lab.one(code) == f"context {GPU.format(1)} 2"

    def test_cuda_does_not_start(self, lab: Lab) -> None:
        lab.driver.fail("cuInit", CUDA.UNKNOWN)
        code = """
        error = refused(1)
        say(error.placeholder, error.gpus, error.code)
        """
        assert lab.one(code) == "context () 999"

    def test_a_listed_stranger(self, make_lab: Callable[[Topology], Lab]) -> None:
        lab = make_lab(this_machine(1))
        code = """
        error = refused(1, placeholder=occupant_that_waits())
        say(*error.gpus, *error.pids, error.cuda_started)
        """
        program = lab.start(code)
        program.heard()
        stranger = lab.start("say()\ngo_on()")
        stranger.heard()
        lab.driver.use(0, stranger.pid)
        program.go_on()
        assert program.heard() == f"{GPU.format(0)} {stranger.pid} True"


def test_what_the_kernel_has_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "missing/locks"
    monkeypatch.setenv("GPUAFF_LOCK_DIR", str(folder))
    with pytest.raises(LockDirectoryError) as caught:
        directory.open_file("registry")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, str(folder))
