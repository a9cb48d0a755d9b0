"""What the driver says about the use of GPUs and MIG instances, as records."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from gpuaff._system.nvml_calls import Code, Questions, address_of, text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpuaff._system.nvml_links import Matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What can be claimed: a whole GPU, or one MIG instance of a GPU.

    Attributes:
        index: NVML's index of the GPU, or of the GPU that the instance is part of.
        uuid: ``GPU-…`` or ``MIG-…``.
        pci_bus_id: the GPU's PCI address as sysfs spells it, ``0000:07:00.0``; None when unknown.
        name: the product name.
        parent: for a MIG instance, the UUID of its GPU.
        gpu_instance: for a MIG instance, the GPU instance that it is part of. All parts of one
            have the same memory.
    """

    index: int
    uuid: str
    pci_bus_id: str | None = None
    name: str | None = None
    parent: str | None = None
    gpu_instance: int | None = None

    @property
    def is_mig(self) -> bool:
        """Whether it is a MIG instance."""
        return self.parent is not None

    def __str__(self) -> str:
        return f"MIG instance {self.uuid}" if self.is_mig else f"GPU {self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A GPU that NVML counts and that cannot be claimed, though this process may use it.

    Attributes:
        index: NVML's index.
        why: what failed, in words.
        cut: whether it is in MIG mode and has no instance; else it does not respond.
    """

    index: int
    why: str
    cut: bool = False

    def __str__(self) -> str:
        return f"GPU {self.index} is left out: {self.why}"


class ComputeMode(str, Enum):
    """Who may have a context on a GPU (``nvmlComputeMode_t``; cases E13, E16)."""

    DEFAULT = "default"
    EXCLUSIVE_THREAD = "exclusive_thread"
    PROHIBITED = "prohibited"
    EXCLUSIVE_PROCESS = "exclusive_process"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReading:
    """What the driver says about the use of a device; None is what it does not say.

    Attributes:
        device: which one.
        compute: the processes with a context and the bytes that each has (None: not told).
        graphics: the processes that draw, likewise. A process may be in both.
        used: bytes in use, without what the driver keeps for itself.
        free: bytes that are free.
        total: bytes that there are.
        utilization: how busy it was lately, in percent.
        compute_mode: who may have a context on it.
        display: whether a screen is driven by it.
        denied: whether this process may not use it at all (a device cgroup).
        lost: whether it has fallen off the bus, or was lost in another way.
        problems: what failed, in words.
    """

    device: Device
    compute: Mapping[int, int | None] | None = None
    graphics: Mapping[int, int | None] | None = None
    used: int | None = None
    free: int | None = None
    total: int | None = None
    utilization: int | None = None
    compute_mode: ComputeMode | None = None
    display: bool | None = None
    denied: bool = False
    lost: bool = False
    problems: tuple[str, ...] = ()


# Which processes compute on a GPU, as the driver tells it.
#
# The numbers are process ids of the first PID namespace, or of the driver's choice: inside a
# container they may mean nothing, or another process (case E15). Only the caller can tell.


COMPUTE = "nvmlDeviceGetComputeRunningProcesses"
GRAPHICS = "nvmlDeviceGetGraphicsRunningProcesses"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUsers:
    """Who computes on one GPU.

    Attributes:
        index: NVML's index.
        pids: the processes with a CUDA context; None when the driver does not tell.
        problems: what failed, in words.
    """

    index: int
    pids: frozenset[int] | None
    problems: tuple[str, ...] = ()


def read_users(nvml: Any, index: int) -> GpuUsers:
    """Ask about the GPU of this index."""
    gpu = Questions.about(nvml, index)
    pids = _pids(gpu, gpu.handle)
    if pids is None:  # with MIG only root is told about the whole GPU
        parts = [_pids(gpu, handle) for handle in instances_of(gpu)]
        told = [part for part in parts if part is not None]
        pids = frozenset[int]().union(*told) if told else None
    return GpuUsers(index=index, pids=pids, problems=tuple(gpu.problems) if pids is None else ())


def _pids(gpu: Questions, handle: Any) -> frozenset[int] | None:
    found = processes_on(gpu, handle, "its processes", COMPUTE)
    return None if found is None else frozenset(int(process.pid) for process in found)


def processes_on(
    gpu: Questions, handle: Any, what: str, function: str, *, fine: Collection[int] = ()
) -> Any:
    """The processes on a GPU or a MIG instance.

    The newest function is asked first. The name without a version will not do: pynvml refuses it
    when the driver is older.

    Args:
        gpu: the GPU.
        handle: the GPU's, or the instance's.
        what: what is asked for, in words.
        function: COMPUTE or GRAPHICS.
        fine: the codes that are no problem.

    Returns:
        pynvml's list of them; None when the driver does not tell.
    """
    missing = (*fine, Code.FUNCTION_NOT_FOUND)
    found = gpu.ask_of(handle, what, f"{function}_v3", fine=missing)
    if gpu.code == Code.FUNCTION_NOT_FOUND:
        return gpu.ask_of(handle, what, f"{function}_v2", fine=fine)
    return found


def instances_of(gpu: Questions) -> Iterator[Any]:
    """The handles of a GPU's MIG instances, by slot."""
    slots = gpu.ask("MIG slots", "nvmlDeviceGetMaxMigDeviceCount", fine=(Code.NOT_SUPPORTED,))
    for slot in range(slots or 0):
        empty = (Code.NOT_FOUND,)
        handle = gpu.ask("MIG instances", "nvmlDeviceGetMigDeviceHandleByIndex", slot, fine=empty)
        if handle is not None:
            yield handle


