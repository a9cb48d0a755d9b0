"""Which PCI devices count as accelerators: the claimants of ``partition="machine"``."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuaff import Topology
from gpuaff._system.kernel import Tree
from gpuaff.cpuset import format_cpulist, parse_cpulist
from gpuaff.topology.live import observe, with_accelerators
from gpuaff.topology.model import Accelerator
from gpuaff.topology.sysfs import accelerators, read_cpus
from tests import machine_trees
from tests.trees import write, write_cpus, write_nodes, write_pci

VGA, THREE_D, DISPLAY, PROCESSING = "0x030000", "0x030200", "0x038000", "0x120000"
NVIDIA, AMD, INTEL, ASPEED, MATROX = "0x10de", "0x1002", "0x8086", "0x1a03", "0x102b"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two nodes of four CPUs."""
    write_cpus(tmp_path, cpus=8, siblings=str)
    write_nodes(tmp_path, "0-3", "4-7")
    return tmp_path


def found(root: Path) -> tuple[Accelerator, ...]:
    tree = Tree(str(root))
    return accelerators(tree, read_cpus(tree))


def addresses(root: Path) -> list[str]:
    return [device.pci_bus_id for device in found(root)]


def test_what_a_device_tells(root: Path) -> None:
    write_pci(root, "0000:07:00.0", numa_node="1", local_cpulist="4-7")
    write_pci(root, "0000:87:00.0", numa_node="-1", local_cpulist="0-7", vendor=AMD)
    assert found(root) == (
        Accelerator(
            pci_bus_id="0000:07:00.0",
            vendor="10de",
            local_cpus=parse_cpulist("4-7"),
            numa_node=1,
        ),
        Accelerator(pci_bus_id="0000:87:00.0", vendor="1002"),
    )


@pytest.mark.parametrize("vendor", [NVIDIA, AMD, INTEL])
@pytest.mark.parametrize("kind", [VGA, THREE_D, DISPLAY, PROCESSING])
def test_each_class_of_each_vendor(root: Path, vendor: str, kind: str) -> None:
    write_pci(root, "0000:07:00.0", vendor=vendor, device_class=kind)
    assert addresses(root) == ["0000:07:00.0"]


@pytest.mark.parametrize(
    ("vendor", "kind"),
    [
        (NVIDIA, "0x068000"),  # NVSwitch
        (NVIDIA, "0x040300"),  # the sound of a graphics card
        (NVIDIA, "0x0c0330"),  # its USB controller
        (NVIDIA, "0x060400"),  # a bridge
        (AMD, "0x040300"),
        (AMD, "0x108000"),  # the security processor beside an APU
        (AMD, "0x030100"),  # an XGA controller, whatever that is today
        (INTEL, "0x0b4000"),  # QuickAssist
        (INTEL, "0x088000"),
        (ASPEED, VGA),
        (MATROX, VGA),
        ("0x1414", THREE_D),  # Hyper-V's and WSL's
        ("0x1234", VGA),  # QEMU's
        ("0x10ee", PROCESSING),  # Xilinx
    ],
)
def test_what_is_none(root: Path, vendor: str, kind: str) -> None:
    write_pci(root, "0000:07:00.0", vendor=vendor, device_class=kind)
    assert addresses(root) == []


@pytest.mark.parametrize("driver", ["nvidia", "vfio-pci", "nouveau", None])
def test_the_driver_does_not_matter(root: Path, driver: str | None) -> None:
    write_pci(root, "0000:07:00.0", numa_node="0", local_cpulist="0-3")
    if driver:
        link = root / "sys/bus/pci/devices/0000:07:00.0/driver"
        link.symlink_to(f"../../../../bus/pci/drivers/{driver}")
    assert addresses(root) == ["0000:07:00.0"]


def test_virtual_functions_are_none(root: Path) -> None:
    """Also where the link to the physical function is broken, as in a copy of a tree."""
    write_pci(root, "0000:07:00.0", numa_node="0", sriov_numvfs="2")
    for number in (4, 5):
        write_pci(root, f"0000:07:00.{number}", numa_node="0")
        link = root / f"sys/bus/pci/devices/0000:07:00.{number}/physfn"
        link.symlink_to("../0000:07:00.0" if number == 4 else "../nowhere")
    assert addresses(root) == ["0000:07:00.0"]


