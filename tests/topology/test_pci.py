"""Where GPUs sit, and which PCI devices count as accelerators, from the devices alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpuaff import Topology
from gpuaff._system.kernel import Tree
from gpuaff.cpuset import CpuSet, format_cpulist, parse_cpulist
from gpuaff.topology import sysfs
from gpuaff.topology.live import observe, with_accelerators
from gpuaff.topology.model import Accelerator, Source
from gpuaff.topology.sysfs import read_cpus
from tests import machine_trees
from tests.trees import write, write_cpus, write_nodes, write_pci

GPU = "0000:07:00.0"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two nodes of four CPUs."""
    write_cpus(tmp_path, cpus=8, siblings=str)
    write_nodes(tmp_path, "0-3", "4-7")
    return tmp_path


def place(root: Path) -> tuple[CpuSet | None, int | None]:
    """Its CPUs and its node."""
    tree = Tree(str(root))
    return sysfs.place(tree, GPU, read_cpus(tree))


def test_a_device_tells_its_cpus_and_its_node(root: Path) -> None:
    write_pci(root, GPU, numa_node="1", local_cpulist="4-7")
    assert place(root) == (parse_cpulist("4-7"), 1)


@pytest.mark.case("A7", "F6")
def test_minus_one_is_unknown_and_then_all_cpus_are_no_answer(root: Path) -> None:
    write_pci(root, GPU, numa_node="-1", local_cpulist="0-7")
    assert place(root) == (None, None)


@pytest.mark.case("F6")
def test_with_one_node_minus_one_does_not_matter(tmp_path: Path) -> None:
    write_cpus(tmp_path, cpus=4, siblings=str)
    write_nodes(tmp_path, "0-3")
    write_pci(tmp_path, GPU, numa_node="-1", local_cpulist="0-3")
    assert place(tmp_path) == (parse_cpulist("0-3"), None)


@pytest.mark.case("A22")
def test_cpus_that_are_not_online_are_left_out(root: Path) -> None:
    write_pci(root, GPU, numa_node="1", local_cpulist="6-40")
    assert place(root)[0] == parse_cpulist("6-7")
    write_pci(root, GPU, numa_node="1", local_cpulist="40-47")
    assert place(root) == (None, 1)


def test_an_unknown_device_is_nowhere(root: Path) -> None:
    assert place(root) == (None, None)


