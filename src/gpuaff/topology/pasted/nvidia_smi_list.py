"""What ``nvidia-smi -L`` says: names, UUIDs and MIG instances.

The list of GPUs in PyTorch's and vLLM's environment reports has the same lines without UUIDs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from gpuaff.records import dataclass
from gpuaff.topology.model import MigInstance
from gpuaff.topology.pasted.reading import Reading

_GPU = re.compile(r"GPU\s{1,4}(\d{1,3}):\s*(.*)", re.ASCII)
_MAKER = re.compile(r"(?:NVIDIA|Tesla|GeForce|Quadro|TITAN|GRID)\b", re.ASCII)
_MIG = re.compile(r"MIG\s.{0,60}?\(UUID:\s?(MIG-[^)\s]{1,80})\)", re.ASCII)
_HEX = r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}"
_UUID = re.compile(f"GPU-{_HEX}", re.ASCII)
_MIG_UUID = re.compile(f"MIG-{_HEX}", re.ASCII)
_MIG_IDS = re.compile(rf"MIG-GPU-{_HEX}/(\d{{1,3}})/(\d{{1,3}})", re.ASCII)

UNKNOWN_INSTANCE = -1
"""The instance ids of a MIG device whose UUID (since driver 470) does not spell them."""


@dataclass(frozen=True, kw_only=True)
class Listed:
    """One GPU of the list.

    Attributes:
        name: the product name; None when the line was cut before it.
        uuid: the UUID; None when it is cut, hidden or made unreadable.
        mig: its MIG instances; None when none are listed.
    """

    name: str | None
    uuid: str | None
    mig: tuple[MigInstance, ...] | None = None


def read(reading: Reading) -> Mapping[int, Listed]:
    """The GPUs of the list, by index; of two lines that differ the first one counts."""
    found: dict[int, Listed] = {}
    instances: dict[str, tuple[int, MigInstance]] = {}
    current = -1
    for line in reading.lines:
        if (gpu := _gpu(line)) is not None:
            current, listed = gpu
            _keep(reading, found, current, listed)
        elif current >= 0 and (mig := _mig(line)) is not None:
            instances.setdefault(mig.uuid, (current, mig))
    return _joined(reading, found, instances.values())


def _joined(
    reading: Reading,
    found: Mapping[int, Listed],
    instances: Collection[tuple[int, MigInstance]],
) -> Mapping[int, Listed]:
    """The GPUs with their instances, and no UUID at two of them."""
    owners: dict[str, int] = {}
    parts: dict[int, list[MigInstance]] = {}
    joined: dict[int, Listed] = {}
    for owner, instance in instances:
        parts.setdefault(owner, []).append(instance)
    for index, gpu in found.items():
        mig = tuple(parts.get(index, ())) or None
        uuid = gpu.uuid
        if uuid and owners.setdefault(uuid.lower(), index) != index:
            reading.note("contradiction", f"two GPUs have the UUID of GPU {index}; it is left out")
            uuid = None
        joined[index] = Listed(name=gpu.name, uuid=uuid, mig=mig)
    return joined


def _gpu(line: str) -> tuple[int, Listed] | None:
    match = _GPU.match(line)
    if match is None:
        return None
    name, has_uuid, uuid = match[2].partition("(UUID:")
    if not has_uuid and not _MAKER.match(name):
        return None
    uuid = uuid.strip(" \t)")
    return int(match[1]), Listed(
        name=name.strip()[:100] or None, uuid=uuid if _UUID.fullmatch(uuid) else None
    )


def _keep(reading: Reading, found: dict[int, Listed], index: int, listed: Listed) -> None:
    known = found.setdefault(index, listed)
    if known.uuid is None and known.name == listed.name:
        found[index] = listed
    elif listed.uuid not in (None, known.uuid) or listed.name != known.name:
        reading.note(
            "contradiction", f"GPU {index} is listed twice and differently; the first is used"
        )


def _mig(line: str) -> MigInstance | None:
    match = _MIG.match(line)
    if match is None:
        return None
    if ids := _MIG_IDS.fullmatch(match[1]):
        return MigInstance(uuid=match[1], gpu_instance=int(ids[1]), compute_instance=int(ids[2]))
    if not _MIG_UUID.fullmatch(match[1]):
        return None
    return MigInstance(
        uuid=match[1], gpu_instance=UNKNOWN_INSTANCE, compute_instance=UNKNOWN_INSTANCE
    )
