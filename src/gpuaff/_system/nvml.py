"""NVML, the driver's management library: the only module that imports pynvml.

NVML is started late and shut down after use. It counts its starts, so a program that uses pynvml
itself notices nothing. Each of its functions may be unsupported, missing or fail on its own: then
its value is None, a problem says so, and everything else is still read (case F1).
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations

from gpuaff._system.interrupts import uninterrupted
from gpuaff._system.nvml_records import (
    ComputeMode,
    Device,
    DeviceReading,
    GpuReading,
    LeftOut,
    Matrix,
    MigInstance,
    pci_address,
)
from gpuaff.cpuset import from_bits
from gpuaff.errors import NoDriverError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MOST_GPUS = 1024  # a broken library may report billions
_CPU_WORDS, _NODE_WORDS = 1024, 16  # 65536 CPUs and 1024 NUMA nodes: more than Linux can have
_MEMORY_V2 = 0x02000028  # nvmlMemory_v2: the version, and the size of the struct
_MOST_NVLINKS = 36  # NVML_NVLINK_MAX_LINKS of the newest driver; older ones refuse the higher ones

_SCOPE_NODE, _SCOPE_SOCKET = 0, 1  # NVML_AFFINITY_SCOPE_…
_MIG_ENABLED = 1  # NVML_DEVICE_MIG_ENABLE
_PEER_GPU, _PEER_SWITCH = 0, 2  # NVML_NVLINK_DEVICE_TYPE_…: what is at a link's other end
_COMPUTE_MODES = dict(enumerate(ComputeMode))  # nvmlComputeMode_t

# nvidia-smi's words for nvmlGpuTopologyLevel_t; 0 is two GPUs on one board.
_PATHS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_UNKNOWN_LINK = "N/A"
_TO_SWITCH = "switch"  # in place of a PCI address: the links to switches
_NO_INSTANCE = "it is in MIG mode and has no instance, so there is nothing to claim"

# nvmlReturn_t
_INVALID_ARGUMENT, _NOT_SUPPORTED, _NO_PERMISSION, _NOT_FOUND = 2, 3, 4, 6
_FUNCTION_NOT_FOUND, _GPU_IS_LOST, _UNKNOWN = 13, 15, 999

# No problem: what GPUs and drivers without a feature answer; and about links that a GPU does not
# have, and of MIG instances about graphics.
_ABSENT, _NO_SUCH = (_NOT_SUPPORTED, _FUNCTION_NOT_FOUND), (_NOT_SUPPORTED, _INVALID_ARGUMENT)


@contextmanager
def open_session() -> Iterator[Session]:
    """Start NVML for a block, and find its GPUs; NoDriverError where it cannot be used."""
    nvml, code = _import_pynvml(), None
    try:
        with uninterrupted():  # Ctrl-C inside would leave pynvml's own lock locked
            _, code = _call(nvml, "nvmlInit")
        count, failed = (0, code) if code else _call(nvml, "nvmlDeviceGetCount")
        if failed:
            raise _no_driver(nvml, failed)
        yield Session(nvml, min(count, _MOST_GPUS))
    finally:
        if code == 0:
            with uninterrupted():
                _call(nvml, "nvmlShutdown")


class Session:
    """NVML while it is started; looking makes no CUDA context. See :func:`open_session`."""

    def __init__(self, nvml: Any, count: int) -> None:
        self._gpus = [_Gpu(nvml, index) for index in range(count)]
        self._devices = [(*found, gpu) for gpu in self._gpus for found in gpu.devices()]
        # Which GPUs cannot be claimed, and what else failed at the start, in words.
        self.notes = tuple(note for gpu in self._gpus for note in gpu.notes())

    def read_gpus(self, *, links: bool = False) -> tuple[tuple[GpuReading, ...], Matrix | None]:
        """Read where all GPUs are, by NVML's index, and with ``links`` how they are connected."""
        matrix = _links(self._gpus) if links else None
        return tuple(gpu.read() for gpu in self._gpus), matrix

    def devices(self) -> tuple[Device, ...]:
        """All that can be claimed: GPUs, and MIG instances of those in MIG mode."""
        return tuple(device for device, _, _ in self._devices)

    def left_out(self) -> tuple[LeftOut, ...]:
        """The GPUs that CUDA may count or not: lost, without UUID, in MIG mode without instance."""
        # One that is lost after the start is among them from then on. One that a device cgroup
        # denies is not, since CUDA does not count it.
        found = (gpu.left_out() for gpu in self._gpus)
        return tuple(one for one in found if one is not None)

    # Not by nvidia-smi, which is a process and 60 ms more, and whose text changes with the driver.
    # This is a few calls a GPU, less than 1 ms.
    def look(self, *, utilization: bool = False) -> tuple[DeviceReading, ...]:
        """Read how each device is used now, in the order of :meth:`devices`."""
        return tuple(gpu.usage(*found, utilization=utilization) for *found, gpu in self._devices)

    def links(self) -> tuple[tuple[int, ...], Matrix | None]:
        """The indices of the GPUs that can be claimed, and how these are connected, if known."""
        gpus = {gpu.index: gpu for _, _, gpu in self._devices}
        return tuple(gpus), _links([*gpus.values()])


