"""What a claim requests, and which devices it may choose from. Pure: their use is looked at later.

The arguments limit the choice, and so do the environment, the scheduler and a parent claim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import groupby, islice
from typing import NamedTuple

from gpuaff import options
from gpuaff._system.nvml_records import pci_address
from gpuaff.claims.model import Device, LeftOut, Waiting
from gpuaff.claims.placeholder import Kind, kind_of
from gpuaff.errors import InvalidOptionError, NotEnoughGpusError
from gpuaff.formatting import counted
from gpuaff.launch.inherited import ParentClaim, is_uuid
from gpuaff.launch.ranks import Ranks
from gpuaff.options import MOST_GPUS, natural, whole
from gpuaff.topology.model import Gpu, MigInstance
from gpuaff.topology.visible import resolve

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeAlias

    from gpuaff.launch.allocation import Granted
    from gpuaff.notices import Notice

Name: TypeAlias = "int | str"
"""A device: NVML's index, a UUID or the beginning of one, or a PCI address."""

_FOREVER = 1e9
"""Seconds (31 years): a longer wait has no limit."""


class VisibleAs(str, Enum):
    """How CUDA_VISIBLE_DEVICES is written."""

    INDEX = "index"
    """Numbers, in the order of PCI addresses, with CUDA_DEVICE_ORDER=PCI_BUS_ID (case D6)."""
    UUID = "uuid"
    """UUIDs, as MIG instances always are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The arguments of ``claim_gpus``, checked."""

    count: int | None  # None: as many as the scheduler has granted
    gpus: tuple[Name, ...] | None = None
    candidates: tuple[Name, ...] | None = None
    min_free_memory: int | None = None
    max_utilization: int | None = None
    wait: float | None = 0.0  # None: without limit
    visible: VisibleAs | None = VisibleAs.INDEX
    placeholder: Kind = None
    pin: bool = False
    own_is_free: bool = True
    on_wait: Callable[[Waiting], object] | None = None


def parse_request(n: object, **arguments: object) -> Request:
    """Check the arguments of ``claim_gpus``, or some of them."""
    checked: dict[str, Any] = {
        name: None if value is None and name not in _FLAGS else _READERS[name](name, value)
        for name, value in arguments.items()
    }
    count = None
    if not (isinstance(n, str) and n == "auto"):
        expected = f'a number of GPUs from 1 to {MOST_GPUS}, or "auto": as many as were granted'
        count = options.count("n", n, most=MOST_GPUS, expected=expected)
    gpus = checked.get("gpus")
    if gpus and checked.get("candidates"):
        raise InvalidOptionError("candidates", arguments["candidates"], "nothing beside gpus=")
    if gpus and count not in (None, 1, len(gpus)):
        raise InvalidOptionError("n", n, f"{len(gpus)}, as many as gpus= names, or nothing")
    return Request(count=len(gpus) if gpus else count, **checked)


def _seconds(option: str, value: object) -> float | None:
    seconds = value if isinstance(value, float) else whole(value)
    if seconds is None or not seconds >= 0:
        expected = "seconds to wait, 0 (not at all) or more, or None (without limit)"
        raise InvalidOptionError(option, value, expected)
    return float(seconds) if seconds < _FOREVER else None


def _names(option: str, value: object) -> tuple[Name, ...]:
    number, given = whole(value), value
    if number is not None:
        given = (number,)
    elif isinstance(value, str):
        given = [part.strip() for part in value.split(",")]
    names: tuple[Name | None, ...] = ()
    # Iterating over bytes gives numbers.
    if isinstance(given, Iterable) and not isinstance(given, bytes | bytearray | memoryview):
        some = islice(given, MOST_GPUS + 1)
        names = tuple(one if isinstance(one, str) else whole(one) for one in some)
    if not 0 < len(names) <= MOST_GPUS or None in names or "" in names:
        expected = "GPUs by index, UUID or PCI address, such as [0, 2] or ['GPU-8f3c…']"
        raise InvalidOptionError(option, value, expected)
    return tuple(name for name in names if name is not None)


def _callback(option: str, value: object) -> object:
    if not callable(value):
        raise InvalidOptionError(option, value, "a function of one argument, or None")
    return value


_FLAGS = "pin", "own_is_free"
_READERS: Mapping[str, Callable[[str, object], object]] = {
    "gpus": _names,
    "candidates": _names,
    "min_free_memory": partial(options.count, least=0, most=2**63, expected="a number of bytes"),
    "max_utilization": partial(options.count, least=0, most=100, expected="percent, from 0 to 100"),
    "wait": _seconds,
    "visible": partial(options.word, words=VisibleAs, more=", or None"),
    "placeholder": lambda _, value: kind_of(value),
    "on_wait": _callback,
    **dict.fromkeys(_FLAGS, options.flag),
}


