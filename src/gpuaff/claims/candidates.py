"""Which devices a claim may choose from, by its arguments and by what limits this process.

Pure: their use is looked at elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import islice
from typing import NamedTuple

from gpuaff import options
from gpuaff._system.nvml_records import pci_address
from gpuaff.claims.model import Device, LeftOut
from gpuaff.errors import InvalidOptionError, NotEnoughGpusError
from gpuaff.formatting import counted
from gpuaff.launch.inherited import ParentClaim, is_uuid
from gpuaff.launch.ranks import Ranks
from gpuaff.options import MOST_GPUS, natural, suggestion, whole
from gpuaff.topology.model import Gpu, MigInstance
from gpuaff.topology.visible import Visible, resolve

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeAlias

    from gpuaff.launch.allocation import Granted

Name: TypeAlias = "int | str"
"""A device: NVML's index, a UUID or the beginning of one, or a PCI address."""

_FOREVER = 1e9
"""Seconds (31 years): a longer wait has no limit."""

_EXPECTED_COUNT = f'a number of GPUs from 1 to {MOST_GPUS}, or "auto": as many as were granted'


class VisibleAs(str, Enum):
    """How CUDA_VISIBLE_DEVICES is written."""

    INDEX = "index"
    """Numbers, in the order of PCI addresses, with CUDA_DEVICE_ORDER=PCI_BUS_ID (case D6)."""
    UUID = "uuid"
    """UUIDs, as MIG instances always are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The arguments of ``claim_gpus`` that say which GPUs it requests.

    A ``count`` of None is as many as the scheduler has granted; a ``wait`` of None has no limit.
    """

    count: int | None
    gpus: tuple[Name, ...] | None = None
    candidates: tuple[Name, ...] | None = None
    min_free_memory: int | None = None
    max_utilization: int | None = None
    wait: float | None = 0.0
    visible: VisibleAs | None = VisibleAs.INDEX


def parse_request(n: object, **arguments: object) -> Request:
    """Check the arguments of ``claim_gpus`` that a :class:`Request` has.

    Raises:
        InvalidOptionError: one of them is invalid.
    """
    checked: dict[str, Any] = {
        name: None if value is None else _READERS[name](name, value)
        for name, value in arguments.items()
    }
    count = None
    if not (isinstance(n, str) and n == "auto"):
        count = options.count("n", n, most=MOST_GPUS, expected=_EXPECTED_COUNT)
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


def _visible_as(option: str, value: object) -> VisibleAs:
    words = [word.value for word in VisibleAs]
    if isinstance(value, str) and value in words:
        return VisibleAs(value)
    hint = suggestion(value, words) if isinstance(value, str) else ""
    raise InvalidOptionError(option, value, f"one of {', '.join(words)}, or None{hint}")


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


_READERS: Mapping[str, Callable[[str, object], object]] = {
    "gpus": _names,
    "candidates": _names,
    "min_free_memory": partial(options.count, least=0, most=2**63, expected="a number of bytes"),
    "max_utilization": partial(options.count, least=0, most=100, expected="percent, from 0 to 100"),
    "wait": _seconds,
    "visible": _visible_as,
}


class Limits(NamedTuple):
    """What limits the choice of this process: environment, scheduler, parent claim.

    Attributes:
        visible: CUDA_VISIBLE_DEVICES.
        device_order: CUDA_DEVICE_ORDER.
        left_out: the GPUs that cannot be claimed and that CUDA may count.
        sharers: the ranks that divide the granted GPUs, with this rank among them; None where all
            are this process's.
    """

    visible: str | None
    device_order: str | None
    granted: Granted
    parent: ParentClaim | None
    left_out: Sequence[LeftOut]
    sharers: Ranks | None = None


class Candidates(NamedTuple):
    """The devices that a claim may choose ``wanted`` from, by index, or as ``gpus=`` names them.

    ``narrowed`` says why these are not all of the machine's; it is empty when they are, or when
    exactly these were requested.
    """

    devices: tuple[Device, ...]
    wanted: int
    narrowed: str


def find_candidates(devices: Sequence[Device], request: Request, limits: Limits) -> Candidates:
    """Find the devices that a claim may choose from, of all that NVML shows.

    Raises:
        InvalidOptionError: a name fits no device, or several, or the same as another name; or
            ``auto`` where it is not known how many GPUs were granted.
        NotEnoughGpusError: there are fewer than requested: waiting would not help.
    """
    allowed, why = allowed_devices(devices, limits)
    count = _count(request, allowed, limits, why)
    chosen, found = _named(devices, allowed, why, request, limits, count)
    bad = unclaimable(devices)
    chosen, found = _identified(chosen, found, count, bad)
    if request.count is None and limits.sharers is not None:
        own = slice_for_rank(limits.sharers, count)
        # Where the granted ones are unknown, any of the visible ones will do.
        chosen = chosen[own] if len(chosen) == count else chosen
        count = own.stop - own.start
    chosen = _without_instances(chosen, count)
    if len(chosen) < count:
        raise NotEnoughGpusError(count, len(chosen), found)
    narrowed = ""
    if request.candidates and len(chosen) < len(devices):
        narrowed = f"candidates= allows {_counted(chosen)} of the {len(devices)} here"
    elif not request.gpus and (bad or len(allowed) < len(devices)):
        narrowed = found
    return Candidates(chosen, count, narrowed)


