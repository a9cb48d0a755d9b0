"""Which GPU a device file belongs to."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from gpuaff.system.kernel import Tree

_DRIVER = "proc/driver/nvidia/gpus"
_MINOR = re.compile(r"^Device Minor:\s*(\d+)", re.ASCII | re.MULTILINE)
_DEVICE = re.compile(r"/dev/nvidia(\d+)", re.ASCII)


def indices_by_minor(tree: Tree, by_address: Mapping[str | None, int]) -> dict[int, int]:
    """GPU indices by the numbers of their device files (``/dev/nvidia3``), which may differ.

    Args:
        tree: where the driver tells which number belongs to which PCI address.
        by_address: GPU indices by PCI address.
    """
    found = {}
    for address in tree.list(_DRIVER):
        told = _MINOR.search(tree.read(f"{_DRIVER}/{address}/information") or "")
        if told and address.lower() in by_address:
            found[int(told[1])] = by_address[address.lower()]
    return found


def minors_of(files: Collection[str]) -> set[int]:
    """The numbers of the GPU device files among a process's open files."""
    matches = (_DEVICE.fullmatch(file) for file in files)
    return {int(match[1]) for match in matches if match}
