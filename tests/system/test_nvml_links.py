"""How GPUs are connected, in the words of nvidia-smi."""

from __future__ import annotations

import pytest

from gpuaff.topology.model import Gpu, Topology
from tests.fakedriver.driver import MakeDriver
from tests.fakedriver.state import NVML
from tests.nvml_reading import one_gpu, read


def joined(*rows: str) -> Topology:
    """A machine with this matrix of nvidia-smi, row by row."""
    links = tuple(tuple(row.split()) for row in rows)
    return Topology(gpus=tuple(Gpu(index=i) for i in range(len(links))), links=links)


PATHS = joined(
    "X PIX PXB PHB SYS",
    "PIX X PXB PHB SYS",
    "PXB PXB X PHB SYS",
    "PHB PHB PHB X NODE",
    "SYS SYS SYS NODE X",
)
H100 = joined("X NV18 NV18 NV18", "NV18 X NV18 NV18", "NV18 NV18 X NV18", "NV18 NV18 NV18 X")
V100 = joined("X NV1 NV2 SYS", "NV1 X SYS NV2", "NV2 SYS X NV1", "SYS NV2 NV1 X")
BRIDGE = joined("X NV12 SYS", "NV12 X SYS", "SYS SYS X")


@pytest.mark.fake_driver
class TestLinks:
    @pytest.mark.case("real-machine")  # the NVLinks of four H100 go before their host bridge
    @pytest.mark.parametrize(
        "machine", [PATHS, H100, V100, BRIDGE], ids=["paths", "h100", "v100", "bridge"]
    )
    def test_nvidia_smis_words(self, fake_driver: MakeDriver, machine: Topology) -> None:
        reading = read(fake_driver(machine), links=True)
        assert reading.links == machine.links

    def test_two_gpus_on_one_board(self, fake_driver: MakeDriver) -> None:
        driver = fake_driver(joined("X PIX", "PIX X"))
        driver.state.gpus[0].path[1] = 0
        assert read(driver, links=True).links == (("X", "PIX"), ("PIX", "X"))

    def test_a_switch_link_that_is_down(self, fake_driver: MakeDriver) -> None:
        driver = fake_driver(H100)
        driver.state.gpus[2].link[5].active = 0
        links = read(driver, links=True).links
        assert links is not None
        assert links[0] == ("X", "NV18", "NV17", "NV18")
        assert links[2] == ("NV17", "NV17", "X", "NV17")

    def test_a_direct_link_that_one_side_does_not_see(self, fake_driver: MakeDriver) -> None:
        driver = fake_driver(BRIDGE)
        driver.state.gpus[0].link[0].active = 0
        assert read(driver, links=True).links == BRIDGE.links

    def test_none_is_queried_where_none_is_needed(self, fake_driver: MakeDriver) -> None:
        for machine, links, found in (H100, False, None), (one_gpu(), True, (("X",),)):
            driver = fake_driver(machine)
            driver.watch("nvmlDeviceGetNvLinkState", "nvmlDeviceGetTopologyCommonAncestor")
            assert read(driver, links=links).links == found
            assert driver.calls("nvmlDeviceGetNvLinkState") == 0
            assert driver.calls("nvmlDeviceGetTopologyCommonAncestor") == 0

    @pytest.mark.case("F1")
    def test_no_nvlink(self, fake_driver: MakeDriver) -> None:
        driver = fake_driver(H100)
        driver.fail("nvmlDeviceGetNvLinkState", NVML.NOT_SUPPORTED)
        reading = read(driver, links=True)
        assert reading.links is not None
        assert reading.links[0] == ("X", "PHB", "PHB", "PHB")
        assert not [p for gpu in reading.gpus for p in gpu.problems if "NVLink" in p]

    @pytest.mark.case("F1")
    @pytest.mark.parametrize(
        "function", ["nvmlDeviceGetNvLinkState", "nvmlDeviceGetNvLinkRemotePciInfo_v2"]
    )
    def test_nvlinks_unknown(self, fake_driver: MakeDriver, function: str) -> None:
        driver = fake_driver(BRIDGE)
        driver.fail(function, NVML.UNKNOWN, gpu=0)
        reading = read(driver, links=True)
        assert reading.links == (("X", "N/A", "N/A"), ("N/A", "X", "SYS"), ("N/A", "SYS", "X"))
        assert [p for p in reading.gpus[0].problems if function.removesuffix("_v2") in p]

    @pytest.mark.case("F1")
    def test_who_is_at_the_other_end_is_not_told(self, fake_driver: MakeDriver) -> None:
        driver = fake_driver(BRIDGE)
        driver.omit("nvmlDeviceGetNvLinkRemoteDeviceType")
        assert read(driver, links=True).links == BRIDGE.links

    def test_a_virtual_machine_does_not_show_the_switches(self, fake_driver: MakeDriver) -> None:
        driver = fake_driver(H100)
        driver.fail("nvmlDeviceGetNvLinkRemoteDeviceType", NVML.NOT_SUPPORTED)
        for gpu in driver.state.gpus[:4]:
            for link in gpu.link[:18]:
                link.remote = b"FFFFFFFF:FFFF:FF"
        assert read(driver, links=True).links == H100.links

    def test_a_peer_that_this_container_does_not_see(self, fake_driver: MakeDriver) -> None:
        driver = fake_driver(BRIDGE)
        for gpu in driver.state.gpus[:2]:
            for link in gpu.link[:12]:
                link.remote = b"FFFFFFFF:FFFF:FF"
        links = read(driver, links=True).links
        assert links is not None
        assert links[0] == ("X", "PHB", "SYS")

    @pytest.mark.case("F1")
    def test_paths_unknown(self, fake_driver: MakeDriver) -> None:
        driver = fake_driver(BRIDGE)
        driver.fail("nvmlDeviceGetTopologyCommonAncestor")
        reading = read(driver, links=True)
        assert reading.links == (("X", "NV12", "N/A"), ("NV12", "X", "N/A"), ("N/A", "N/A", "X"))
        told = "path to other GPUs: Not Supported (nvmlDeviceGetTopologyCommonAncestor)"
        assert told in reading.gpus[0].problems

    def test_nothing_known_is_none(self, fake_driver: MakeDriver) -> None:
        driver = fake_driver(PATHS)
        driver.omit("nvmlDeviceGetTopologyCommonAncestor")
        assert read(driver, links=True).links is None
