"""Claims on a machine where NVML counts a GPU and gives no handle: CUDA may count it or not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpuaff.topology.model import Gpu, Topology
from tests.claim_lab import Lab
from tests.fakedriver.play import this_machine
from tests.fakedriver.state import NVML

pytestmark = pytest.mark.fake_driver

HANDLE = "nvmlDeviceGetHandleByIndex_v2"
UUID = "GPU-00000000-0000-4000-8000-{:012x}"
WHY = "GPU 1 is left out: its handle: GPU is lost (nvmlDeviceGetHandleByIndex)"


def uuids(*indices: int) -> str:
    return f"{','.join(map(UUID.format, indices))} PCI_BUS_ID"


@pytest.fixture
def lost(lab: Lab) -> Lab:
    """Four GPUs, of which GPU 1 has fallen off the bus."""
    lab.driver.fail(HANDLE, NVML.GPU_IS_LOST, gpu=1)
    return lab


class TestWhatCudaIsShown:
    @pytest.mark.parametrize("code", [NVML.GPU_IS_LOST, NVML.UNKNOWN])
    @pytest.mark.parametrize("occupied", ["", ", placeholder=None"])
    def test_the_gpu_behind_it_goes_by_uuid(self, lab: Lab, code: NVML, occupied: str) -> None:
        lab.driver.fail(HANDLE, code, gpu=1)
        said = lab.shown(f"gpus=3{occupied}")
        assert said == [uuids(3), "(3, 0)", "visible-lost"]

    def test_without_uuid(self, lab: Lab) -> None:
        """CUDA counts it; our own numbers do not."""
        lab.driver.fail("nvmlDeviceGetUUID", NVML.UNKNOWN, gpu=1)
        assert lab.shown("gpus=3") == [uuids(3), "(3, 0)", "visible-lost"]

    def test_in_mig_mode_without_instance(self, make_lab: Callable[[Topology], Lab]) -> None:
        """That is no fault, and nothing is said of it."""
        machine = this_machine(3)
        gpus = (Gpu(index=0, mig=()), *machine.gpus[1:])
        lab = make_lab(Topology(cpus=machine.cpus, allowed=machine.cpus, gpus=gpus))
        assert lab.shown("gpus=2") == [uuids(2), "(2, 0)", ""]
        assert lab.shown("1", CUDA_VISIBLE_DEVICES="2")[1] == "(2, 0)"

    def test_lost_while_the_claim_waits(self, lab: Lab) -> None:
        holder = lab.holder("claim_gpus(gpus=3)")
        waiting = "claim = gpuaff.claim_gpus(gpus=3, wait=30, on_wait=lambda _: say('waits'))"
        program = lab.start(f"{waiting}\nshown(claim)")
        assert program.heard() == "waits"
        lab.driver.lose_gpu(1)
        holder.kill()
        *_, variables, got, codes = [program.heard() for _ in range(3)]
        assert (variables, got, codes) == (uuids(3), "(3, 0)", "visible-lost")

    def test_denied_ones_are_not_counted_and_numbers_stay(self, lab: Lab) -> None:
        lab.driver.deny(1)
        assert lab.shown("gpus=3") == ["2 PCI_BUS_ID", "(3, 0)", ""]
        lab.driver.fail(HANDLE, NVML.GPU_IS_LOST, gpu=0)
        assert lab.shown("gpus=3") == [uuids(3), "(3, 0)", "visible-lost"]

    def test_the_warning_names_the_gpu_and_the_remedy(self, lost: Lab) -> None:
        said = lost.one("say(*(w.message for w in gpuaff.claim_gpus().warnings))")
        assert said == (
            f"{WHY}. CUDA may count such a GPU or not, so CUDA_VISIBLE_DEVICES names the claimed "
            "GPUs by UUID, and numbers in it were read as nvidia-smi's; look for Xid in "
            "dmesg, and reset the GPU or reboot"
        )


class TestWhatWasInherited:
    def test_numbers_are_nvidia_smis(self, lost: Lab) -> None:
        assert lost.shown("'auto'", CUDA_VISIBLE_DEVICES="3,1,2") == [
            uuids(3, 2),
            "(3, 0) (2, 1)",
            "visible-lost",
        ]

    def test_only_the_lost_one(self, lost: Lab) -> None:
        said = lost.refused("1, wait=None", CUDA_VISIBLE_DEVICES="1")
        assert said == (
            "NotEnoughGpusError requested 1 GPU; CUDA_VISIBLE_DEVICES='1' shows no GPUs of the "
            f"3 here; {WHY}"
        )

    def test_left_as_it_is(self, lost: Lab) -> None:
        """CUDA is asked for its numbers; where nobody asks it, the claim is refused."""
        assert lost.shown("gpus=3, visible=None")[:2] == ["None None", "(3, 3)"]
        said = lost.refused("gpus=3, visible=None, placeholder=None")
        assert said.startswith("InvalidOptionError visible=None: expected index or uuid: ")
        assert "GPU 1 is lost, and CUDA may count it or not" in said
        variables = {"CUDA_VISIBLE_DEVICES": f"{UUID.format(2)},{UUID.format(3)}"}
        got = lost.shown("gpus=3, visible=None, placeholder=None", **variables)
        assert got[1] == "(3, 1)"


class TestByName:
    @pytest.mark.parametrize("option", ["gpus", "candidates"])
    def test_the_lost_one_by_its_index(self, lost: Lab, option: str) -> None:
        said = lost.refused(f"1, {option}=[1], wait=None")
        assert said == f"NotEnoughGpusError requested 1 GPU; {WHY}"

    def test_by_a_name_that_nothing_here_has(self, lost: Lab) -> None:
        """It may be the lost one's: NVML does not say."""
        said = lost.refused(f"gpus={UUID.format(1)!r}")
        assert said.startswith("InvalidOptionError gpus=")
        assert WHY in said


def test_a_claim_inside_a_claim(lost: Lab) -> None:
    _, env = lost.enclosing("gpus=[3, 2], placeholder=None")
    assert lost.shown("gpus=2", **env) == [uuids(2), "(2, 0)", "visible-lost"]
