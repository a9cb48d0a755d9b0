"""Which devices come into question, before anybody looks at who has them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from gpuaff.claims.model import Device, LeftOut
from gpuaff.claims.request import Name, Request
from gpuaff.errors import InvalidOptionError, NotEnoughGpusError
from gpuaff.launch.inherited import is_uuid
from gpuaff.launch.ranks import Ranks
from gpuaff.options import natural
from gpuaff.topology.model import Gpu, MigInstance
from gpuaff.topology.visible import Visible, resolve

# Which part of the granted GPUs is a rank's, where all ranks of the node were granted them. Pure.
#
# Schedulers mostly grant GPUs to all processes of a job on a node: ``claim_gpus("auto")`` in each
# of
# them would give everything to the first. They are cut into blocks, in the order in which CUDA
# counts
# them and by rank: of 8 GPUs for 4 ranks rank 1 has the third and the fourth, of 3 for 2 ranks
# rank 0
# has two. With as many GPUs as ranks, each has that one which :func:`gpuaff.set_affinity` and
# ``torch.cuda.set_device(local_rank)`` would take. One GPU for each is the least: with fewer no
# rank
# gets any.


def portion(ranks: Ranks, count: int) -> slice:
    """The places of a rank's GPUs among so many.

    Raises:
        NotEnoughGpusError: there is not one for each rank.
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


def cut(ranks: Ranks, devices: Sequence[Device], count: int) -> tuple[tuple[Device, ...], int]:
    """The devices that come into question for a rank, and how many of them are its.

    Args:
        ranks: this rank, among those that share what was granted.
        devices: all that come into question.
        count: how many were granted. Where there are more devices nobody has said which ones, so
            any will do.
    """
    own = portion(ranks, count)
    named = tuple(devices[own]) if len(devices) == count else tuple(devices)
    return named, own.stop - own.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The devices that come into question.

    Attributes:
        devices: in the order of their indices, or as ``gpus=`` names them.
        count: how many of them are wanted.
        narrowed: why these are not all of the machine's, in words; empty when they are, and when
            somebody has asked for exactly these.
    """

    devices: tuple[Device, ...]
    count: int
    narrowed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What this process was given, by others.

    Attributes:
        visible: CUDA_VISIBLE_DEVICES; None when it is unset.
        device_order: CUDA_DEVICE_ORDER; None when it is unset.
        granted: NVML's indices of the GPUs that the scheduler names; None when it names none.
        granted_count: how many GPUs the scheduler has granted; None when it does not tell.
        source: who told that, in words; or why nobody did.
        around: what the claim has in which this process runs, by UUID; None when it runs in none.
        sharers: the ranks among which that is to be divided, and this one's place among them; None:
            it is all this process's.
        left_out: the GPUs that cannot be claimed and that CUDA may count.
    """

    visible: str | None = None
    device_order: str | None = None
    granted: Collection[int] | None = None
    granted_count: int | None = None
    source: str = ""
    around: Collection[str] | None = None
    sharers: Ranks | None = None
    left_out: Sequence[LeftOut] = ()


def pool(devices: Sequence[Device], request: Request, bounds: Bounds) -> Pool:
    """Find the devices that come into question.

    Args:
        devices: all that this process may use.
        request: what is asked for.
        bounds: what it was given.

    Raises:
        InvalidOptionError: a name means no device, or the same as another one; or ``auto`` where
            nobody tells how many GPUs were granted.
        NotEnoughGpusError: there are fewer than are asked for: waiting would not help.
    """
    seen, why = _within(devices, bounds)
    count = _count(request, seen, bounds, why)
    if request.gpus is not None:
        chosen = _named("gpus", request.gpus, devices, seen, why, count, bounds.left_out)
    elif request.candidates is not None:
        names = request.candidates
        chosen = _named("candidates", names, devices, seen, why, count, bounds.left_out)
    else:
        chosen = tuple(device for device in seen if not device.is_mig) or seen
    unnamed = {device: words for device, words in unclaimable(devices).items() if device in chosen}
    if unnamed:
        because = "; ".join(dict.fromkeys(unnamed.values()))
        told = why
        if request.gpus is not None or request.candidates is not None:
            option = "candidates" if request.gpus is None else "gpus"
            told = f"{option}= names {len(chosen)}"
        chosen = tuple(device for device in chosen if device not in unnamed)
        remedy = "see nvidia-smi -L, and how they are passed through to a VM"
        why = f"{told}, of which {len(chosen) or 'none'} can be claimed: {because} ({remedy})"
        if len(chosen) < count:
            raise NotEnoughGpusError(count, len(chosen), why)
    if request.count is None and bounds.sharers is not None:
        chosen, count = cut(bounds.sharers, chosen, count)
    if count > 1 and any(device.is_mig for device in chosen):
        whole = tuple(device for device in chosen if not device.is_mig)
        if len(whole) < count:
            raise NotEnoughGpusError(count, 1, "CUDA shows a process no more than one MIG instance")
        chosen = whole
    if len(chosen) < count:
        raise NotEnoughGpusError(count, len(chosen), _too_few(chosen, why, request))
    seen = tuple(device for device in seen if device not in unnamed)
    narrowed = _narrowed(devices, seen, chosen, why, request)
    return Pool(devices=chosen, count=count, narrowed=narrowed)


