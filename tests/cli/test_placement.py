"""GPUs by their device files."""

from __future__ import annotations

import os
from pathlib import Path

from gpuaff._system import kernel
from gpuaff._system.kernel import Tree
from gpuaff.cli.check import with_gpus
from gpuaff.cpuset import CpuSet
from gpuaff.pinning.check import Check
from gpuaff.topology.model import Topology
from gpuaff.topology.sysfs import device_files


def test_a_minor_number_is_not_an_index(tmp_path: Path, box: Topology) -> None:
    """The driver numbers its files as it found the GPUs, which need not be by address."""
    told = {"0000:01:00.0": "2", "0000:02:00.0": "0", "0000:99:00.0": "1", "0000:03:00.0": "?"}
    for address, minor in told.items():
        folder = tmp_path / "proc/driver/nvidia/gpus" / address
        folder.mkdir(parents=True)
        text = f"Model: \t\t Alpha\nBus Type: \t PCIe\nDevice Minor: \t {minor}\n"
        (folder / "information").write_text(text)
    by_address = {gpu.pci_bus_id: gpu.index for gpu in box.gpus}
    files = device_files(Tree(str(tmp_path)), by_address)
    assert files == {"/dev/nvidia2": 0, "/dev/nvidia0": 1}


LEFT = frozenset({0, 1, 2, 3, 8, 9, 10, 11})
NVIDIA = ["/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia2"]


def check(usual: CpuSet) -> Check:
    return Check(pid=7, name="python", expected=None, usual=usual, threads=())


def test_open_files_count_where_the_driver_is_silent(box: Topology) -> None:
    devices = {"/dev/nvidia5": 0, "/dev/nvidia1": 1, "/dev/nvidia2": 2}

    def found(*files: str) -> Check:
        return with_gpus(check(LEFT), box, {}, files, devices)

    one = found("/dev/nvidia5")
    assert (one.gpus, one.far) == ((0,), LEFT)
    every = found("/dev/nvidia5", "/dev/nvidia1", "/dev/nvidia2")
    assert every.gpus == (0, 1, 2)
    assert (every.near, every.far) == (None, frozenset()), "of GPU 2 nothing is known"
    none = found("/dev/null", "/dev/nvidia9")
    assert (none.gpus, none.near, none.ok) == ((), None, True)


def test_open_files_are_read(tmp_path: Path) -> None:
    with (tmp_path / "held").open("w") as held:
        assert held.name in kernel.open_files(os.getpid()).values()
    assert held.name not in kernel.open_files(os.getpid()).values()
    assert kernel.open_files(2**22) == {}
