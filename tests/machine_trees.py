"""The /sys and /proc trees of real machines (``data/sysfs``), and what ``lstopo`` makes of them."""

from __future__ import annotations

import os
import subprocess
import tarfile
import xml.etree.ElementTree as ET
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

ARCHIVES = Path(__file__).parent / "data" / "sysfs"

NAMES = tuple(sorted(path.name.removesuffix(".tar.xz") for path in ARCHIVES.glob("*.tar.xz")))


def unpack(name: str, folder: Path) -> Path:
    """A machine's tree below a folder: its root. Workers share the folder: do not write there."""
    place = folder / name
    if not place.exists():
        unfinished = Path(mkdtemp(dir=folder))
        with tarfile.open(ARCHIVES / f"{name}.tar.xz") as archive:
            for member in archive:  # their dates, owners and modes are nobody's business
                archive.extract(member, unfinished, set_attrs=False, filter="tar")
        with suppress(OSError):  # another worker was first
            unfinished.rename(place)
    (root,) = place.iterdir()
    return root


def _cpus(mask: str) -> frozenset[int]:
    """hwloc's masks: 32-bit words, the highest first; an empty word is zero."""
    words = [word.removeprefix("0x").zfill(8) for word in mask.split(",")]
    bits = int("".join(words), 16)
    return frozenset(i for i in range(bits.bit_length()) if bits >> i & 1)


@cache
def _objects(root: Path, everything: bool) -> list[ET.Element]:
    command = ["lstopo-no-graphics", "-i", str(root), "--no-io", "--of", "xml"]
    if everything:
        command.append("--disallowed")
    # GPU memory on POWER9 is hidden unless asked for.
    env = {**os.environ, "HWLOC_KEEP_NVIDIA_GPU_NUMA_NODES": "1"}
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    return list(ET.fromstring(run.stdout).iter("object"))


class Lstopo:
    """The reference's view of a tree."""

    def __init__(self, root: Path, *, everything: bool = True) -> None:
        """With ``everything`` also what the tree's cpuset denies."""
        self._objects = _objects(root, everything)

    def sets(self, kind: str) -> set[frozenset[int]]:
        """The CPU set of each object of a kind (``Core``, ``Package``, ``L3Cache``)."""
        return {_cpus(o.get("cpuset", "")) for o in self._objects if o.get("type") == kind}

    @property
    def cpus(self) -> frozenset[int]:
        """All CPUs."""
        return frozenset().union(*self.sets("PU"))

    @property
    def numa_nodes(self) -> dict[int, frozenset[int]]:
        """The CPUs near each NUMA node; of a node without CPUs, those hwloc finds nearest."""
        nodes = [o for o in self._objects if o.get("type") == "NUMANode"]
        return {int(o.get("os_index", "-1")): _cpus(o.get("cpuset", "")) for o in nodes}