class _Gpu:
    """One GPU: queries NVML about it, and keeps what failed, in words."""

    # One that is lost (it has fallen off the bus, or has no handle) is not queried again, since the
    # answer would be the same and may take long. ``code`` is NVML's of the last query.

    def __init__(self, nvml: Any, index: int) -> None:
        self._nvml = nvml
        self.index, self.problems, self.lost, self.code = index, list[str](), False, 0
        self.handle = self.query("its handle", "nvmlDeviceGetHandleByIndex", of=index)
        self.lost = self.handle is None
        self.denied = self.code == _NO_PERMISSION
        # What does not change.
        self.uuid = self.query("UUID", "nvmlDeviceGetUUID")
        self.name = self.query("name", "nvmlDeviceGetName")
        pci = self.query("PCI address", "nvmlDeviceGetPciInfo")
        self.pci_bus_id = None if pci is None else pci_address(pci.busId)
        before = len(self.problems)
        self._instances = self._mig_instances()
        mig = tuple(instance for instance, _ in self._instances or ())
        failed = not mig and len(self.problems) > before
        self.mig = None if self._instances is None or failed else mig

    def query(
        self, what: str, function: str, *args: Any, of: Any = None, fine: Collection[int] = ()
    ) -> Any:
        """Call a function with the GPU's handle or another's; None when it has no answer.

        ``what`` is queried, in words; ``fine`` are the codes that are no problem.
        """
        if self.lost:
            return None
        answer, self.code = _call(self._nvml, function, self.handle if of is None else of, *args)
        self.lost = self.code == _GPU_IS_LOST
        if self.code and self.code not in fine:
            self._note(f"{what}: {_in_words(self._nvml, self.code)} ({function})")
        return answer

    def _note(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)

    def _mig_instances(self) -> list[tuple[MigInstance, Any]] | None:
        """The MIG instances with their handles, by slot; None when MIG is off (case D2)."""
        # Empty slots are left out, and instances whose UUID or ids are unknown
        modes = self.query("MIG mode", "nvmlDeviceGetMigMode", fine=_ABSENT)
        if modes is None or modes[0] != _MIG_ENABLED:
            return None
        found, by_slot = [], "nvmlDeviceGetMigDeviceHandleByIndex"
        for slot in range(self.query("MIG slots", "nvmlDeviceGetMaxMigDeviceCount") or 0):
            handle = self.query("MIG instances", by_slot, slot, fine=(_NOT_FOUND,))
            if handle is None:
                continue
            uuid = self.query("UUID of a MIG instance", "nvmlDeviceGetUUID", of=handle)
            gi = self.query("id of a MIG instance", "nvmlDeviceGetGpuInstanceId", of=handle)
            ci = self.query("id of a MIG instance", "nvmlDeviceGetComputeInstanceId", of=handle)
            if None not in (uuid, gi, ci):
                one = MigInstance(uuid=uuid, gpu_instance=gi, compute_instance=ci)
                found.append((one, handle))
        return found

    def devices(self) -> Iterator[tuple[Device, Any]]:
        """What can be claimed of it, with the handles."""
        if self.uuid is None:
            return
        if self._instances is None:
            yield Device(self.index, self.uuid, self.pci_bus_id, self.name), self.handle
        for one, handle in self._instances or ():
            part = (one.uuid, self.pci_bus_id, self.name, self.uuid, one.gpu_instance)
            yield Device(self.index, *part), handle

    def notes(self) -> list[str]:
        """What has failed so far, and whether it cannot be claimed."""
        if self.uuid is None:
            return [str(LeftOut(self.index, "; ".join(self.problems)))]
        nothing = [_NO_INSTANCE] if self._instances == [] else []
        return [f"GPU {self.index}: {problem}" for problem in (*self.problems, *nothing)]

    def left_out(self) -> LeftOut | None:
        """Why it cannot be claimed, though CUDA may count it."""
        if not self.denied and (self.lost or self.uuid is None):
            return LeftOut(self.index, "; ".join(self.problems))
        is_cut = not self.denied and self._instances == []
        return LeftOut(self.index, _NO_INSTANCE, cut=True) if is_cut else None

    def read(self) -> GpuReading:
        """Read its affinity."""
        of_cpus, of_memory = "nvmlDeviceGetCpuAffinityWithinScope", "nvmlDeviceGetMemoryAffinity"
        own = self.query("its own memory node", "nvmlDeviceGetNumaNodeId", fine=_ABSENT)
        return GpuReading(
            *(self.index, self.uuid, self.name, self.pci_bus_id),
            node_cpus=self._mask("CPUs of its node", of_cpus, _CPU_WORDS, _SCOPE_NODE),
            socket_cpus=self._mask("CPUs of its socket", of_cpus, _CPU_WORDS, _SCOPE_SOCKET),
            memory_nodes=self._mask("memory next to it", of_memory, _NODE_WORDS, _SCOPE_NODE),
            memory_node=None if own is None or own < 0 else int(own),
            mig=self.mig,
            denied=self.denied,
            lost=self.lost and not self.denied,
            problems=tuple(self.problems),
        )

    def _mask(self, what: str, function: str, words: int, scope: int) -> frozenset[int] | None:
        """The ids in one of NVML's masks; None when it is unknown or empty (case A1)."""
        mask = self.query(what, function, words, scope)
        if mask is None:
            return None
        ids = from_bits(int.from_bytes(bytes(mask), "little"))  # as are all CPUs with a driver
        if not ids:
            self._note(f"{what}: the mask is empty ({function})")
        return ids or None

    def usage(self, device: Device, handle: Any, *, utilization: bool) -> DeviceReading:
        """Read how it, or a MIG instance of it, is used now."""
        if not self.lost:
            self.problems.clear()
        rates = display = None
        if not device.is_mig:
            display = self.query("display", "nvmlDeviceGetDisplayActive")
            if utilization:
                rates = self.query("utilization", "nvmlDeviceGetUtilizationRates")
        mode = self.query("compute mode", "nvmlDeviceGetComputeMode")
        # Processes before memory: one that ends in between is listed, and its memory explained.
        compute = self._processes("its processes", "Compute", handle)
        fine = _NO_SUCH if device.is_mig else ()
        graphics = self._processes("its graphics", "Graphics", handle, fine=fine)
        used, free, total = self._memory(handle)
        if self.lost:
            return DeviceReading(device=device, lost=True, problems=tuple(self.problems[-1:]))
        return DeviceReading(
            device=device,
            compute=compute,
            graphics=graphics,
            used=used,
            free=free,
            total=total,
            utilization=int(rates.gpu) if rates else None,
            compute_mode=_COMPUTE_MODES.get(mode),
            display=None if display is None else bool(display),
            problems=tuple(self.problems),
        )

    def _processes(
        self, what: str, kind: str, handle: Any, *, fine: tuple[int, ...] = ()
    ) -> dict[int, int | None] | None:
        """The bytes of each process, where they are known; None when the driver does not say."""
        function = f"nvmlDeviceGet{kind}RunningProcesses"
        found = self.query(what, f"{function}_v3", of=handle, fine=(*fine, _FUNCTION_NOT_FOUND))
        if self.code == _FUNCTION_NOT_FOUND:  # a driver before R510
            found = self.query(what, f"{function}_v2", of=handle, fine=fine)
        if found is None:
            return None
        held: dict[int, int | None] = {}  # one on several MIG instances is listed for each
        for process in found:
            pid, more, before = process.pid, process.usedGpuMemory, held.get(process.pid, 0)
            held[pid] = None if before is None or more is None else before + more
        return held

    def _memory(self, handle: Any) -> tuple[int | None, int | None, int | None]:
        """Bytes in use, free and in total."""
        # Only the second version leaves out what the driver keeps for itself (480 MiB of an idle
        # H100). Without it the bytes in use say nothing, but those that are free are right.
        what, function = "memory in use", "nvmlDeviceGetMemoryInfo"
        memory = self.query(what, function, _MEMORY_V2, of=handle)
        if memory is not None:
            return memory.used, memory.free, memory.total
        memory = self.query("memory", function, of=handle)
        if memory is None:
            return None, None, None
        self._note(f"{what}: this driver adds what it keeps for itself, so the number is useless")
        return None, memory.free, memory.total

    def nvlinks(self) -> Counter[str | None] | None:
        """Its active NVLinks by PCI address of the peer, or _TO_SWITCH; None when unknown."""
        found: Counter[str | None] = Counter()
        for link in range(_MOST_NVLINKS):
            active = self.query("NVLinks", "nvmlDeviceGetNvLinkState", link, fine=_NO_SUCH)
            if self.lost or self.code not in (0, *_NO_SUCH):
                return None
            if self.code == _INVALID_ARGUMENT:
                break
            if not active:
                continue
            of_peer, address = "NVLink peers", None
            kind = self.query(of_peer, "nvmlDeviceGetNvLinkRemoteDeviceType", link, fine=_ABSENT)
            if kind != _PEER_SWITCH:
                remote = self.query(of_peer, "nvmlDeviceGetNvLinkRemotePciInfo", link)
                if remote is None:
                    return None
                address = pci_address(remote.busId)
            if address is not None:
                found[address] += 1
            elif kind != _PEER_GPU:  # a virtual machine does not show the switches
                found[_TO_SWITCH] += 1
        return found

    def path_to(self, other: _Gpu) -> str:
        """nvidia-smi's word for the PCIe path to another GPU."""
        function = "nvmlDeviceGetTopologyCommonAncestor"
        return _PATHS.get(self.query("path to other GPUs", function, other.handle), _UNKNOWN_LINK)


