"""NVML, the driver's management library: the only module that imports pynvml.

NVML is started late, for one reading, and shut down after it. NVML counts its starts, so a
program that uses pynvml itself notices nothing. Each of its functions may be Not Supported,
missing from the library or fail on its own: then what it would have told is None, a problem
says so, and all the rest is read (case F1).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from gpuaff._system.nvml_calls import Code, Questions, address_of, call, text, words
from gpuaff._system.nvml_links import Matrix, read_links
from gpuaff.cpuset import CpuSet, from_bits
from gpuaff.errors import NoDriverError
from gpuaff.topology.model import MigInstance

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpuaff._system.nvml_usage import GpuUsers, UsageSession

_NODE, _SOCKET = 0, 1
"""NVML_AFFINITY_SCOPE_NODE and …_SOCKET."""

_WORD_BITS = 64
"""The bits of one element of NVML's masks."""

_MOST_WORDS = 1024
"""The longest mask that is asked for, in words: 65536 ids."""

_MOST_GPUS = 1024
"""More than any machine has: whoever tells of more is not to be believed."""

_HIGHEST_MEMORY_NODE = 1023
"""Linux' own limit of node ids (MAX_NUMNODES)."""

_CPUS = "nvmlDeviceGetCpuAffinityWithinScope"
_MEMORY = "nvmlDeviceGetMemoryAffinity"

_MIG_ON = 1
"""NVML_DEVICE_MIG_ENABLE."""

_HAS_NONE = (Code.NOT_SUPPORTED, Code.FUNCTION_NOT_FOUND)
"""For what few GPUs have: answers that say no more than that this one does not have it."""