class Supply(NamedTuple):
    """What this process may choose from: what there is, and what limits the choice."""

    devices: tuple[Device, ...]  # all that can be claimed on this machine
    left_out: tuple[LeftOut, ...]  # what cannot, though CUDA may count it
    visible: str | None  # CUDA_VISIBLE_DEVICES
    device_order: str | None  # CUDA_DEVICE_ORDER
    granted: Granted
    parent: ParentClaim | None
    sharers: Ranks | None = None  # the ranks that divide the granted GPUs; None: only this one


def find_candidates(request: Request, supply: Supply) -> tuple[tuple[Device, ...], int, str]:
    """The devices that a claim may choose from, how many of them it takes, and why not from all.

    In order of their indices, or as ``gpus=`` names them. NotEnoughGpusError where there are few.
    """
    allowed, why = allowed_devices(supply)
    count = _count(request, allowed, supply, why)
    # Without names all whole GPUs, or all instances.
    chosen, found = tuple(one for one in allowed if not one.is_mig) or allowed, why
    if names := request.gpus or request.candidates:
        option = "gpus" if request.gpus else "candidates"
        chosen = named_devices(option, names, supply, count)
        found = f"{option}= names {len(chosen)}"
        hidden = [device for device in chosen if device not in allowed]
        if hidden:
            raise NotEnoughGpusError(count, 0, f"this process may not use {hidden[0]}: {why}")
    if request.count is None and supply.sharers is not None:
        own = slice_for_rank(supply.sharers, count)
        # Where the granted ones are unknown, any of the visible ones will do.
        chosen = chosen[own] if len(chosen) == count else chosen
        count = own.stop - own.start
    if count > 1 and any(device.is_mig for device in chosen):  # one instance, or whole GPUs
        chosen = tuple(device for device in chosen if not device.is_mig)
        found = "CUDA shows a process no more than one MIG instance"
    if len(chosen) < count:
        raise NotEnoughGpusError(count, len(chosen), found)
    narrowed, total = "", len(supply.devices)
    if request.candidates and len(chosen) < total:
        narrowed = f"candidates= allows {_counted(chosen)} of the {total} here"
    elif not request.gpus and len(allowed) < total:
        narrowed = found
    return chosen, count, narrowed


def allowed_devices(supply: Supply) -> tuple[tuple[Device, ...], str]:
    """The devices that this process may use, and why these."""
    # The variables count all that CUDA may show, also inside a claim of some.
    allowed, why = _granted(supply)
    why = "; ".join([why, *map(str, supply.left_out)])
    if supply.parent is None:
        return allowed, why
    claimed = supply.parent.uuids
    own = tuple(device for device in allowed if device.uuid in claimed)
    claim = f"the claim in which this process runs has {counted(len(claimed), 'GPU')}"
    is_all = len(own) == len(claimed)
    return own, claim if is_all else f"{claim}, of which it may use {len(own)}: {why}"


def _granted(supply: Supply) -> tuple[tuple[Device, ...], str]:
    devices, visible, granted = supply.devices, supply.visible, supply.granted
    everything, of_all = f"this machine has {_counted(devices)}", f"of the {len(devices)} here"
    if visible is not None or supply.device_order is not None:
        shown, notes = shown_by_cuda(supply)
        if visible is None and shown:
            return shown, everything
        reasons = [note.message for note in notes if note.code != "visible-lost"]
        if not shown and reasons:
            return shown, "; ".join(reasons)
        variable = f"CUDA_VISIBLE_DEVICES={str(visible)[:80]!r}"
        return shown, f"{variable} shows {_counted(shown)} {of_all}"
    if granted.indices is not None:
        found = tuple(device for device in devices if device.index in granted.indices)
        return found, f"{granted.source} grants {_counted(found)} {of_all}"
    return devices, everything


def _count(request: Request, allowed: Sequence[Device], supply: Supply, why: str) -> int:
    if request.count is not None:
        return request.count
    count, source = supply.granted.count, supply.granted.source
    if count == 0:
        raise NotEnoughGpusError(1, 0, f"{source} grants no GPUs")
    if count is not None:
        shown = supply.visible is not None and allowed  # the variable may show fewer
        return min(count, len(allowed)) if shown else count
    if supply.visible is None and supply.parent is None:
        expected = f"a number, since no scheduler says how many were granted ({source})"
        raise InvalidOptionError("n", "auto", expected)
    if not allowed:
        raise NotEnoughGpusError(1, 0, why)
    return len(allowed)