def _links(gpus: Sequence[_Gpu]) -> Matrix | None:
    """How each two GPUs are connected; None when no pair is known."""
    # NVLinks go before the PCIe path: all pairs of a machine with 4 x H100 share a host bridge and
    # have 18 links, which nvidia-smi calls ``NV18``
    nvlinks = {gpu: gpu.nvlinks() for gpu in gpus if len(gpus) > 1}
    words = {(gpu, gpu): "X" for gpu in gpus}
    for one, other in combinations(gpus, 2):
        word, mine, others = _UNKNOWN_LINK, nvlinks[one], nvlinks[other]
        if mine is not None and others is not None:
            direct = max(mine[other.pci_bus_id], others[one.pci_bus_id])
            count = direct + min(mine[_TO_SWITCH], others[_TO_SWITCH])
            word = f"NV{count}" if count else one.path_to(other)
        words[one, other] = words[other, one] = word
    if set(words.values()) == {"X", _UNKNOWN_LINK}:
        return None
    return tuple(tuple(words[one, other] for other in gpus) for one in gpus)


# ---- pynvml --------------------------------------------------------------------------------------


def _import_pynvml() -> Any:
    """The module pynvml, if it is nvidia-ml-py's."""
    # The distribution named pynvml once had a package of that name, which hides the right module
    try:
        with warnings.catch_warnings():  # its last releases warn, but our callers cannot choose
            warnings.simplefilter("ignore", FutureWarning)
            import pynvml
    except Exception as error:  # another module of that name may raise anything
        if isinstance(error, ModuleNotFoundError) and error.name == "pynvml":
            reason = "the Python module pynvml is not installed"
            raise NoDriverError(reason, "pip install nvidia-ml-py") from error
        problem = f"cannot be imported ({' '.join(str(error).split())})"
    else:
        if hasattr(pynvml, "nvmlDeviceGetHandleByIndex") and not hasattr(pynvml, "__path__"):
            return pynvml
        problem = f"is not nvidia-ml-py's: {pynvml}"
    raise NoDriverError(
        f"the Python module pynvml {problem}",
        "pip uninstall -y pynvml && pip install --force-reinstall nvidia-ml-py",
    )


