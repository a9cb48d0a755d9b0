"""Which devices a claim may choose from, before their use is looked at. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from gpuaff._system.nvml_records import pci_address
from gpuaff.claims.model import Device, LeftOut
from gpuaff.claims.request import Name, Request
from gpuaff.errors import InvalidOptionError, NotEnoughGpusError
from gpuaff.formatting import counted
from gpuaff.launch.inherited import is_uuid
from gpuaff.launch.ranks import Ranks
from gpuaff.options import natural
from gpuaff.topology.model import Gpu, MigInstance
from gpuaff.topology.visible import Visible, resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What limits the choice of this process: environment, scheduler, parent claim.

    Attributes:
        visible: CUDA_VISIBLE_DEVICES; None when it is unset.
        device_order: CUDA_DEVICE_ORDER; None when it is unset.
        granted: NVML's indices of the GPUs that the scheduler names; None when it names none.
        granted_count: how many GPUs the scheduler has granted; None when unknown.
        source: where that was found, or why it was not, in words.
        parent_claim: the UUIDs of the claim in which this process runs; None when it runs in none.
        sharers: the ranks that divide the granted GPUs, with this rank among them; None where all
            are this process's.
        left_out: the GPUs that cannot be claimed and that CUDA may count.
    """

    visible: str | None = None
    device_order: str | None = None
    granted: Collection[int] | None = None
    granted_count: int | None = None
    source: str = ""
    parent_claim: Collection[str] | None = None
    sharers: Ranks | None = None
    left_out: Sequence[LeftOut] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The devices that a claim may choose from.

    Attributes:
        devices: in the order of their indices, or as ``gpus=`` names them.
        count: how many of them are requested.
        narrowed: why these are not all of the machine's; empty when they are, or when exactly
            these were requested.
    """

    devices: tuple[Device, ...]
    count: int
    narrowed: str = ""


def find_candidates(devices: Sequence[Device], request: Request, limits: Limits) -> Candidates:
    """Find the devices that a claim may choose from.

    Args:
        devices: all that NVML shows.
        request: what is requested.
        limits: what limits the choice.

    Raises:
        InvalidOptionError: a name fits no device, or several, or the same as another name; or
            ``auto`` where it is not known how many GPUs were granted.
        NotEnoughGpusError: there are fewer than requested: waiting would not help.
    """
    allowed, why = _allowed(devices, limits)
    count = _count(request, allowed, limits, why)
    chosen, option = _requested(devices, allowed, request, limits, count, why)
    bad = {device: words for device, words in _unclaimable(devices).items() if device in chosen}
    if bad:
        found = f"{option}= names {len(chosen)}" if option else why
        chosen, allowed = _without(bad, chosen), _without(bad, allowed)
        why = (
            f"{found}, of which {len(chosen) or 'none'} can be claimed: "
            f"{'; '.join(dict.fromkeys(bad.values()))} "
            "(see nvidia-smi -L, and how they are passed through to a VM)"
        )
        if len(chosen) < count:
            raise NotEnoughGpusError(count, len(chosen), why)
    if request.count is None and limits.sharers is not None:
        chosen, count = _of_rank(limits.sharers, chosen, count)
    too_few = f"candidates= names {len(chosen)}" if option == "candidates" else why
    whole = tuple(device for device in chosen if not device.is_mig)
    if count > 1 and len(whole) < len(chosen):
        too_few = "CUDA shows a process no more than one MIG instance"
        chosen = whole if len(whole) >= count else chosen[:1]
    if len(chosen) < count:
        raise NotEnoughGpusError(count, len(chosen), too_few)
    narrowed = ""
    if option == "candidates" and len(chosen) < len(allowed):
        narrowed = f"candidates= allows {_counted(chosen)} of the {len(devices)} here"
    elif option != "gpus" and len(allowed) < len(devices):
        narrowed = why
    return Candidates(devices=chosen, count=count, narrowed=narrowed)


def _without(bad: Collection[Device], devices: Sequence[Device]) -> tuple[Device, ...]:
    return tuple(device for device in devices if device not in bad)


def _requested(
    devices: Sequence[Device],
    allowed: tuple[Device, ...],
    request: Request,
    limits: Limits,
    count: int,
    why: str,
) -> tuple[tuple[Device, ...], str]:
    """The devices that are named, and by which option; else all whole GPUs, or all instances."""
    option = "candidates" if request.gpus is None else "gpus"
    names = request.candidates if request.gpus is None else request.gpus
    if names is None:
        return tuple(device for device in allowed if not device.is_mig) or allowed, ""
    here = {device.index for device in devices}
    for one in limits.left_out:
        if one.index not in here and one.index in map(_index, names):
            raise NotEnoughGpusError(count, 0, str(one))
    found = named_devices(option, names, devices, limits.left_out)
    for device in found:
        if device not in allowed:
            raise NotEnoughGpusError(count, 0, f"this process may not use {device}: {why}")
    return found, option


def allowed_devices(devices: Sequence[Device], limits: Limits) -> tuple[Device, ...]:
    """The devices that the limits allow this process."""
    return _allowed(devices, limits)[0]


def _allowed(devices: Sequence[Device], limits: Limits) -> tuple[tuple[Device, ...], str]:
    """The devices that the limits allow this process, and why these.

    The variables count all that CUDA may show, also inside a claim of some.
    """
    allowed, why = _granted(devices, limits)
    why = "; ".join([why, *map(str, limits.left_out)])
    claimed = limits.parent_claim
    if claimed is None:
        return allowed, why
    own = tuple(device for device in allowed if device.uuid in claimed)
    claim = f"the claim in which this process runs has {counted(len(claimed), 'GPU')}"
    return own, claim if len(own) == len(
        claimed
    ) else f"{claim}, of which it may use {len(own)}: {why}"


def _granted(devices: Sequence[Device], limits: Limits) -> tuple[tuple[Device, ...], str]:
    everything = f"this machine has {_counted(devices)}"
    if limits.visible is not None or limits.device_order is not None:
        visible = resolve_visible(devices, limits)
        shown = in_cuda_order(devices, visible)
        if limits.visible is None and shown:
            return shown, everything
        notes = [note.message for note in visible.notes if note.code != "visible-lost"]
        if not shown and notes:
            return shown, "; ".join(notes)
        variable = f"CUDA_VISIBLE_DEVICES={str(limits.visible)[:80]!r}"
        return shown, f"{variable} shows {_counted(shown)} of the {len(devices)} here"
    if limits.granted is not None:
        granted = tuple(device for device in devices if device.index in limits.granted)
        return granted, f"{limits.source} grants {_counted(granted)} of the {len(devices)} here"
    return tuple(devices), everything


def _count(request: Request, allowed: Sequence[Device], limits: Limits, why: str) -> int:
    if request.count is not None:
        return request.count
    count = limits.granted_count
    if count == 0:
        raise NotEnoughGpusError(1, 0, f"{limits.source} grants no GPUs")
    if count is not None:
        shown = limits.visible is not None and allowed  # the variable may show fewer
        return min(count, len(allowed)) if shown else count
    if limits.visible is None and limits.parent_claim is None:
        expected = f"a number, since no scheduler says how many were granted ({limits.source})"
        raise InvalidOptionError("n", "auto", expected)
    if not allowed:
        raise NotEnoughGpusError(1, 0, why)
    return len(allowed)


def slice_for_rank(ranks: Ranks, count: int) -> slice:
    """A rank's share of so many granted GPUs, where the grant is for all ranks of the node.

    Schedulers mostly grant GPUs to all processes of a job on a node. They are divided in blocks, in
    CUDA's order and by rank: of 8 GPUs for 4 ranks rank 1 gets the third and the fourth, of 3 for
    2 ranks rank 0 gets two. With as many GPUs as ranks, each rank gets the one that
    ``torch.cuda.set_device(local_rank)`` would use.

    Raises:
        NotEnoughGpusError: there are fewer GPUs than ranks.
    """
    if count < ranks.local_size:
        raise NotEnoughGpusError(
            ranks.local_size,
            count,
            f"{count} {'was' if count == 1 else 'were'} granted to the {ranks.local_size} ranks of "
            "this node, and each needs its own: start fewer ranks; or claim once for all of them, "
            "before the launcher (gpuaff run -n auto -- torchrun ...), and claim nothing in the "
            "ranks; if each rank was granted GPUs of its own, say how many: claim_gpus(n)",
        )
    each, more = divmod(count, ranks.local_size)
    first = ranks.local_rank * each + min(ranks.local_rank, more)
    return slice(first, first + each + (ranks.local_rank < more))


def _of_rank(ranks: Ranks, devices: Sequence[Device], count: int) -> tuple[tuple[Device, ...], int]:
    """A rank's candidates, and how many of them; any, where the granted ones are unknown."""
    own = slice_for_rank(ranks, count)
    named = devices[own] if len(devices) == count else devices
    return tuple(named), own.stop - own.start