# How GPUs and MIG instances are used, as the driver tells it.
#
# Looking makes no CUDA context, so it is no use itself. It is done often: what does not change is
# asked once, and of the rest only what is needed. The process ids are those of the first PID
# namespace, or of the driver's choice (case E15).


_MIG_ON = 1
"""NVML_DEVICE_MIG_ENABLE."""

_MODES = tuple(ComputeMode)
"""By their numbers in ``nvmlComputeMode_t``."""

_MEMORY_V2 = 0x02000028
"""nvmlMemory_v2: the version, and the size of the struct."""

_RATES = ("utilization", "nvmlDeviceGetUtilizationRates")

_HAS_NONE = (Code.NOT_SUPPORTED, Code.FUNCTION_NOT_FOUND)
"""What GPUs and drivers without MIG answer when they are asked about it."""

_NOT_OF_MIG = (Code.NOT_SUPPORTED, Code.INVALID_ARGUMENT)
"""What an instance answers to a question that is only for whole GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A device, and whom to ask about it."""

    device: Device
    gpu: Questions
    handle: Any


class UsageSession:
    """Looks at devices while NVML is started: see :func:`gpuaff._system.nvml.usage_session`.

    Attributes:
        notes: which GPUs are left out, and what else failed before the first look, in words.
    """

    def __init__(self, nvml: Any, count: int) -> None:
        self.notes: tuple[str, ...] = ()
        self._left_out: dict[int, LeftOut] = {}
        self._places = tuple(place for index in range(count) for place in self._found(nvml, index))
        self._lost: dict[int, tuple[str, ...]] = {}

    def devices(self) -> tuple[Device, ...]:
        """All that can be claimed, as the driver counts: GPUs, and MIG instances of cut ones.

        A GPU without a handle (a device cgroup denies it, or it is lost) or UUID is not among
        them: a note says so.
        """
        return tuple(place.device for place in self._places)

    def left_out(self) -> tuple[LeftOut, ...]:
        """The GPUs that CUDA may count or not: lost, without UUID, in MIG mode without instance.

        One that is lost after the start is among them from then on. One that a device cgroup denies
        is not: CUDA does not count it.
        """
        lost = {place.device.index: place.gpu for place in self._places if place.gpu.lost}
        for index, gpu in lost.items():
            why = "; ".join(self._lost.get(index) or gpu.problems) or "the driver has lost it"
            self._left_out[index] = LeftOut(index=index, why=why)
        return tuple(self._left_out[index] for index in sorted(self._left_out))

    def look(self, *, utilization: bool = False) -> tuple[DeviceReading, ...]:
        """Read how each device is used now, in the order of :meth:`devices`.

        What fails is None there, and a problem says so (case F1). A lost GPU is not asked again.

        Args:
            utilization: also read how hard each GPU works; the driver knows it of no instance.
        """
        modes: dict[int, ComputeMode | None] = {}
        return tuple(self._read(place, utilization, modes) for place in self._places)

    def links(self) -> tuple[tuple[int, ...], Matrix | None]:
        """How the GPUs are connected, in nvidia-smi's words.

        Returns:
            The GPUs' indices, and a row for each in that order; None when nothing is known.
        """
        from gpuaff._system.nvml_links import read_links

        gpus = {place.device.index: place for place in self._places}
        asked = [place.gpu for place in gpus.values()]
        return tuple(gpus), read_links(asked, [one.device.pci_bus_id for one in gpus.values()])

    def _found(self, nvml: Any, index: int) -> Iterator[_Place]:
        gpu = Questions.about(nvml, index)
        uuid = text(gpu.ask("UUID", "nvmlDeviceGetUUID"))
        if uuid is None:
            why = "; ".join(gpu.problems)
            self.notes += (f"GPU {index} is left out, as it cannot be told which one it is: {why}",)
            if not gpu.denied:
                self._left_out[index] = LeftOut(index=index, why=why)
            return
        name = text(gpu.ask("name", "nvmlDeviceGetName"))
        whole = Device(index=index, uuid=uuid, pci_bus_id=address_of(gpu), name=name)
        modes = gpu.ask("MIG mode", "nvmlDeviceGetMigMode", fine=_HAS_NONE)
        if modes is None or modes[0] != _MIG_ON:
            yield _Place(device=whole, gpu=gpu, handle=gpu.handle)
        else:
            parts = tuple(_instances(gpu, whole))
            if not parts:
                self._left_out[index] = LeftOut(index=index, why=gpu.problems[-1], cut=True)
            yield from parts
        self.notes += tuple(f"GPU {index}: {problem}" for problem in gpu.problems)

    def _read(
        self, place: _Place, utilization: bool, modes: dict[int, ComputeMode | None]
    ) -> DeviceReading:
        device, gpu = place.device, place.gpu
        if device.index not in self._lost:
            gpu.problems.clear()
            if device.index not in modes:
                modes[device.index] = _mode(gpu)
            reading = _reading(place, modes[device.index], utilization)
            if not gpu.lost:
                return reading
            self._lost[device.index] = tuple(gpu.problems[-1:])
        return DeviceReading(device=device, lost=True, problems=self._lost[device.index])