def _named(
    devices: Sequence[Device],
    allowed: tuple[Device, ...],
    why: str,
    request: Request,
    limits: Limits,
    count: int,
) -> tuple[tuple[Device, ...], str]:
    """The devices that are named, else all whole GPUs, or all instances; and why no others."""
    names, option = request.gpus or request.candidates, "gpus" if request.gpus else "candidates"
    if not names:
        return tuple(device for device in allowed if not device.is_mig) or allowed, why
    here = {device.index for device in devices}
    for one in limits.left_out:
        if one.index not in here and one.index in map(_index, names):
            raise NotEnoughGpusError(count, 0, str(one))
    found = named_devices(option, names, devices, limits.left_out)
    for device in found:
        if device not in allowed:
            raise NotEnoughGpusError(count, 0, f"this process may not use {device}: {why}")
    return found, f"{option}= names {len(found)}"


def _identified(
    devices: tuple[Device, ...], found: str, count: int, bad: Mapping[Device, str]
) -> tuple[tuple[Device, ...], str]:
    good = tuple(device for device in devices if device not in bad)
    if len(good) == len(devices):
        return devices, found
    why = [bad[device] for device in devices if device in bad]
    found = (
        f"{found}, of which {len(good) or 'none'} can be claimed; see nvidia-smi -L, and how they "
        "are passed through to a VM"
    )
    found = "\n  ".join((found, *dict.fromkeys(why)))
    if len(good) < count:
        raise NotEnoughGpusError(count, len(good), found)
    return good, found


def _without_instances(chosen: tuple[Device, ...], count: int) -> tuple[Device, ...]:
    """One MIG instance, or several whole GPUs."""
    gpus = tuple(device for device in chosen if not device.is_mig)
    if count == 1 or len(gpus) == len(chosen):
        return chosen
    if len(gpus) < count:
        why = "CUDA shows a process no more than one MIG instance"
        raise NotEnoughGpusError(count, 1, why)
    return gpus


def allowed_devices(devices: Sequence[Device], limits: Limits) -> tuple[tuple[Device, ...], str]:
    """The devices that the limits allow this process, and why these.

    The variables count all that CUDA may show, also inside a claim of some.
    """
    allowed, why = _granted(devices, limits)
    why = "; ".join([why, *map(str, limits.left_out)])
    if limits.parent is None:
        return allowed, why
    claimed = limits.parent.uuids
    own = tuple(device for device in allowed if device.uuid in claimed)
    claim = f"the claim in which this process runs has {counted(len(claimed), 'GPU')}"
    is_all = len(own) == len(claimed)
    return own, claim if is_all else f"{claim}, of which it may use {len(own)}: {why}"


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
    indices, source = limits.granted.indices, limits.granted.source
    if indices is not None:
        granted = tuple(device for device in devices if device.index in indices)
        return granted, f"{source} grants {_counted(granted)} of the {len(devices)} here"
    return tuple(devices), everything


def _count(request: Request, allowed: Sequence[Device], limits: Limits, why: str) -> int:
    if request.count is not None:
        return request.count
    count, source = limits.granted.count, limits.granted.source
    if count == 0:
        raise NotEnoughGpusError(1, 0, f"{source} grants no GPUs")
    if count is not None:
        shown = limits.visible is not None and allowed  # the variable may show fewer
        return min(count, len(allowed)) if shown else count
    if limits.visible is None and limits.parent is None:
        expected = f"a number, since no scheduler says how many were granted ({source})"
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
            "this node, and each needs its own\n  start fewer ranks; or claim once for all of them "
            "(gpuaff run -n auto -- torchrun ...), and nothing in the ranks; or say how many each "
            "rank was granted for itself: claim_gpus(n)",
        )
    # In blocks, not by turns, so that a rank's GPUs are neighbours.
    each, more = divmod(count, ranks.local_size)
    first = ranks.local_rank * each + min(ranks.local_rank, more)
    return slice(first, first + each + (ranks.local_rank < more))


def unclaimable(devices: Sequence[Device]) -> dict[Device, str]:
    """The devices whose UUIDs identify none, as in a badly configured VM, and why."""
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
    by_index: dict[int, list[Device]] = {}
    for device in devices:
        by_index.setdefault(device.index, []).append(device)
    gpus = [_gpu(by_index[index]) for index in sorted(by_index)]
    gpus += [
        Gpu(index=one.index, mig=() if one.cut else None)
        for one in limits.left_out
        if one.index not in by_index
    ]
    lost = frozenset(one.index for one in limits.left_out if not one.cut)
    return resolve(gpus, limits.visible, device_order=limits.device_order, lost=lost)


def _gpu(devices: Sequence[Device]) -> Gpu:
    """A GPU, with its MIG instances if these are what can be claimed of it."""
    first = devices[0]
    return Gpu(
        index=first.index,
        uuid=first.parent or first.uuid,
        pci_bus_id=first.pci_bus_id,
        name=first.name,
        mig=tuple(
            MigInstance(uuid=one.uuid, gpu_instance=-1, compute_instance=-1) for one in devices
        )
        if first.is_mig
        else None,
    )


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
            problem = "fits several of them" if fitting else "is none of them"
            there = [f"{device.index} ({device.uuid})" for device in devices[:16]] or ["none"]
            raise InvalidOptionError(
                option,
                name,
                "the index, UUID or PCI address of a GPU here; this "
                + "\n  ".join(["; ".join([problem, *map(str, left_out)]), *there]),
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
    kinds = (len(devices) - instances, "GPU"), (instances, "MIG instance")
    return " and ".join(counted(number, noun) for number, noun in kinds if number) or "no GPUs"
