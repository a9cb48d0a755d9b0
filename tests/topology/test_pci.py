"""Where GPUs sit, from their PCI devices alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuaff import Topology
from gpuaff._system.kernel import Tree
from gpuaff.cpuset import CpuSet, format_cpulist, parse_cpulist
from gpuaff.topology import sysfs
from gpuaff.topology.model import Source
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
    return sysfs.pci_place(tree, GPU, read_cpus(tree))


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
    (gpu,) = sysfs.gpus_of_the_driver(tree, read_cpus(tree))
    assert gpu.name == "NVIDIA H100 80GB HBM3"
    assert gpu.uuid == "GPU-00000000-1111-2222-3333-444444444444"
    assert gpu.node_cpus == parse_cpulist("4-7")


def test_a_uuid_that_the_driver_has_not_read_yet(root: Path) -> None:
    write(root, f"proc/driver/nvidia/gpus/{GPU}/information", "GPU UUID: \t GPU-????????-????\n")
    tree = Tree(str(root))
    (gpu,) = sysfs.gpus_of_the_driver(tree, read_cpus(tree))
    assert (gpu.uuid, gpu.node_cpus, gpu.source) == (None, None, None)