def _instances(gpu: Questions, whole: Device) -> Iterator[_Place]:
    """The MIG instances of a GPU; those that do not tell their UUID are left out."""
    found = 0
    for handle in instances_of(gpu):
        uuid = text(gpu.ask_of(handle, "UUID of a MIG instance", "nvmlDeviceGetUUID"))
        part = gpu.ask_of(handle, "id of a MIG instance", "nvmlDeviceGetGpuInstanceId")
        if uuid is not None:
            found += 1
            device = Device(
                index=whole.index,
                uuid=uuid,
                pci_bus_id=whole.pci_bus_id,
                name=whole.name,
                parent=whole.uuid,
                gpu_instance=part,
            )
            yield _Place(device=device, gpu=gpu, handle=handle)
    if not found:
        gpu.keep("it is in MIG mode and has no instance, so there is nothing to claim")


def _reading(place: _Place, mode: ComputeMode | None, utilization: bool) -> DeviceReading:
    """Processes before memory: whoever ends in between is listed, and no riddle."""
    device, gpu, handle = place.device, place.gpu, place.handle
    no_screens = _NOT_OF_MIG if device.is_mig else ()
    compute = processes_on(gpu, handle, "its processes", COMPUTE)
    graphics = processes_on(gpu, handle, "its graphics", GRAPHICS, fine=no_screens)
    used, free, total = _memory(gpu, handle)
    whole = not device.is_mig
    rates = gpu.ask(*_RATES) if utilization and whole else None
    display = gpu.ask("display", "nvmlDeviceGetDisplayActive") if whole else None
    return DeviceReading(
        device=device,
        compute=_by_pid(compute),
        graphics=_by_pid(graphics),
        used=used,
        free=free,
        total=total,
        utilization=None if rates is None else int(rates.gpu),
        compute_mode=mode,
        display=None if display is None else bool(display),
        problems=tuple(gpu.problems),
    )


def _by_pid(processes: Any) -> dict[int, int | None] | None:
    """The bytes of each process, where they are told; one may be listed for each of its parts."""
    if processes is None:
        return None
    held: dict[int, int | None] = {}
    for process in processes:
        pid, more = int(process.pid), process.usedGpuMemory
        before = held.get(pid, 0)
        held[pid] = None if before is None or more is None else before + int(more)
    return held


def _memory(gpu: Questions, handle: Any) -> tuple[int | None, int | None, int | None]:
    """Bytes in use, free and in all; None for each that is not told.

    Only the second version leaves out what the driver keeps for itself (480 MiB of an idle H100).
    Without it the bytes in use say nothing, and what is free is still true.
    """
    what = "memory in use"
    memory = gpu.ask_of(handle, what, "nvmlDeviceGetMemoryInfo", _MEMORY_V2)
    if memory is not None:
        return int(memory.used), int(memory.free), int(memory.total)
    older = gpu.ask_of(handle, "memory", "nvmlDeviceGetMemoryInfo")
    if older is None:
        return None, None, None
    gpu.keep(f"{what}: this driver adds what it keeps for itself, so that the number says nothing")
    return None, int(older.free), int(older.total)


def _mode(gpu: Questions) -> ComputeMode | None:
    number = gpu.ask("compute mode", "nvmlDeviceGetComputeMode")
    return _MODES[number] if number is not None and 0 <= number < len(_MODES) else None
