"""Which processes compute on a GPU, as the driver tells it.

The numbers are process ids of the first PID namespace, or of the driver's choice: inside a
container they may mean nothing, or another process (case E15). Only the caller can tell.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from gpuaff.records import dataclass
from gpuaff.system.nvml_calls import Code, Questions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

COMPUTE = "nvmlDeviceGetComputeRunningProcesses"
GRAPHICS = "nvmlDeviceGetGraphicsRunningProcesses"


@dataclass(frozen=True, kw_only=True)
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