def unclaimable(devices: Sequence[Device]) -> dict[Device, str]:
    """The devices that cannot be told from others, and why; usually none.

    Leases, the board and what a claim tells its children know a device by its UUID. A virtual
    machine's GPUs that are passed through wrongly may all tell the same one, or nonsense.
    """
    by_uuid: dict[str, list[Device]] = {}
    for device in devices:
        by_uuid.setdefault(device.uuid, []).append(device)
    found: dict[Device, str] = {}
    for uuid, those in by_uuid.items():
        told = ascii(uuid)[:80]
        which = " and ".join(
            f"an instance of GPU {one.index}" if one.is_mig else str(one) for one in those
        )
        if len(those) > 1:
            words = f"{which} have the same UUID, {told}, by which claims know a GPU"
        elif not is_uuid(uuid):
            words = f"{which} has a UUID that is none, {told}"
        else:
            continue
        found.update(dict.fromkeys(those, words))
    return found


def _narrowed(
    devices: Sequence[Device],
    seen: Sequence[Device],
    chosen: Sequence[Device],
    why: str,
    request: Request,
) -> str:
    """Why there are no more to choose from."""
    if request.gpus is not None:
        return ""
    if request.candidates is not None and len(chosen) < len(seen):
        return f"{_counted(chosen)} of the {len(devices)} here may be chosen: candidates= says so"
    return why if len(seen) < len(devices) else ""


def within(devices: Sequence[Device], bounds: Bounds) -> tuple[Device, ...]:
    """The devices that this process was given."""
    return _within(devices, bounds)[0]


def _within(devices: Sequence[Device], bounds: Bounds) -> tuple[tuple[Device, ...], str]:
    """The devices that this process was given, and why these.

    The variables count all that CUDA may show, also inside a claim of some.
    """
    seen, why = _given(devices, bounds)
    why = "; ".join([why, *map(str, bounds.left_out)])
    if bounds.around is None:
        return seen, why
    own = tuple(device for device in seen if device.uuid in bounds.around)
    told = f"the claim in which this process runs has {_number(len(bounds.around), 'GPU')}"
    if len(own) < len(bounds.around):
        told += f", of which it may use {len(own)}: {why}"
    return own, told


def _given(devices: Sequence[Device], bounds: Bounds) -> tuple[tuple[Device, ...], str]:
    everything = f"this machine has {_counted(devices)}"
    if bounds.visible is not None or bounds.device_order is not None:
        found = visible(devices, bounds)
        seen = in_order(devices, found)
        if bounds.visible is None and seen:
            return seen, everything
        told = [note.message for note in found.notes if note.code != "visible-lost"]
        because = "; ".join(told) if not seen else ""
        shown = f"CUDA_VISIBLE_DEVICES={str(bounds.visible)[:80]!r} shows {_counted(seen)}"
        return seen, because or f"{shown} of the {len(devices)} here"
    if bounds.granted is not None:
        seen = tuple(device for device in devices if device.index in bounds.granted)
        return seen, f"{bounds.source} grants {_counted(seen)} of the {len(devices)} here"
    return tuple(devices), everything


def visible(devices: Sequence[Device], bounds: Bounds) -> Visible:
    """What CUDA makes of the variables."""
    here = {device.index for device in devices}
    gpus = [
        Gpu(index=one.index, mig=() if one.cut else None)
        for one in bounds.left_out
        if one.index not in here
    ]
    lost = frozenset(one.index for one in bounds.left_out if not one.cut)
    every = [*_gpus(devices), *gpus]
    return resolve(every, bounds.visible, device_order=bounds.device_order, lost=lost)


def in_order(devices: Sequence[Device], found: Visible) -> tuple[Device, ...]:
    """The visible devices, in CUDA's order, without those that are left out."""
    by_uuid = {device.uuid: device for device in devices}
    by_index = {device.index: device for device in devices if not device.is_mig}
    pairs = zip(found.indices, found.instances, strict=True)
    shown = (by_index.get(index) if uuid is None else by_uuid[uuid] for index, uuid in pairs)
    return tuple(device for device in shown if device is not None)