def slice_for_rank(ranks: Ranks, count: int) -> slice:
    """A rank's block of the GPUs that were granted to all ranks of the node, in CUDA's order."""
    if count < ranks.local_size:
        were = "was" if count == 1 else "were"
        why = (
            f"{count} {were} granted to the {ranks.local_size} ranks of this node\n  start fewer "
            "ranks; or claim once for all of them (gpuaff run -n auto -- torchrun ...); or, if it "
            "was granted for itself, say how many in each: claim_gpus(n)"
        )
        raise NotEnoughGpusError(ranks.local_size, count, why)
    each, more = divmod(count, ranks.local_size)
    first = ranks.local_rank * each + min(ranks.local_rank, more)
    return slice(first, first + each + (ranks.local_rank < more))


def unclaimable(devices: Sequence[Device]) -> dict[Device, str]:
    """The devices whose UUIDs identify none, as in a badly configured VM, and why."""
    counts, found = Counter(device.uuid for device in devices), {}
    for device in devices:
        uuid = ascii(device.uuid)[:80]
        if counts[device.uuid] > 1:
            found[device] = f"its UUID, {uuid}, is another one's as well"
        elif not is_uuid(device.uuid):
            found[device] = f"its UUID, {uuid}, is invalid"
    return found


def shown_by_cuda(supply: Supply) -> tuple[tuple[Device, ...], tuple[Notice, ...]]:
    """The devices that CUDA shows by the variables, in its order, and the notes about that."""
    gpus = []
    for index, group in groupby(supply.devices, key=lambda device: device.index):
        parts = [*group]
        uuid = parts[0].parent or parts[0].uuid
        names = [device.uuid for device in parts if device.is_mig]
        mig = tuple(MigInstance(uuid=n, gpu_instance=-1, compute_instance=-1) for n in names)
        gpus.append(Gpu(index=index, uuid=uuid, name=parts[0].name, mig=mig or None))
    known = {gpu.index for gpu in gpus}
    others = [one for one in supply.left_out if one.index not in known]
    gpus += [Gpu(index=one.index, mig=() if one.cut else None) for one in others]
    lost = [one.index for one in others if not one.cut]
    found = resolve(gpus, supply.visible, device_order=supply.device_order, lost=lost)
    wholes = {device.index: device for device in supply.devices if not device.is_mig}
    by_uuid = {device.uuid: device for device in supply.devices}
    pairs = zip(found.indices, found.instances, strict=True)
    shown = (wholes.get(index) if uuid is None else by_uuid[uuid] for index, uuid in pairs)
    return tuple(device for device in shown if device is not None), found.notes


def named_devices(
    option: str, names: Sequence[Name], supply: Supply, count: int = 1
) -> tuple[Device, ...]:
    """The devices of these names, in their order; ``count`` are requested."""
    found: list[Device] = []
    for name in names:
        fitting = _fitting(name, supply.devices)
        for one in supply.left_out:
            if not fitting and one.index == _index(name):
                raise NotEnoughGpusError(count, 0, str(one))
        if len(fitting) != 1:
            problem = "fits several of them" if fitting else "is none of them"
            there = [f"{one.index} ({one.uuid})" for one in supply.devices[:16]] or ["none"]
            known = "\n  ".join(["; ".join([problem, *map(str, supply.left_out)]), *there])
            expected = f"the index, UUID or PCI address of a GPU here; this {known}"
            raise InvalidOptionError(option, name, expected)
        if fitting[0] in found:
            expected = f"each GPU once ({fitting[0]} is there twice)"
            raise InvalidOptionError(option, list(names), expected)
        found += fitting
    return tuple(found)


def _index(name: Name) -> int | None:
    return name if isinstance(name, int) else natural(name.strip())


def _fitting(name: Name, devices: Sequence[Device]) -> list[Device]:
    number, wholes = _index(name), [device for device in devices if not device.is_mig]
    if number is not None:
        return [device for device in wholes if device.index == number]
    text = str(name).strip().lower()
    if text.startswith(("gpu-", "mig-")):
        return [device for device in devices if device.uuid.lower().startswith(text)]
    address = pci_address(text)
    return [device for device in wholes if address and device.pci_bus_id == address]


def _counted(devices: Sequence[Device]) -> str:
    instances = sum(device.is_mig for device in devices)
    kinds = (len(devices) - instances, "GPU"), (instances, "MIG instance")
    return " and ".join(counted(number, noun) for number, noun in kinds if number) or "no GPUs"
