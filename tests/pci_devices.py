"""PCI devices of a test's own: a process that sees them in sysfs where the machine's are.

A mount namespace of its own shows it another folder there; needs root.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from tests.processes import CPUS
from tests.trees import write_pci

PLACE = "/sys/bus/pci/devices"
FIRST = f"{PLACE}/0000:01:00.0"
"""The directory of the first GPU."""

_SHOWN = 'mount --bind "$1" /sys/bus/pci/devices && shift && exec "$@"'


@cache
def available() -> bool:
    """Whether this machine lets us show other devices."""
    command = ["unshare", "-m", "mount", "--bind", "/", "/sys/bus/pci/devices"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def gpus(folder: Path, count: int, *, near: Iterable[int] = CPUS) -> list[str]:
    """Write GPUs, at the addresses of the fake driver's; a prefix makes a command see them."""
    for place in range(1, count + 1):
        cpulist = ",".join(map(str, sorted(near)))
        write_pci(folder, f"0000:{place:02x}:00.0", numa_node="0", local_cpulist=cpulist)
    devices = folder / "sys/bus/pci/devices"
    return ["unshare", "-m", "sh", "-c", _SHOWN, "sh", str(devices)]
