"""Small /sys and /proc trees, written by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def write(root: Path, name: str, text: str) -> None:
    """Write one file below a root."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_cpus(
    root: Path, *, cpus: int, siblings: Callable[[int], str], online: str | None = None
) -> None:
    """One package of CPUs; ``siblings`` gives the cpulist of a CPU's core."""
    write(root, "sys/devices/system/cpu/online", online or f"0-{cpus - 1}\n")
    for cpu in range(cpus):
        folder = f"sys/devices/system/cpu/cpu{cpu}/topology"
        write(root, f"{folder}/thread_siblings_list", siblings(cpu) + "\n")
        write(root, f"{folder}/core_siblings_list", f"0-{cpus - 1}\n")
        write(root, f"{folder}/physical_package_id", "-1\n")


def write_nodes(root: Path, *cpulists: str) -> None:
    """NUMA nodes 0, 1, … with these CPUs, 10 from themselves and 20 from each other."""
    for number, cpulist in enumerate(cpulists):
        folder = f"sys/devices/system/node/node{number}"
        distances = " ".join("10" if n == number else "20" for n in range(len(cpulists)))
        write(root, f"{folder}/cpulist", cpulist + "\n")
        write(root, f"{folder}/distance", distances + "\n")


def write_pci(root: Path, address: str, **files: str) -> None:
    """A PCI device; a GPU of NVIDIA unless ``vendor`` or ``device_class`` say otherwise."""
    values = {"vendor": "0x10de", "class": files.pop("device_class", "0x030200"), **files}
    for name, text in values.items():
        write(root, f"sys/bus/pci/devices/{address}/{name}", text + "\n")
