"""What the CUDA driver makes of CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.

The rules were observed string by string, and have numbers, in ``tests/data/visible/observed.md``;
what only NVIDIA's documentation says, of MIG, stands there too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from gpuaff.formatting import one_line
from gpuaff.notices import Notice
from gpuaff.topology.model import Gpu

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    _Device: TypeAlias = tuple[int, str | None]
    """A GPU's index, and the UUID where it is one MIG instance of that GPU."""

_KINDS = ("GPU-", "MIG-")
_ORDERS = ("PCI_BUS_ID", "FASTEST_FIRST")
_BLANKS = " \t\n\v\f\r"
_NUMBER = re.compile(rf"[{_BLANKS}]*([+-]?)0*([0-9]+)")
_UUID = re.compile(r"(?:GPU|MIG)-([0-9a-fA-F-]*)")
_OLD_MIG = re.compile(r"MIG-GPU-([0-9a-fA-F-]+)/([0-9]{1,9})/([0-9]{1,9})")
_ULONG_MAX = 2**64 - 1
_NO_INSTANCE = "has MIG on and no instance"


class Visible(NamedTuple):
    """The CUDA devices of a process, in CUDA's order."""

    indices: tuple[int, ...]  # the physical index of each; of a MIG instance its GPU's (case D2)
    notes: tuple[Notice, ...] = ()  # what may surprise; their codes begin with ``visible-``
    instances: tuple[str | None, ...] = ()  # the UUID of the MIG instance that each is, or None


def resolve(
    gpus: Sequence[Gpu],
    text: str | None,
    *,
    device_order: str | None = None,
    lost: Collection[int] = (),
) -> Visible:
    """The CUDA devices of a process that may use these GPUs, as the driver finds them.

    Numbers count these GPUs: where a device cgroup denies GPU 0, CUDA's 0 is the next one. The
    ``lost`` ones do not respond: CUDA may count them or not; here they count, as in nvidia-smi.
    """
    ordered = sorted(gpus, key=lambda gpu: gpu.index)
    if not ordered:
        return Visible(())
    if device_order is not None and device_order not in _ORDERS:
        return _error(
            f"CUDA_DEVICE_ORDER={_quoted(device_order)} is not a word that CUDA knows",
            "set it to PCI_BUS_ID or unset it",
        )
    visible = _unset(ordered) if text is None else _listed(ordered, text)
    if not visible.indices or (text is not None and text.startswith(_KINDS)):
        return visible
    names = set() if device_order == "PCI_BUS_ID" else {gpu.name for gpu in ordered if gpu.name}
    return visible._replace(notes=(*visible.notes, *_number_notes(names, lost)))


def _unset(gpus: Sequence[Gpu]) -> Visible:
    """All GPUs; where there is a MIG instance, the first one alone."""
    devices = [device for device in map(_device_of, gpus) if device]
    devices = [device for device in devices if device[1]][:1] or devices
    hidden = {gpu.index for gpu in gpus}.difference(index for index, _ in devices)
    code = "visible-mig" if devices else "visible-none"
    message = (
        f"{_gpus(sorted(hidden))} not shown by CUDA: a GPU with MIG on and no instance is not a "
        "device, and beside a MIG instance CUDA shows nothing else; "
        "name the GPUs to use by UUID in CUDA_VISIBLE_DEVICES"
    )
    return _of(devices, *([Notice(code, message)] if hidden else ()))


def _listed(gpus: Sequence[Gpu], text: str) -> Visible:
    """The devices that a list names, up to its end (rules 1, 2 and 5)."""
    find = _by_uuid if text.startswith(_KINDS) else _by_number
    devices: list[_Device] = []
    # No list holds more distinct devices than there are GPUs: one more element settles it.
    for element in text.split(",", len(gpus) + 1):
        found = find(gpus, element)
        if isinstance(found, str):
            return _ended(text, devices, element, found)
        if found in devices:
            twice = f"CUDA_VISIBLE_DEVICES={_quoted(text)} names GPU {found[0]} twice"
            return _error(twice, "name it once")
        if devices and (found[1] or devices[0][1]):
            return _ended(text, devices, element, "CUDA does not show beside a MIG instance")
        devices.append(found)
    return _of(devices)


def _of(devices: Sequence[_Device], *notes: Notice) -> Visible:
    indices = tuple(index for index, _ in devices)
    return Visible(indices, notes, tuple(instance for _, instance in devices))


def _by_number(gpus: Sequence[Gpu], element: str) -> _Device | str:
    """The device that an element names by number (rule 3), or why it names none."""
    match = _NUMBER.match(element)
    if match is None:
        return "is not a number"
    sign, digits = match.groups()
    value = int(digits[:21])  # 21 digits are above 64 bits, however many follow
    # strtoul saturates whatever the sign is.
    value = -value if sign == "-" and value <= _ULONG_MAX else min(value, _ULONG_MAX)
    number = value & 0xFFFFFFFF
    if number >= len(gpus):
        return "is not the number of a GPU here"
    return _device_of(gpus[number]) or _NO_INSTANCE