def unclaimable(devices: Sequence[Device]) -> tuple[str, ...]:
    """Why claims cannot identify some devices by their UUIDs; usually nothing.

    GPUs that are passed through to a virtual machine wrongly may share one, or have invalid ones.
    """
    return tuple(dict.fromkeys(_unclaimable(devices).values()))


def _unclaimable(devices: Sequence[Device]) -> dict[Device, str]:
    by_uuid: dict[str, list[Device]] = {}
    for device in devices:
        by_uuid.setdefault(device.uuid, []).append(device)
    found: dict[Device, str] = {}
    for uuid, same in by_uuid.items():
        which = " and ".join(
            f"an instance of GPU {one.index}" if one.is_mig else str(one) for one in same
        )
        if len(same) > 1:
            why = f"{which} have the same UUID, {ascii(uuid)[:80]}, by which claims know a GPU"
        elif not is_uuid(uuid):
            why = f"{which} reports an invalid UUID, {ascii(uuid)[:80]}"
        else:
            continue
        found.update(dict.fromkeys(same, why))
    return found


def resolve_visible(devices: Sequence[Device], limits: Limits) -> Visible:
    """The devices that CUDA shows by the variables."""
    here = {device.index for device in devices}
    others = [
        Gpu(index=one.index, mig=() if one.cut else None)
        for one in limits.left_out
        if one.index not in here
    ]
    lost = frozenset(one.index for one in limits.left_out if not one.cut)
    order = limits.device_order
    return resolve([*_gpus(devices), *others], limits.visible, device_order=order, lost=lost)