@pytest.mark.case("A6")
def test_a_described_machine(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pci(root, "0000:87:00.0", numa_node="1", local_cpulist="4-7")
    write_pci(root, "0000:07:00.0", numa_node="0", local_cpulist="0-3", device_class="0x030000")
    write_pci(root, "0001:07:00.0", numa_node="7")
    write_pci(root, "0000:0a:00.0", device_class="0x068000")  # an NVSwitch is a bridge
    write_pci(root, "0000:0b:00.0", device_class="0x040300")  # the sound of a graphics card
    write_pci(root, "0000:0c:00.0", vendor="0x1002")
    write(root, "proc/driver/nvidia/gpus/0000:07:00.0/information", "Model: \t NVIDIA X\n")
    monkeypatch.setenv("GPUAFF_FSROOT", str(root))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    seen = Topology.observe()
    assert [gpu.pci_bus_id for gpu in seen.gpus] == [
        "0000:07:00.0",
        "0000:87:00.0",
        "0001:07:00.0",
    ]
    assert [gpu.index for gpu in seen.gpus] == [0, 1, 2]
    assert [gpu.source for gpu in seen.gpus] == [Source.SYSFS, Source.SYSFS, None]
    assert [gpu.name for gpu in seen.gpus] == ["NVIDIA X", None, None]
    assert seen.gpus[2].numa_node == 7, "a node that has no CPUs here"
    assert seen.visible == (0, 1, 2), "the live environment plays no part"
    assert seen.allowed == seen.cpus


@pytest.mark.case("A9", "A10")
def test_gpu_memory_that_is_a_numa_node(real_trees: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = machine_trees.unpack("nvidiagpunumanodes", real_trees)
    monkeypatch.setenv("GPUAFF_FSROOT", str(root))
    gpus = Topology.observe().gpus
    # proc/driver/nvidia/gpus/0004:05:00.0/numa_status: Node: 255; local_cpus …0000ffff
    assert [gpu.memory_node for gpu in gpus] == [255, 254, 253, 252, 251, 250]
    near = [format_cpulist(gpu.node_cpus or ()) for gpu in gpus]
    assert near == ["0-15"] * 3 + ["88-103"] * 3


@pytest.mark.case("F5")
def test_the_kernel_module_shows_its_gpus_without_nvml(root: Path) -> None:
    write_pci(root, GPU, numa_node="1", local_cpulist="4-7")
    write_pci(root, "0000:08:00.0", numa_node="0", local_cpulist="0-3")  # not given to us
    information = (
        "Model: \t\t NVIDIA H100 80GB HBM3\n"
        "GPU UUID: \t GPU-00000000-1111-2222-3333-444444444444\n"
        "Device Minor: \t 0\n"
    )
    write(root, f"proc/driver/nvidia/gpus/{GPU}/information", information)
    write(root, "proc/driver/nvidia/gpus/nonsense/information", "")
    tree = Tree(str(root))
    (gpu,) = sysfs.gpus_at(tree, read_cpus(tree), tree.list(sysfs.DRIVER))
    assert gpu.name == "NVIDIA H100 80GB HBM3"
    assert gpu.uuid == "GPU-00000000-1111-2222-3333-444444444444"
    assert gpu.node_cpus == parse_cpulist("4-7")


def test_a_uuid_that_the_driver_has_not_read_yet(root: Path) -> None:
    write(root, f"proc/driver/nvidia/gpus/{GPU}/information", "GPU UUID: \t GPU-????????-????\n")
    tree = Tree(str(root))
    (gpu,) = sysfs.gpus_at(tree, read_cpus(tree), tree.list(sysfs.DRIVER))
    assert (gpu.uuid, gpu.node_cpus, gpu.source) == (None, None, None)


# --- accelerators: the claimants of partition="machine" ----------------------------------------

DEVICES = json.loads((Path(__file__).parents[1] / "data/json/devices.json").read_text("utf-8"))
KINDS = [(kind, *row) for kind, rows in DEVICES.items() for row in rows]
"""What each is, its address, vendor and class."""


def found(root: Path) -> tuple[Accelerator, ...]:
    tree = Tree(str(root))
    return sysfs.accelerators(tree, read_cpus(tree))


def addresses(root: Path) -> list[str]:
    return [device.pci_bus_id for device in found(root)]


def test_what_a_device_tells(root: Path) -> None:
    write_pci(root, "0000:07:00.0", numa_node="1", local_cpulist="4-7")
    write_pci(root, "0000:87:00.0", numa_node="-1", local_cpulist="0-7", vendor="0x1002")
    assert found(root) == (
        Accelerator(
            pci_bus_id="0000:07:00.0",
            vendor="10de",
            local_cpus=parse_cpulist("4-7"),
            numa_node=1,
        ),
        Accelerator(pci_bus_id="0000:87:00.0", vendor="1002"),
    )


@pytest.mark.parametrize(("kind", "what", "address", "vendor", "device_class"), KINDS)
def test_what_counts(
    root: Path, kind: str, what: str, address: str, vendor: str, device_class: str
) -> None:
    write_pci(root, address, vendor=vendor, device_class=device_class)
    assert addresses(root) == ([address] if kind == "accelerators" else []), what


def test_virtual_functions_are_none(root: Path) -> None:
    """Also where the link to the physical function is broken, as in a copy of a tree."""
    write_pci(root, "0000:07:00.0", numa_node="0", sriov_numvfs="2")
    for number in (4, 5):
        write_pci(root, f"0000:07:00.{number}", numa_node="0")
        link = root / f"sys/bus/pci/devices/0000:07:00.{number}/physfn"
        link.symlink_to("../0000:07:00.0" if number == 4 else "../nowhere")
    assert addresses(root) == ["0000:07:00.0"]


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


def test_power9(tmp_path: Path) -> None:
    """Six V100, three at each socket: as their local_cpus have it. (The tree lacks vendors.)"""
    root = machine_trees.unpack("nvidiagpunumanodes", tmp_path)
    for device in (root / "sys/bus/pci/devices").iterdir():
        write(device, "vendor", "0x10de")
    near = [format_cpulist(one.local_cpus or ()) for one in found(root)]
    assert near == ["0-15"] * 3 + ["88-103"] * 3


def test_a_tree_of_files_tells_them(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pci(root, "0000:07:00.0", numa_node="1", local_cpulist="4-7", vendor="0x1002")
    monkeypatch.setenv("GPUAFF_FSROOT", str(root))
    seen = Topology.observe()
    assert seen.gpus == ()
    assert [one.pci_bus_id for one in seen.accelerators or ()] == ["0000:07:00.0"]


def test_the_live_machine_tells_them_on_request() -> None:
    told = observe(links=False, accelerators=True).accelerators
    assert told is not None
    assert told == Topology.observe().accelerators
    assert observe(links=False, accelerators=False).accelerators is None


def test_where_only_a_mask_is_known_there_are_none(root: Path) -> None:
    """A container that shows another machine's files: nothing for strangers to agree on."""
    write_cpus(root, cpus=8, siblings=str)
    write_pci(root, "0000:07:00.0", numa_node="1", local_cpulist="4-7")
    tree = Tree(str(root))
    mask_alone = Topology(cpus=frozenset((60000, 60001)))
    assert with_accelerators(mask_alone, tree, read_cpus(tree)).accelerators == ()