def _by_uuid(gpus: Sequence[Gpu], element: str) -> _Device | str:
    """The device that an element names by UUID (rules 4 and 6), or why it names none."""
    found: list[_Device | None]
    old, match = _OLD_MIG.match(element), _UUID.match(element)
    if old is not None:
        place = int(old[2]), int(old[3])
        found = [
            (gpu.index, one.uuid)
            for gpu in gpus
            if gpu.uuid and _digits(gpu.uuid).startswith(_digits(old[1]))
            for one in gpu.mig or ()
            if (one.gpu_instance, one.compute_instance) == place
        ]
    elif match is None:
        return "is not a UUID, as the first element is"
    else:
        digits = _digits(match[1])
        if not match[1] or (len(digits) < 32 and match.end() < len(element)):
            return "is not a UUID"
        found = [device for uuid, device in _named(gpus, element[:3]) if uuid.startswith(digits)]
    if len(found) == 1:
        return found[0] or _NO_INSTANCE
    if found:
        return f"fits {len(found)} devices"
    if any(gpu.uuid is None for gpu in gpus):
        return "cannot be looked up: the UUIDs of these GPUs are not known"
    return "is not a device here"


def _named(gpus: Sequence[Gpu], kind: str) -> list[tuple[str, _Device | None]]:
    """The digits of the UUIDs of a kind (``GPU`` or ``MIG``), and what they name (rule 6)."""
    names = [(gpu.uuid, _device_of(gpu)) for gpu in gpus if kind == "GPU" or gpu.mig is None]
    if kind == "MIG":
        names += [(one.uuid, (gpu.index, one.uuid)) for gpu in gpus for one in gpu.mig or ()]
    return [(_digits(uuid), device) for uuid, device in names if uuid]


def _device_of(gpu: Gpu) -> _Device | None:
    """What a GPU that is named as a whole stands for; None when it is no device."""
    if gpu.mig is None:
        return gpu.index, None
    return (gpu.index, gpu.mig[0].uuid) if gpu.mig else None


def _digits(uuid: str) -> str:
    """The hexadecimal digits of a UUID, at most 32, without its prefix."""
    return re.sub(r"^(?:GPU|MIG)-|-", "", uuid).lower()[:32]


def _error(problem: str, remedy: str) -> Visible:
    """No device at all: CUDA itself fails to start (rules 2 and 8)."""
    message = f"{problem}: CUDA fails with error 101 and shows no GPU; {remedy}"
    return Visible((), (Notice("visible-error", message),))


def _ended(text: str, devices: Sequence[_Device], element: str, reason: str) -> Visible:
    """The devices before the element that ended the list, and why it did."""
    start = f"CUDA_VISIBLE_DEVICES={_quoted(text)}"
    if not devices:
        why = f"{_quoted(element)} {reason}" if text.strip(_BLANKS) else "it is empty"
        message = f"{start} hides all GPUs: {why}; unset it, or name the GPUs to use"
        return Visible((), (Notice("visible-none", message),))
    if not text.split(",", len(devices))[-1].strip(f",{_BLANKS}"):
        return _of(devices)  # a comma at the end hides nothing
    why = f"{_quoted(element)}, which {reason}"
    shown = _gpus([index for index, _ in devices])
    message = f"{start} ends at {why}: only {shown} visible; correct or remove it"
    return _of(devices, Notice("visible-ends", message))


def _number_notes(names: Collection[str], lost: Collection[int]) -> Iterator[Notice]:
    """Where CUDA's numbers may differ from NVML's: unlike GPUs (case D6), and lost ones."""
    unlike = sorted({" ".join(name.split()) for name in names})
    if len(unlike) > 1:
        yield Notice(
            "visible-order",
            f"the GPUs are unlike ({', '.join(unlike)}) and CUDA_DEVICE_ORDER is not PCI_BUS_ID: "
            "CUDA's numbers may differ from NVML's, by which they are read here; "
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID or name the GPUs by UUID",
        )
    if lost:  # schedulers and users write numbers as nvidia-smi counts
        yield Notice(
            "visible-lost",
            f"{_gpus(sorted(lost))} lost, and CUDA may count it or not: CUDA's numbers are read "
            "here as nvidia-smi numbers the GPUs; name the GPUs by UUID in CUDA_VISIBLE_DEVICES",
        )


def _gpus(indices: Sequence[int]) -> str:
    """``GPU 3 is`` or ``GPUs 1, 3 are``."""
    numbers = ", ".join(map(str, indices))
    return f"GPU {numbers} is" if len(indices) == 1 else f"GPUs {numbers} are"


def _quoted(text: str) -> str:
    return one_line(repr(text[:100]), 62, end="...")