def _gpus(devices: Sequence[Device]) -> tuple[Gpu, ...]:
    """The GPUs of which these devices are, as the reader of the variables wants them."""
    whole = [
        Gpu(index=device.index, uuid=device.uuid, pci_bus_id=device.pci_bus_id, name=device.name)
        for device in devices
        if not device.is_mig
    ]
    cut: dict[int, list[Device]] = {}
    for device in devices:
        if device.is_mig:
            cut.setdefault(device.index, []).append(device)
    parents = [
        Gpu(
            index=index,
            uuid=parts[0].parent,
            pci_bus_id=parts[0].pci_bus_id,
            name=parts[0].name,
            mig=tuple(
                MigInstance(uuid=part.uuid, gpu_instance=-1, compute_instance=-1) for part in parts
            ),
        )
        for index, parts in cut.items()
    ]
    return tuple(sorted([*whole, *parents], key=lambda gpu: gpu.index))


def _count(request: Request, seen: Sequence[Device], bounds: Bounds, why: str) -> int:
    if request.count is not None:
        return request.count
    if bounds.granted_count == 0:
        raise NotEnoughGpusError(1, 0, f"{bounds.source} grants no GPUs")
    if bounds.granted_count is not None:
        shown = bounds.visible is not None and seen  # somebody may have shown fewer
        return min(bounds.granted_count, len(seen)) if shown else bounds.granted_count
    if bounds.visible is not None or bounds.around is not None:
        if not seen:
            raise NotEnoughGpusError(1, 0, why)
        return len(seen)
    raise InvalidOptionError(
        "n", "auto", f"a number: nobody tells how many GPUs were granted ({bounds.source})"
    )


def _named(
    option: str,
    names: Sequence[Name],
    devices: Sequence[Device],
    seen: Collection[Device],
    why: str,
    count: int,
    left_out: Collection[LeftOut],
) -> tuple[Device, ...]:
    gone = {one.index: str(one) for one in left_out}
    for name in names:
        number = _number_of(name)
        if number in gone and not any(device.index == number for device in devices):
            raise NotEnoughGpusError(count, 0, gone[number])
    found = named(option, names, devices, left_out)
    for device in found:
        if device not in seen:
            raise NotEnoughGpusError(
                count, 0, f"{device} is not among those that it may have: {why}"
            )
    return found


def named(
    option: str,
    names: Sequence[Name],
    devices: Sequence[Device],
    left_out: Collection[LeftOut] = (),
) -> tuple[Device, ...]:
    """The devices that names mean, in their order.

    Raises:
        InvalidOptionError: a name means none, or several, or the same as another one.
    """
    found: list[Device] = []
    for name in names:
        device = _find(option, name, devices, left_out)
        if device in found:
            expected = f"each GPU once ({device} is there twice)"
            raise InvalidOptionError(option, list(names), expected)
        found.append(device)
    return tuple(found)


def _number_of(name: Name) -> int | None:
    return name if isinstance(name, int) else natural(name.strip())


def _find(
    option: str, name: Name, devices: Sequence[Device], left_out: Collection[LeftOut]
) -> Device:
    """The device that a name means."""
    text = "" if isinstance(name, int) else name.strip()
    number = _number_of(name)
    if number is not None:
        found = [device for device in devices if device.index == number and not device.is_mig]
    elif text.upper().startswith(("GPU-", "MIG-")):
        found = [device for device in devices if device.uuid.lower().startswith(text.lower())]
    else:
        address = _address(text)
        found = [d for d in devices if address and d.pci_bus_id == address and not d.is_mig]
    if len(found) == 1:
        return found[0]
    there = ", ".join(f"{device.index} ({device.uuid})" for device in devices[:16])
    problem = "fits several of them" if found else "is none of them"
    problem = "; ".join([problem, *map(str, left_out)])
    raise InvalidOptionError(
        option,
        name,
        f"the index, UUID or PCI address of a GPU here: {there or 'none'}; this {problem}",
    )


def _address(text: str) -> str | None:
    from gpuaff._system.nvml_calls import pci_address

    return pci_address(text)


def _too_few(chosen: Sequence[Device], why: str, request: Request) -> str:
    if request.candidates is not None:
        return f"candidates= names {len(chosen)}"
    return why


def _counted(devices: Collection[Device]) -> str:
    parts = sum(device.is_mig for device in devices)
    whole = len(devices) - parts
    said = [_number(whole, "GPU")] if whole or not parts else []
    return " and ".join([*said, _number(parts, "MIG instance")] if parts else said)


def _number(number: int, what: str) -> str:
    return f"1 {what}" if number == 1 else f"{number or 'no'} {what}s"