def _call(nvml: Any, function: str, *args: Any) -> tuple[Any, int]:
    """Call one function: its answer and 0, or None and NVML's code of what went wrong."""
    # A release of pynvml that lacks the function counts as a driver that lacks it
    called = getattr(nvml, function, None)
    if called is None:
        return None, _FUNCTION_NOT_FOUND
    try:
        return called(*args), 0
    except nvml.NVMLError as error:
        return None, int(error.value)
    except UnicodeError:  # a string that pynvml cannot decode
        return None, _UNKNOWN


def _in_words(nvml: Any, code: int) -> str:
    return " ".join(str(nvml.NVMLError(code)).split())[:120] or f"NVML error {code}"


_REASONS = {
    _NO_PERMISSION: (
        "this user may not talk to the NVIDIA driver",
        "check the access rights of /dev/nvidia*, or the devices that the container was given",
    ),
    9: (  # DRIVER_NOT_LOADED
        "the kernel module of the NVIDIA driver is not loaded",
        "load it (modprobe nvidia), or start the container with its GPUs",
    ),
    12: (  # LIBRARY_NOT_FOUND
        "the NVIDIA driver's library NVML (libnvidia-ml.so.1) cannot be loaded",
        "install the driver, or start the container with its GPUs; Jetson and macOS have no NVML",
    ),
    _FUNCTION_NOT_FOUND: ("the NVIDIA driver's library NVML is too old", "update the driver"),
    _GPU_IS_LOST: (
        "the NVIDIA driver has lost a GPU (it has fallen off the bus)",
        "look for Xid in dmesg, and reboot",
    ),
    18: (  # LIB_RM_VERSION_MISMATCH
        "the NVIDIA driver's kernel module and library differ (driver/library version mismatch)",
        "reboot, or reload the nvidia modules; a container needs the host's driver version",
    ),
}


def _no_driver(nvml: Any, code: int) -> NoDriverError:
    """Why NVML cannot be used, and what to try (cases F3, F5)."""
    meaning, _ = _call(nvml, "nvmlErrorString", code)
    if "stub library" in (meaning or ""):
        return NoDriverError(
            "the libnvidia-ml.so.1 that was found is the stub for building, not the driver's",
            "take CUDA's stubs folder out of LD_LIBRARY_PATH, and install the NVIDIA driver",
        )
    if code in _REASONS:
        return NoDriverError(*_REASONS[code])
    return NoDriverError(
        f"the NVIDIA driver's library NVML does not start: {_in_words(nvml, code)}",
        "see whether nvidia-smi runs; in a container, restart the container",
    )