_NEEDED = ("nvmlInit", "nvmlShutdown", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex")
"""What every pynvml that can be worked with has; the rest may be missing one by one."""

_MEND = "pip uninstall -y pynvml && pip install --force-reinstall nvidia-ml-py"

_WHY = {
    Code.NO_PERMISSION: (
        "this user may not talk to the NVIDIA driver",
        "check the access rights of /dev/nvidia*, or the devices that the container was given",
    ),
    Code.DRIVER_NOT_LOADED: (
        "the kernel module of the NVIDIA driver is not loaded",
        "load it (modprobe nvidia), or start the container with its GPUs",
    ),
    Code.LIBRARY_NOT_FOUND: (
        "the NVIDIA driver's library NVML (libnvidia-ml.so.1) cannot be loaded",
        "install the driver, or start the container with its GPUs; Jetson and macOS have no NVML",
    ),
    Code.FUNCTION_NOT_FOUND: (
        "the NVIDIA driver's library NVML is too old",
        "update the driver",
    ),
    Code.GPU_IS_LOST: (
        "the NVIDIA driver has lost a GPU (it has fallen off the bus)",
        "look for Xid in dmesg, and reboot",
    ),
    Code.LIB_RM_VERSION_MISMATCH: (
        "the NVIDIA driver's kernel module and library differ (driver/library version mismatch)",
        "reboot, or reload the nvidia modules; a container needs the host's driver version",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """What the driver says about one GPU; None is what it does not say.

    Attributes:
        index: NVML's index.
        uuid: the full ``GPU-…`` UUID.
        name: the product name.
        pci_bus_id: the PCI address as sysfs spells it, ``0000:07:00.0``.
        node_cpus: the CPUs of its NUMA node. Never empty: an empty mask is None (case A1).
        socket_cpus: the CPUs of its socket; never empty.
        memory_nodes: the NUMA nodes whose memory is next to it; never empty.
        memory_node: the NUMA node that is its own memory (GH200).
        mig: its MIG instances; None when MIG is off, not supported or unknown (case D2).
        denied: whether this process may not use it at all (a device cgroup).
        lost: whether it has fallen off the bus, or NVML gives no handle for another reason.
        problems: what failed, in words.
    """

    index: int
    uuid: str | None = None
    name: str | None = None
    pci_bus_id: str | None = None
    node_cpus: CpuSet | None = None
    socket_cpus: CpuSet | None = None
    memory_nodes: frozenset[int] | None = None
    memory_node: int | None = None
    mig: tuple[MigInstance, ...] | None = None
    denied: bool = False
    lost: bool = False
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverReading:
    """What the driver says about a machine.

    Attributes:
        gpus: the GPUs, by NVML's index.
        links: how GPU ``i`` and GPU ``j`` are connected, in nvidia-smi's words (``NV18``,
            ``PIX``, ``SYS``, ``X``; ``N/A`` for a pair that is not known). None when it was
            not asked for, or nothing about it is known.
        driver_version: e.g. ``580.159.04``.
        notes: what failed and belongs to no GPU, in words.
    """

    gpus: tuple[GpuReading, ...] = ()
    links: Matrix | None = None
    driver_version: str | None = None
    notes: tuple[str, ...] = ()


def read(*, highest_cpu: int, links: bool = False) -> DriverReading:
    """Ask the driver about all GPUs of the machine.

    Args:
        highest_cpu: the highest CPU id that is possible on this machine; from it follows how
            long the masks are (cases G1, G2). The number of CPUs would not do.
        links: also ask how the GPUs are connected.

    Raises:
        NoDriverError: NVML cannot be used here.
    """
    with _started() as nvml:
        count = _count(nvml)
        version, code = call(nvml, "nvmlSystemGetDriverVersion")
        notes = (f"driver version: {words(nvml, code)}",) if code else ()
        asked = [Questions.about(nvml, index) for index in range(count)]
        gpus = [_gpu(gpu, index, highest_cpu) for index, gpu in enumerate(asked)]
        matrix = read_links(asked, [gpu.pci_bus_id for gpu in gpus]) if links else None
    return DriverReading(
        gpus=tuple(
            replace(
                gpu,
                denied=questions.denied,
                lost=questions.lost and not questions.denied,
                problems=tuple(questions.problems),
            )
            for gpu, questions in zip(gpus, asked, strict=True)
        ),
        links=matrix,
        driver_version=text(version),
        notes=notes,
    )


def users() -> tuple[GpuUsers, ...]:
    """Ask the driver which processes compute on each GPU.

    Raises:
        NoDriverError: NVML cannot be used here.
    """
    from gpuaff._system.nvml_usage import read_users  # pinning needs none of it

    with _started() as nvml:
        return tuple(read_users(nvml, index) for index in range(_count(nvml)))


@contextmanager
def usage_session() -> Iterator[UsageSession]:
    """Keep NVML started, to look at how devices are used as often as needed.

    Raises:
        NoDriverError: NVML cannot be used here.
    """
    from gpuaff._system.nvml_usage import UsageSession  # pinning needs none of it

    with _started() as nvml:
        yield UsageSession(nvml, _count(nvml))


def _count(nvml: Any) -> int:
    count, code = call(nvml, "nvmlDeviceGetCount")
    if code:
        raise _no_driver(nvml, code)
    if count > _MOST_GPUS:
        raise NoDriverError(
            f"the NVIDIA driver's library NVML tells of {count} GPUs, which cannot be",
            "see whether nvidia-smi runs, and which libnvidia-ml.so.1 LD_LIBRARY_PATH names",
        )
    return int(count)


@contextmanager
def _started() -> Iterator[Any]:
    """The module pynvml with NVML started; each start has its shutdown, come what may."""
    nvml = _pynvml()
    code = _unlocked(nvml, "nvmlInit")
    if code:
        raise _no_driver(nvml, code)
    try:
        yield nvml
    finally:
        _unlocked(nvml, "nvmlShutdown")


def _unlocked(nvml: Any, function: str) -> int:
    """Call a function that takes pynvml's own lock, and see to it that it is given back.

    pynvml (13.615) does not give it back when Ctrl-C comes meanwhile, and the next start would
    wait for ever. Others have it for an instant only, so it is not theirs.
    """
    try:
        return call(nvml, function)[1]
    except BaseException:
        lock: Any = getattr(nvml, "libLoadLock", None)
        with suppress(AttributeError, RuntimeError):
            if lock.locked():
                lock.release()
        raise


def _pynvml() -> Any:
    """The module pynvml, if it is nvidia-ml-py's.

    The distribution that is itself called pynvml once had a package of that name, which hides
    the right module. Now it is a shell around nvidia-ml-py that warns whoever imports it: not
    what our callers should hear, as they have not chosen it.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            import pynvml
    except ModuleNotFoundError as error:
        if error.name != "pynvml":
            raise _wrong_module(f"cannot be imported ({error})") from error
        reason = "the Python module pynvml is not installed"
        raise NoDriverError(reason, "pip install nvidia-ml-py") from error
    except Exception as error:  # it may be anything, and run anything
        raise _wrong_module(f"cannot be imported ({error})") from error
    lacking = [name for name in (*_NEEDED, "NVMLError") if not hasattr(pynvml, name)]
    if hasattr(pynvml, "__path__") or lacking:
        where = getattr(pynvml, "__file__", None) or next(iter(getattr(pynvml, "__path__", "?")))
        raise _wrong_module(f"is not nvidia-ml-py's ({where})")
    return pynvml


def _wrong_module(found: str) -> NoDriverError:
    line = " ".join(found.split())
    return NoDriverError(f"the Python module pynvml {line}", f"mend it with: {_MEND}")


def _no_driver(nvml: Any, code: int) -> NoDriverError:
    """Why NVML cannot be used, and what to try (cases F3, F5)."""
    said, _ = call(nvml, "nvmlErrorString", code)
    if "stub library" in (text(said) or ""):
        return NoDriverError(
            "the libnvidia-ml.so.1 that was found is the stub for building, not the driver's",
            "take CUDA's stubs folder out of LD_LIBRARY_PATH, and install the NVIDIA driver",
        )
    if code in _WHY:
        return NoDriverError(*_WHY[Code(code)])
    return NoDriverError(
        f"the NVIDIA driver's library NVML does not start: {words(nvml, code)}",
        "see whether nvidia-smi runs; in a container, start it anew",
    )


def _gpu(gpu: Questions, index: int, highest_cpu: int) -> GpuReading:
    """What one GPU tells, but for its problems: they may still grow."""
    return GpuReading(
        index=index,
        uuid=text(gpu.ask("UUID", "nvmlDeviceGetUUID")),
        name=text(gpu.ask("name", "nvmlDeviceGetName")),
        pci_bus_id=address_of(gpu),
        node_cpus=_node_cpus(gpu, highest_cpu),
        socket_cpus=_mask(gpu, "CPUs of its socket", _CPUS, highest_cpu, _SOCKET),
        memory_nodes=_mask(gpu, "memory next to it", _MEMORY, _HIGHEST_MEMORY_NODE, _NODE),
        memory_node=_own_node(gpu),
        mig=_mig(gpu),
    )


def _node_cpus(gpu: Questions, highest_cpu: int) -> CpuSet | None:
    """The CPUs of a GPU's node. Old drivers know no scopes and mean the node."""
    what = "CPUs of its node"
    found = _mask(gpu, what, _CPUS, highest_cpu, _NODE, fine=(Code.FUNCTION_NOT_FOUND,))
    if gpu.code == Code.FUNCTION_NOT_FOUND:
        return _mask(gpu, what, "nvmlDeviceGetCpuAffinity", highest_cpu)
    return found


def _own_node(gpu: Questions) -> int | None:
    node = gpu.ask("its own memory node", "nvmlDeviceGetNumaNodeId", fine=_HAS_NONE)
    return None if node is None or node < 0 else int(node)


def _mask(
    gpu: Questions, what: str, function: str, highest: int, *scope: int, fine: tuple[int, ...] = ()
) -> frozenset[int] | None:
    """The ids in one of NVML's masks; None when there is none or it is empty (case A1)."""
    size = highest // _WORD_BITS + 1
    found = gpu.ask(what, function, size, *scope, fine=(*fine, Code.INSUFFICIENT_SIZE))
    if gpu.code == Code.INSUFFICIENT_SIZE:
        found = gpu.ask(what, function, _MOST_WORDS, *scope, fine=fine)
    if found is None:
        return None
    ids = from_bits(sum(word << _WORD_BITS * place for place, word in enumerate(found)))
    if not ids:
        gpu.keep(f"{what}: the mask is empty ({function})")
    return ids or None


def _mig(gpu: Questions) -> tuple[MigInstance, ...] | None:
    """The MIG instances of a GPU, by slot; None when MIG is off or unknown (case D2)."""
    modes = gpu.ask("MIG mode", "nvmlDeviceGetMigMode", fine=_HAS_NONE)
    if modes is None or modes[0] != _MIG_ON:
        return None
    before = len(gpu.problems)
    slots = gpu.ask("MIG slots", "nvmlDeviceGetMaxMigDeviceCount")
    found = (_mig_instance(gpu, slot) for slot in range(slots or 0))
    instances = tuple(instance for instance in found if instance is not None)
    return instances if instances or len(gpu.problems) == before else None


def _mig_instance(gpu: Questions, slot: int) -> MigInstance | None:
    """The instance in one slot; None when the slot is empty, or it does not tell who it is."""
    empty = (Code.NOT_FOUND,)
    handle = gpu.ask("MIG instances", "nvmlDeviceGetMigDeviceHandleByIndex", slot, fine=empty)
    if handle is None:
        return None
    uuid = text(gpu.ask_of(handle, "UUID of a MIG instance", "nvmlDeviceGetUUID"))
    gi = gpu.ask_of(handle, "id of a MIG instance", "nvmlDeviceGetGpuInstanceId")
    ci = gpu.ask_of(handle, "id of a MIG instance", "nvmlDeviceGetComputeInstanceId")
    if uuid is None or gi is None or ci is None:
        return None
    return MigInstance(uuid=uuid, gpu_instance=gi, compute_instance=ci)
