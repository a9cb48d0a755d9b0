"""How the GPUs of a machine are connected, in the words of ``nvidia-smi topo -m``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

from gpuaff._system.nvml_calls import Code, Questions, pci_address

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

UNKNOWN = "N/A"
"""The word for a pair of GPUs of which nothing is known."""

Matrix: TypeAlias = tuple[tuple[str, ...], ...]
"""One word for each two GPUs."""

_MOST_LINKS = 36
"""NVML_NVLINK_MAX_LINKS of the newest driver; older ones refuse the higher numbers."""

_GPU, _SWITCH = 0, 2
"""NVML_NVLINK_DEVICE_TYPE_GPU and …_SWITCH: what is at a link's other end."""

_PATHS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""nvidia-smi's words for ``nvmlGpuTopologyLevel_t``. 0 is two GPUs on one board."""


@dataclass()
class _NvLinks:
    """A GPU's active NVLinks: how many go to switches, how many to each PCI address."""

    switched: int = 0
    direct: Counter[str | None] = field(default_factory=Counter)


def read_links(asked: Sequence[Questions], addresses: Sequence[str | None]) -> Matrix | None:
    """Read how each two GPUs are connected.

    NVLinks go before the PCIe path: all pairs of the 4 x H100 machine share a host bridge and
    are joined by 18 links, which nvidia-smi calls ``NV18``.

    Args:
        asked: whom to ask about each GPU; they keep what fails.
        addresses: the PCI address of each GPU.

    Returns:
        The words; None when there are several GPUs and no pair is known.
    """
    size = len(asked)
    nvlinks = [_nvlinks(gpu) for gpu in asked] if size > 1 else []
    pairs: dict[tuple[int, int], str] = {}
    for i, j in combinations(range(size), 2):
        count = _joining(nvlinks[i], nvlinks[j], addresses[i], addresses[j])
        pairs[i, j] = pairs[j, i] = f"NV{count}" if count else _path(asked[i], asked[j], count)
    if pairs and set(pairs.values()) == {UNKNOWN}:
        return None
    return tuple(tuple(pairs.get((i, j), "X") for j in range(size)) for i in range(size))


def _nvlinks(gpu: Questions) -> _NvLinks | None:
    """A GPU's active NVLinks; None when they cannot be told."""
    found = _NvLinks()
    for link in range(_MOST_LINKS):
        none_here = (Code.NOT_SUPPORTED, Code.INVALID_ARGUMENT)
        active = gpu.ask("NVLinks", "nvmlDeviceGetNvLinkState", link, fine=none_here)
        if gpu.lost or gpu.code not in (Code.SUCCESS, *none_here):
            return None
        if gpu.code == Code.INVALID_ARGUMENT:
            break
        if active and not _follow(gpu, link, found):
            return None
    return found


def _follow(gpu: Questions, link: int, found: _NvLinks) -> bool:
    """Add a link to those found, by what is at its other end; False when that is not told."""
    untold = (Code.NOT_SUPPORTED, Code.FUNCTION_NOT_FOUND)
    kind = gpu.ask("NVLink peers", "nvmlDeviceGetNvLinkRemoteDeviceType", link, fine=untold)
    if kind == _SWITCH:
        found.switched += 1
        return True
    remote = gpu.ask("NVLink peers", "nvmlDeviceGetNvLinkRemotePciInfo", link)
    if remote is None:
        return False
    address = pci_address(remote.busId)
    if address is not None:
        found.direct[address] += 1
    elif kind != _GPU:  # a virtual machine is not shown the switches
        found.switched += 1
    return True


def _joining(
    one: _NvLinks | None, other: _NvLinks | None, address: str | None, other_address: str | None
) -> int | None:
    """How many NVLinks join two GPUs; None when one of the two does not tell."""
    if one is None or other is None:
        return None
    direct = max(one.direct[other_address], other.direct[address])
    return direct + min(one.switched, other.switched)


def _path(gpu: Questions, other: Questions, nvlinks: int | None) -> str:
    """The word for the PCIe path between two GPUs that no NVLink joins."""
    if nvlinks is None:
        return UNKNOWN
    what = "path to other GPUs"
    level = gpu.ask(what, "nvmlDeviceGetTopologyCommonAncestor", other.handle)
    return _PATHS.get(level, UNKNOWN)