def _gpus(devices: Sequence[Device]) -> list[Gpu]:
    """The GPUs of these devices, with their MIG instances."""
    by_index: dict[int, list[Device]] = {}
    for device in devices:
        by_index.setdefault(device.index, []).append(device)
    return [
        Gpu(
            index=index,
            uuid=parts[0].parent or parts[0].uuid,
            pci_bus_id=parts[0].pci_bus_id,
            name=parts[0].name,
            mig=tuple(
                MigInstance(uuid=part.uuid, gpu_instance=-1, compute_instance=-1) for part in parts
            )
            if parts[0].is_mig
            else None,
        )
        for index, parts in sorted(by_index.items())
    ]


def in_cuda_order(devices: Sequence[Device], visible: Visible) -> tuple[Device, ...]:
    """The visible devices, in CUDA's order, without those that are left out."""
    by_uuid = {device.uuid: device for device in devices}
    by_index = {device.index: device for device in devices if not device.is_mig}
    pairs = zip(visible.indices, visible.instances, strict=True)
    shown = (by_index.get(index) if uuid is None else by_uuid[uuid] for index, uuid in pairs)
    return tuple(device for device in shown if device is not None)


def named_devices(
    option: str,
    names: Sequence[Name],
    devices: Sequence[Device],
    left_out: Collection[LeftOut] = (),
) -> tuple[Device, ...]:
    """The devices of these names, in their order.

    Raises:
        InvalidOptionError: a name fits none, or several, or the same as another name.
    """
    found: list[Device] = []
    for name in names:
        fitting = _fitting(name, devices)
        if len(fitting) != 1:
            there = ", ".join(f"{device.index} ({device.uuid})" for device in devices[:16])
            problem = "fits several of them" if fitting else "is none of them"
            raise InvalidOptionError(
                option,
                name,
                f"the index, UUID or PCI address of a GPU here: {there or 'none'}; this "
                + "; ".join([problem, *map(str, left_out)]),
            )
        if fitting[0] in found:
            expected = f"each GPU once ({fitting[0]} is there twice)"
            raise InvalidOptionError(option, list(names), expected)
        found += fitting
    return tuple(found)


def _index(name: Name) -> int | None:
    return name if isinstance(name, int) else natural(name.strip())


def _fitting(name: Name, devices: Sequence[Device]) -> list[Device]:
    number = _index(name)
    if number is not None:
        return [device for device in devices if device.index == number and not device.is_mig]
    text = str(name).strip()
    if text.upper().startswith(("GPU-", "MIG-")):
        return [device for device in devices if device.uuid.lower().startswith(text.lower())]
    address = pci_address(text)
    return [d for d in devices if address and d.pci_bus_id == address and not d.is_mig]


def _counted(devices: Collection[Device]) -> str:
    instances = sum(device.is_mig for device in devices)
    whole = len(devices) - instances
    parts = [counted(whole, "GPU") if whole else "no GPUs"] if whole or not instances else []
    return " and ".join([*parts, counted(instances, "MIG instance")] if instances else parts)