def test_what_is_part_of_an_intel_processor_is_none(root: Path) -> None:
    write_pci(root, "0000:00:02.0", vendor=INTEL, device_class=VGA)
    write_pci(root, "0000:00:0b.0", vendor=INTEL, device_class=PROCESSING)  # the NPU
    assert addresses(root) == []


def test_but_cards_are_not(root: Path) -> None:
    write_pci(root, "0000:03:00.0", vendor=INTEL, device_class=VGA)  # behind a bridge
    write_pci(root, "0000:29:00.0", vendor=INTEL, device_class=DISPLAY)
    write_pci(root, "0000:00:05.0", vendor=INTEL, device_class=DISPLAY)  # given to a VM
    write_pci(root, "0000:00:02.0", vendor=NVIDIA, device_class=THREE_D)  # given to a VM
    write_pci(root, "0001:00:02.0", vendor=INTEL, device_class=DISPLAY)
    assert addresses(root) == [
        "0000:00:02.0",
        "0000:00:05.0",
        "0000:03:00.0",
        "0000:29:00.0",
        "0001:00:02.0",
    ]


def test_they_are_in_the_order_of_numbers(root: Path) -> None:
    """Domains have four digits or more: as text 10000 would come before 9999."""
    names = ["10000:01:00.0", "9999:01:00.0", "0001:01:00.0", "0000:c1:00.0", "0000:0a:00.1"]
    for name in names:
        write_pci(root, name)
    assert addresses(root) == names[::-1]


def test_what_cannot_be_read_is_none(root: Path) -> None:
    devices = root / "sys/bus/pci/devices"
    (devices / "0000:01:00.0").mkdir(parents=True)  # no class at all
    (devices / "0000:02:00.0/class").mkdir(parents=True)  # reading it fails, whoever reads
    write_pci(root, "0000:03:00.0", device_class="3D controller")
    write(root, "sys/bus/pci/devices/0000:04:00.0/class", "0x030200\n")  # no vendor
    write_pci(root, "not-an-address")
    write_pci(root, "0000:07:00.0")
    assert addresses(root) == ["0000:07:00.0"]


def test_no_bus_has_none(root: Path) -> None:
    assert found(root) == ()


def test_hundreds_of_devices(root: Path) -> None:
    """A large server: root ports, functions of its processors, NICs, NVMe; among them 8 GPUs."""
    for bus in range(48):
        for function in range(7):
            write_pci(root, f"0000:{bus:02x}:00.{function}", device_class="0x088000", vendor=INTEL)
    gpus = [f"0000:{bus:02x}:01.0" for bus in range(3, 43, 5)]
    for address in gpus:
        write_pci(root, address)
    assert addresses(root) == gpus


def test_power9(tmp_path: Path) -> None:
    """Six V100, three at each socket: as their local_cpus have it. (The tree lacks vendors.)"""
    root = machine_trees.unpack("nvidiagpunumanodes", tmp_path)
    for device in (root / "sys/bus/pci/devices").iterdir():
        write(device, "vendor", NVIDIA)
    near = [format_cpulist(one.local_cpus or ()) for one in found(root)]
    assert near == ["0-15"] * 3 + ["88-103"] * 3


class TestObserved:
    def test_a_tree_of_files_tells_them(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_pci(root, "0000:07:00.0", numa_node="1", local_cpulist="4-7", vendor=AMD)
        monkeypatch.setenv("GPUAFF_FSROOT", str(root))
        seen = Topology.observe()
        assert seen.gpus == ()
        assert [one.pci_bus_id for one in seen.accelerators or ()] == ["0000:07:00.0"]

    def test_the_live_machine_tells_them_on_request(self) -> None:
        told = observe(links=False, accelerators=True).accelerators
        assert told is not None
        assert told == Topology.observe().accelerators
        assert observe(links=False, accelerators=False).accelerators is None

    def test_where_only_a_mask_is_known_there_are_none(self, root: Path) -> None:
        """A container that shows another machine's files: nothing for strangers to agree on."""
        write_cpus(root, cpus=8, siblings=str)
        write_pci(root, "0000:07:00.0", numa_node="1", local_cpulist="4-7")
        tree = Tree(str(root))
        mask_alone = Topology(cpus=frozenset((60000, 60001)))
        assert with_accelerators(mask_alone, tree, read_cpus(tree)).accelerators == ()
